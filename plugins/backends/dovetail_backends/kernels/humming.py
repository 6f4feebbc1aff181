"""Kernel set `humming`: products with 4-bit integers by the library `humming-kernels`, in CUDA C++.

The library compiles a kernel for each shape and range of rows when a matrix is packed, and keeps it in `~/.humming`.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec
from typing import Literal

from dovetail.contracts.kernels import Ask, Claim, Kernel, KernelSet

DISTRIBUTION, MODULE = "humming-kernels", "humming"
PRODUCTS = frozenset({"packed_linear", "packed_norm_linear", "packed_norm_gate"})
AMPERE, HOPPER = (8, 0), (9, 0)
STEP = 128
"""Outputs and inputs that matrices have a multiple of: those of a tile of four warps."""


@dataclass
class HummingOptions:
    """Settings of the set."""

    few_rows: int = field(
        default=32,
        metadata={
            "help": "Most rows that a second copy of each matrix multiplies, as the set triton packs it, which is "
            "faster for few; 0: no second copy, which halves the memory of weights."
        },
    )
    activations: Literal["model", "float8"] = field(
        default="model",
        metadata={"help": "Dtype of more rows: the model's, or float8, each row rounded with its own scale."},
    )


class HummingKernels(KernelSet):
    """Int4 in groups; with few rows the set `triton` is faster, so a second copy is packed for it, from Hopper on."""

    devices = frozenset({"cuda"})
    Options = HummingOptions

    def serves(self, ask: Ask) -> Claim | str:
        """See `KernelSet.serves`."""
        if ask.op not in PRODUCTS:
            return "it multiplies by packed weights"
        if find_spec(MODULE) is None:
            return f"{DISTRIBUTION} is not installed; run: pip install 'dovetail-llm[humming]'"
        from dovetail.sdk.quantization.forms import Int4  # imports torch, as forms did

        form, dims, capability = ask.option("form"), dict(ask.dims), ask.device.capability or (0, 0)
        if ask.device.kind != "cuda" or capability < AMPERE:
            return f"it runs on CUDA from compute capability {AMPERE[0]}.{AMPERE[1]} on"
        if ask.dtype not in ("bfloat16", "float16"):
            return f"no kernel for {ask.dtype}"
        if not isinstance(form, Int4) or not form.group or form.group not in (32, 64, 128):
            return f"no kernel for {form}"
        if dict(ask.options).get("act") == "relu2":
            return "no kernel for relu2"
        if ask.invariant:
            return "its rows would depend on how many there are"
        outputs = dims["N"] if "N" in dims else 2 * dims["F"]
        if outputs % STEP or dims["K"] % STEP:
            return f"{outputs} outputs and {dims['K']} inputs are no multiples of {STEP}"
        return Claim(ask.rows, capturable=True)

    def keeps_packed(self, ask: Ask) -> bool:
        """See `KernelSet.keeps_packed`."""
        return isinstance(self.serves(ask), Claim)

    def make(self, ask: Ask) -> Kernel:
        """See `KernelSet.make`."""
        from dovetail_backends.kernels.humming_products import HummingNormedProduct, HummingProduct

        is_new = (ask.device.capability or (0, 0)) >= HOPPER
        few_rows = self.options.few_rows if is_new else 0
        made = HummingProduct if ask.op == "packed_linear" else HummingNormedProduct
        return made(ask, few_rows=few_rows, in_float8=self.options.activations == "float8")

    @classmethod
    def library(cls) -> str:
        """See `KernelSet.library`."""
        try:
            return version(DISTRIBUTION)
        except PackageNotFoundError:
            return ""
