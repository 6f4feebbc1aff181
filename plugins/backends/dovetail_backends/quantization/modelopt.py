"""`modelopt`: what NVIDIA's Model Optimizer writes, in fp8 and nvfp4.

The configuration stands in `config.json` or in `hf_quant_config.json`; `quant_algo` names the format. For a matrix `[N,
K]`:

- FP8 and its relatives: `weight` e4m3 and `weight_scale` float32 `[]`, `[N]`, `[N, 1]` or one for each 128 x 128 block,
  also as `[N / 128, 1, K / 128, 1]`;
- NVFP4: `weight` uint8 `[N, K / 2]`, the lower nibble first, `weight_scale` e4m3 `[N, K / 16]`, and `weight_scale_2`
  float32 `[]`, which numbers are multiplied by.

The scales of an fp8 cache are not used, `input_scale` as `RoundsActivations` says. Source: vLLM,
`quantization/modelopt.py`, read November 2026.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from dovetail.contracts.quantization import Conversion, FileTensor, Target
from dovetail.sdk.quantization.forms import Form
from dovetail_backends.quantization.fp4 import nvfp4
from dovetail_backends.quantization.fp8 import BLOCK, ROWS, RoundsActivations, float8
from dovetail_backends.quantization.keys import PLAIN_MODULES, known
from dovetail_backends.quantization.modules import Reads, dropped, grouped

ALGOS = ("FP8", "FP8_PER_CHANNEL_PER_TOKEN", "FP8_PB_WO", "NVFP4", "MIXED_PRECISION")
METHODS = ("modelopt", "modelopt_fp4", "modelopt_mixed")


class Modelopt(RoundsActivations):
    """Reads fp8 and nvfp4, module by module."""

    keys = known(
        PLAIN_MODULES,
        "quant_algo kv_cache_quant_algo kv_cache_scheme group_size producer config_groups quantization",
        "quantized_layers provider",
    )
    reads = (
        Reads("FP8: tensors, rows or blocks", "float8_e4m3fn", 8),
        Reads("NVFP4", "nvfp4", 4 + 8 / 16),
    )

    @classmethod
    def why_not(cls, config: Mapping[str, Any]) -> str | None:
        """Say why a checkpoint cannot be served."""
        if (method := config.get("quant_method")) not in METHODS:
            return f"it reads quant_method 'modelopt', not {method!r}"
        inner = config.get("quantization")
        algo = config.get("quant_algo") or (inner.get("quant_algo") if isinstance(inner, Mapping) else None)
        if not isinstance(algo, str) or algo.upper() not in ALGOS:
            return f"quant_algo is {algo!r}; possible: {', '.join(ALGOS)}"
        return None

    @classmethod
    def read_modules(
        cls, config: Mapping[str, Any], tensors: Mapping[str, FileTensor], target: Target
    ) -> Iterable[Conversion]:
        """Scale numbers."""
        halves = {
            name.removesuffix(".weight") for name, t in tensors.items() if t.dtype == "U8" and name.endswith(".weight")
        }
        of_fp4 = {name: tensor for name, tensor in tensors.items() if name.rpartition(".")[0] in halves}
        used: set[str] = set()
        for module in grouped(of_fp4, (".weight_scale", ".weight_scale_2"), ".weight"):
            used |= {tensor.name for tensor in module.tensors.values()}
            yield nvfp4(module, ".weight", ".weight_scale", ".weight_scale_2", target, divides=False)
        left = {name: tensor for name, tensor in tensors.items() if name not in used}
        yield from float8(left, target, BLOCK)
        yield from dropped(left)

    def _algo(self) -> str:
        inner = self.config.get("quantization")
        algo = self.config.get("quant_algo") or (inner.get("quant_algo") if isinstance(inner, Mapping) else "")
        return str(algo).upper()

    def is_said_to_round(self) -> bool:
        """All of its fp8 does, but `FP8_PB_WO`: weights only."""
        return self._algo() in ("FP8", "FP8_PER_CHANNEL_PER_TOKEN")

    def dummy(self) -> Form | None:
        """Return rows of fp8, or the model's dtype."""
        return ROWS if self._algo().startswith("FP8") else None
