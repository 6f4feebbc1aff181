"""Kernel set `triton`: our own kernels for CUDA devices, in Triton."""

from __future__ import annotations

from functools import partial
from importlib import import_module

from dovetail.contracts.kernels import Ask, Claim, Kernel, KernelSet

DTYPES = frozenset({"float32", "bfloat16", "float16"})
_PACKAGE = "dovetail_backends.kernels.triton"
MADE = {
    "rms_norm": "norms:rms_norm",
    "add_rms_norm": "norms:add_rms_norm",
    "norm_rotate": "norms:norm_rotate",
    "rotations": "norms:rotations",
    "act_and_mul": "norms:silu_and_mul",
    "latent_rows": "latent:latent_rows",
    "mask_logits": "mask:mask_logits",
    "draw": "draw:draw_rows",
    "draw_plainly": "adjust:draw_plainly",
    "draw_adjusted": "adjust:draw_adjusted",
    "begin_step": "step:begin_step",
    "finish_step": "step:finish_step",
    "check_finite": "step:check_finite",
    "write_changes": "row_changes:write_changes",
}
"""By operation, the module of this package and its function that computes it."""
DRAWS = frozenset({"draw", "draw_plainly", "draw_adjusted"})


class TritonKernels(KernelSet):
    """Our own kernels; each program computes rows of its own, whatever stands beside them."""

    devices = frozenset({"cuda"})
    modules = tuple(dict.fromkeys(f"{_PACKAGE}.{target.partition(':')[0]}" for target in MADE.values()))

    def serves(self, ask: Ask) -> Claim | str:
        """See `KernelSet.serves`."""
        if ask.device.kind != "cuda" and not ask.device.is_interpreted:
            return f"it runs on cuda, not on {ask.device.kind}"
        if ask.dtype not in DTYPES:
            return f"no kernel for {ask.dtype}"
        if ask.op == "act_and_mul" and ask.option("act") != "silu_and_mul":
            return f"no kernel for {ask.option('act')}"
        if ask.op == "rotations" and ask.dim("F") != 1:
            return "no kernel with a factor for each frequency"
        if ask.op not in MADE:
            return f"no kernel for {ask.op}"
        return Claim(ask.rows, capturable=True, row_independent=ask.op not in DRAWS or ask.invariant)

    def make(self, ask: Ask) -> Kernel:
        """See `KernelSet.make`."""
        module, _, name = MADE[ask.op].partition(":")
        made: Kernel = getattr(import_module(f"{_PACKAGE}.{module}"), name)  # imports Triton
        if ask.op == "rotations":
            return partial(made, dtype=ask.option("dtype"))
        return partial(made, apart=ask.invariant) if ask.op in DRAWS else made
