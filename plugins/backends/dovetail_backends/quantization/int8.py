"""`int8`: plain checkpoints are quantised to 8 bits while they load, each row by itself.

Checkpoints that are in int8 already are read by `compressed-tensors`; asked for by name, this reads those of its
`int-quantized` format too.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import torch

from dovetail.contracts.quantization import Conversion, FileTensor, Target
from dovetail.sdk.quantization.forms import Form, Scaled
from dovetail_backends.quantization.compressed_tensors import METHOD, CompressedTensors
from dovetail_backends.quantization.modules import MADE, Reads
from dovetail_backends.quantization.on_load import HeadOptions, quantised, rows_of

FORMAT = "int-quantized"


class Int8(CompressedTensors):
    """Makes int8 of plain checkpoints."""

    reads = (Reads(MADE, "int8", 8),)
    Options = HeadOptions

    @classmethod
    def why_not(cls, config: Mapping[str, Any]) -> str | None:
        """Say why a checkpoint cannot be served."""
        if not config:
            return None
        found = config.get("quant_method"), config.get("format")
        if found != (METHOD, FORMAT):
            return f"it quantises plain checkpoints; this one has quant_method {found[0]!r}: leave --quantization out"
        return super().why_not(config)

    @classmethod
    def read_modules(
        cls, config: Mapping[str, Any], tensors: Mapping[str, FileTensor], target: Target
    ) -> Iterable[Conversion]:
        """Make numbers and scales of each matrix."""
        return super().read_modules(config, tensors, target) if config else quantised(tensors, rows_of(Scaled()))

    def activations(self) -> torch.dtype | None:
        """Its activations keep the model's dtype."""
        return None

    def head(self) -> Form | None:
        """Return int8 where it is asked for."""
        return self.options.head_form if self.options else None

    def dummy(self) -> Form | None:
        """Return rows of int8."""
        return super().dummy() if self.config else Scaled()

    def dummy_experts(self) -> Form | None:
        """Return rows of int8."""
        return super().dummy_experts() if self.config else Scaled()
