"""`int4`: plain checkpoints are quantised to 4 bits while they load, 128 inputs of a row at a time, or 64 or 32."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from dovetail.contracts.quantization import Conversion, FileTensor, Target
from dovetail.sdk.quantization.forms import Form
from dovetail.sdk.quantization.forms import Int4 as Int4Form
from dovetail_backends.quantization.modules import MADE, PackedQuantization, Reads
from dovetail_backends.quantization.on_load import HeadOptions, int4_of, quantised


class Int4(PackedQuantization):
    """Makes int4 of plain checkpoints."""

    reads = (Reads(MADE, "int4", 4 + 16 / 128),)
    Options = HeadOptions

    @classmethod
    def why_not(cls, config: Mapping[str, Any]) -> str | None:
        """Say why a checkpoint cannot be served."""
        if not config:
            return None
        return f"it quantises plain checkpoints; this one has {config.get('quant_method')!r}: leave --quantization out"

    @classmethod
    def read_modules(
        cls, config: Mapping[str, Any], tensors: Mapping[str, FileTensor], target: Target
    ) -> Iterable[Conversion]:
        """Make words and scales of each matrix."""
        return quantised(tensors, int4_of)

    def dummy(self) -> Form | None:
        """Return groups of 128."""
        return Int4Form()

    def head(self) -> Form | None:
        """Return int8 where it is asked for."""
        return self.options.head_form if self.options else None
