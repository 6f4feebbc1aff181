"""`mxfp4`: 4-bit floating point with a power of two for every 32 inputs, as gpt-oss is published.

For the experts' matrices `[E, N, K]`: `experts.gate_up_proj_blocks` uint8 `[E, N, K / 32, 16]`, two numbers a byte, the
lower nibble first, and `experts.gate_up_proj_scales` uint8 `[E, N, K / 32]`; the number is `E2M1[nibble] * 2 ** (scale
- 127)`. Rows of gate and up take turns, and biases (`_bias`) are plain. Rules for gpt-oss know the matrices in 16 bits
as `[E, K, N]`, so they are turned. Matrices without experts are `M_blocks` `[N, K / 32, 16]`, and are not.

Source: transformers 5, `integrations/mxfp4.py`, read November 2026.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from dovetail.contracts.quantization import Conversion, FileTensor, Target
from dovetail.sdk.quantization import forms as packed_forms
from dovetail_backends.quantization.fp4 import mxfp4
from dovetail_backends.quantization.keys import PLAIN_MODULES, known
from dovetail_backends.quantization.modules import PackedQuantization, Reads, dropped, grouped


class Mxfp4(PackedQuantization):
    """Reads gpt-oss as published."""

    keys = known(PLAIN_MODULES, "dequantize")
    reads = (Reads("gpt-oss as published", "mxfp4", 4 + 8 / 32),)

    @classmethod
    def why_not(cls, config: Mapping[str, Any]) -> str | None:
        """Say why a checkpoint cannot be served."""
        method = config.get("quant_method")
        return None if method == "mxfp4" else f"it reads quant_method 'mxfp4', not {method!r}"

    @classmethod
    def read_modules(
        cls, config: Mapping[str, Any], tensors: Mapping[str, FileTensor], target: Target
    ) -> Iterable[Conversion]:
        """Bring blocks into rows, or write them out."""
        for module in grouped(tensors, ("_scales",), "_blocks"):
            is_turned = len(module.need("_scales").shape) == 3
            module.weight += "" if is_turned else ".weight"
            yield from mxfp4(module, "_blocks", "_scales", target, turned=is_turned)
        yield from dropped(tensors)

    def dummy_experts(self) -> packed_forms.Form | None:
        """Return mxfp4: what is published has its experts in it, and nothing else."""
        return packed_forms.Mxfp4()
