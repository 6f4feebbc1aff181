"""Kernel set `cpu-int8`: products with int8 weights on CPU, each one call of a library in C.

The call reads the weight as it is stored. It also computes what stands around a product: the RMS norm before it, and
the bias, the residual addition or SiLU behind it. T tokens, N outputs, K inputs.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal

from dovetail.contracts import Ask, Claim, KernelSet
from dovetail.contracts.kernels import Kernel
from dovetail_cpu_int8.library import NAMES, paths

if TYPE_CHECKING:
    import torch

OPS = ("packed_linear", "packed_norm_linear", "packed_norm_gate")
MAX_INPUTS = 65536
"""The sum of so many products of bytes fits 32 bits."""


@dataclass
class CpuInt8Options:
    """Settings."""

    path: Literal["auto", "avx512", "avx2", "plain"] = field(
        default="auto",
        metadata={"help": "Instructions to use. auto: the best the processor has; it does not take plain C by itself."},
    )


class CpuInt8(KernelSet):
    """Products with a scale per output, of models in bfloat16."""

    devices = frozenset({"cpu"})
    Options = CpuInt8Options

    def serves(self, ask: Ask) -> Claim | str:
        """See `KernelSet.serves`."""
        if ask.op not in OPS:
            return f"no kernel for {ask.op}"
        if ask.device.kind != "cpu":
            return f"it runs on cpu, not on {ask.device.kind}"
        if why := self._why_not(ask) or paths().why_not(self._path):
            return why
        return Claim(ask.rows, row_independent=True)

    def _why_not(self, ask: Ask) -> str:
        if ask.option("form") is None:
            return "it has products with int8 weights, not with plain ones"
        from dovetail_cpu_int8.kernels import is_int8  # imports torch, as who has a form did

        if not is_int8(ask.option("form")):
            return f"it has products with int8 weights and a scale per output, not with {ask.option('form')}"
        if ask.dtype != "bfloat16":
            return f"models in bfloat16, not in {ask.dtype}"
        if ask.dim("K") > MAX_INPUTS:
            return f"{ask.dim('K')} inputs, {MAX_INPUTS} at most"
        if dict(ask.options).get("act", "silu_and_mul") != "silu_and_mul":
            return f"its gated products have silu_and_mul, not {ask.option('act')}"
        return ""

    @property
    def _path(self) -> str:
        return self.options.path if self.options else "auto"

    def make(self, ask: Ask) -> Kernel:
        """See `KernelSet.make`."""
        from dovetail_cpu_int8 import kernels

        made: Kernel = kernels.OPS[ask.op](paths().number(self._path))
        return made

    def trial(self, ask: Ask, rows: int, device: torch.device) -> Sequence[Any] | None:
        """See `KernelSet.trial`: with the norm and the residual that most products of a model have."""
        from dovetail_cpu_int8 import kernels

        found = super().trial(ask, rows, device)
        return found if found is None or ask.op == "packed_linear" else kernels.with_neighbours(ask, found)

    @classmethod
    def library(cls) -> str:
        """See `KernelSet.library`: figures of other instructions are forgotten."""
        return " ".join(NAMES.get(name, name) for name in paths().found)
