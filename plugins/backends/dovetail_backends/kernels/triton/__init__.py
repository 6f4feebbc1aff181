"""Kernel set `triton`: norms, rotary embedding, rows of latent attention and the gate of an MLP, for CUDA devices."""

from __future__ import annotations

from functools import partial

from dovetail.contracts.kernels import Ask, Claim, Kernel, KernelSet

DTYPES = frozenset({"float32", "bfloat16", "float16"})
PLACES = frozenset({"rms_norm", "add_rms_norm", "norm_rotate", "latent_rows", "rotations"})


class TritonKernels(KernelSet):
    """Our own kernels; each program computes rows of its own, whatever stands beside them."""

    devices = frozenset({"cuda"})

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
        if ask.op not in PLACES and ask.op != "act_and_mul":
            return f"no kernel for {ask.op}"
        return Claim(ask.rows, capturable=True, row_independent=True)

    def make(self, ask: Ask) -> Kernel:
        """See `KernelSet.make`."""
        from dovetail_backends.kernels.triton import latent, norms  # they import Triton

        made: dict[str, Kernel] = {
            "rms_norm": norms.rms_norm,
            "add_rms_norm": norms.add_rms_norm,
            "norm_rotate": norms.norm_rotate,
            "latent_rows": latent.latent_rows,
            "act_and_mul": norms.silu_and_mul,
        }
        return partial(norms.rotations, dtype=ask.option("dtype")) if ask.op == "rotations" else made[ask.op]
