"""Kernel set `triton`: our own kernels for CUDA devices, in Triton."""

from __future__ import annotations

from functools import partial
from importlib import import_module
from typing import Any

from dovetail.contracts.kernels import OPS, Ask, Claim, Kernel, KernelSet
from dovetail.contracts.ranks import PeerMemory

DTYPES = frozenset({"float32", "bfloat16", "float16"})
_PACKAGE = "dovetail_backends.kernels.triton"
MADE = {
    "rms_norm": "norms:rms_norm",
    "add_rms_norm": "norms:add_rms_norm",
    "wide_rms_norm": "norms:wide_rms_norm",
    "norm_rotate": "norms:norm_rotate",
    "rotations": "norms:rotations",
    "act_and_mul": "norms:silu_and_mul",
    "latent_rows": "latent:latent_rows",
    "linear": "products:linear",
    "wide_linear": "products:wide_linear",
    "linear_add": "products:linear_add",
    "norm_linear": "products:norm_linear",
    "norm_gate": "products:norm_gate",
    "packed_linear": "packed:TritonPacked",
    "packed_norm_linear": "packed:TritonNormedPacked",
    "packed_norm_gate": "packed:TritonNormedPacked",
    "route": "route:route",
    "norm_route": "mixture:norm_route",
    "experts": "mixture:experts",
    "packed_experts": "mixture:TritonPackedExperts",
    "routed_experts": "mixture:TritonRoutedExperts",
    "conv_qkv": "delta_pieces:conv_qkv",
    "short_conv_prefill": "short_conv:short_conv_prefill",
    "short_conv_decode": "short_conv:short_conv_decode",
    "selective_scan_prefill": "scan:selective_scan_prefill",
    "selective_scan_decode": "scan:selective_scan_decode",
    "gdn_prefill": "delta_pieces:gdn_prefill",
    "gdn_decode": "delta:gdn_decode",
    "kda_prefill": "kda_pieces:kda_prefill",
    "kda_decode": "kda:kda_decode",
    "gated_rms_norm": "delta:gated_rms_norm",
    "ssd_prefill": "ssd_pieces:ssd_prefill",
    "ssd_decode": "ssd:ssd_decode",
    "gated_group_norm": "ssd:gated_group_norm",
    "sigmoid_gate": "delta:sigmoid_gate",
    "rank_sum": "peer_sum:rank_sum",
    "rank_sum_add": "peer_sum:rank_sum_add",
    "rank_sum_norm": "peer_sum:rank_sum_norm",
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
PRODUCTS = frozenset({"linear", "wide_linear", "linear_add", "norm_linear", "norm_gate"})
FIXED = {
    **{"linear": "fixed:linear", "linear_add": "fixed:linear", "wide_linear": "fixed:wide_linear"},
    **{"packed_linear": "fixed_packed:FixedPacked", "packed_norm_linear": "fixed_packed:FixedNormedPacked"},
    **{"packed_norm_gate": "fixed_packed:FixedNormedPacked", "experts": "fixed_packed:experts"},
    "packed_experts": "fixed_packed:FixedPackedExperts",
    **{"gdn_prefill": "delta:gdn_prefill_by_token", "ssd_prefill": "ssd:ssd_prefill_by_token"},
    "kda_prefill": "kda:kda_prefill_by_token",
}
"""Of other functions where rows may not depend on one another; see `Operation.apart`."""
BY_FORM = frozenset(name for name in MADE if OPS[name].packs)
MIXTURES = BY_FORM | {"route", "norm_route", "experts"}
"""Operations over packed weights, and those of routers and experts."""
MULTIPLIES = (PRODUCTS | MIXTURES) - {"route"}
"""Operations whose kernels are chosen by how many rows there are."""
DOTS = BY_FORM | {"experts"}
"""Those that multiply on tensor cores whatever the number of rows."""
HOPPER = (9, 0)
"""Compute capability from which kernels of packed weights run: they are written in its instructions."""
FP8_GROUP, INT4_GROUP = 128, 32
"""Scales are for as many inputs, a multiple of them, or whole rows."""
SUMS = frozenset(name for name in MADE if OPS[name].over_ranks)
"""Operations over ranks, which need memory that all of them see."""
MAX_SUM_ROWS, MAX_SUM_WIDTH = 256, 16384
"""Largest sum over ranks. More rows are prompts, of which the device's own collectives make better use of the links."""
DRAWS = frozenset({"draw", "draw_plainly", "draw_adjusted"})


class Peers:
    """Memory that ranks share, as kernels of sums over them divide it up; set by `connect`."""

    buffers: Any = None


class TritonKernels(KernelSet):
    """Our own kernels; each program computes rows of its own, whatever stands beside them."""

    devices = frozenset({"cuda"})
    modules = tuple(f"{_PACKAGE}.{name}" for name in sorted({target.partition(":")[0] for target in MADE.values()}))

    def __init__(self) -> None:
        self._peers = Peers()

    def serves(self, ask: Ask) -> Claim | str:
        """See `KernelSet.serves`."""
        if ask.device.kind != "cuda" and not ask.device.is_interpreted:
            return f"it runs on cuda, not on {ask.device.kind}"
        if ask.dtype not in DTYPES:
            return f"no kernel for {ask.dtype}"
        if ask.op == "act_and_mul" and ask.option("act") != "silu_and_mul":
            return f"no kernel for {ask.option('act')}"
        if dict(ask.options).get("act") == "relu2":
            return "no kernel for relu2"
        if ask.op == "rotations" and ask.dim("F") != 1:
            return "no kernel with a factor for each frequency"
        if ask.op not in MADE:
            return f"no kernel for {ask.op}"
        if ask.op in MULTIPLIES and ask.invariant and ask.op not in FIXED:
            return "its rows would depend on how many there are"
        dots = MULTIPLIES if ask.invariant else DOTS
        if ask.op in dots and ask.device.is_interpreted and ask.dtype == "bfloat16":
            return "Triton's interpreter multiplies no matrices of bfloat16"
        if ask.op in SUMS:
            return _claimed_sum(ask)
        if ask.op in BY_FORM and (why_not := _why_not_packed(ask)):
            return why_not
        overwrites = frozenset({"residual"} if ask.op == "linear_add" and not ask.invariant else ())
        is_by_row = ask.invariant or ask.op not in DRAWS | MULTIPLIES
        return Claim(ask.rows, overwrites, capturable=True, row_independent=is_by_row)

    def keeps_packed(self, ask: Ask) -> bool:
        """See `KernelSet.keeps_packed`: integers also on devices that have no kernels for them, to save memory."""
        import torch

        from dovetail.sdk.quantization.forms import Int4, Mxfp4, Scaled

        form, capability = ask.option("form"), ask.device.capability
        if ask.device.kind != "cuda" or not isinstance(form, Scaled | Int4 | Mxfp4):
            return False
        if isinstance(form, Int4):
            return (form.group or 0) % INT4_GROUP == 0
        if isinstance(form, Scaled) and form.dtype == torch.int8:
            return True
        is_new = capability is None or capability >= HOPPER  # None: planned for one that is not here
        return is_new and (isinstance(form, Mxfp4) or (form.group or 0) % FP8_GROUP == 0)

    def make(self, ask: Ask) -> Kernel:
        """See `KernelSet.make`."""
        target = FIXED.get(ask.op, MADE[ask.op]) if ask.invariant else MADE[ask.op]
        module, _, name = target.partition(":")
        made: Kernel = getattr(import_module(f"{_PACKAGE}.{module}"), name)  # imports Triton
        options = dict(ask.options)
        if ask.op in BY_FORM:
            import torch

            return made(**options | {"dtype": getattr(torch, ask.dtype)})
        if ask.op in DRAWS:
            return partial(made, batch_invariant=ask.invariant)
        if ask.op in SUMS:
            return partial(made, peers=self._peers)
        return partial(made, **options) if options and ask.op != "act_and_mul" else made

    def peer_bytes(self, ranks: int) -> int:
        """See `KernelSet.peer_bytes`."""
        from dovetail_backends.kernels.triton.peer_sum import PeerBuffers

        return PeerBuffers.num_bytes(ranks)

    def connect(self, memory: PeerMemory) -> None:
        """See `KernelSet.connect`."""
        from dovetail_backends.kernels.triton.peer_sum import PeerBuffers

        self._peers.buffers = PeerBuffers.over(memory)


def _claimed_sum(ask: Ask) -> Claim | str:
    """Return what holds for a sum over ranks, or why there is no kernel."""
    first, last = ask.rows[0], min(ask.rows[1], MAX_SUM_ROWS)
    if not ask.peers:
        return "the ranks share no memory"
    if ask.dtype not in ("bfloat16", "float16"):
        return f"no kernel for {ask.dtype}"
    if ask.dim("H") > MAX_SUM_WIDTH or first > last:
        return f"its sums have at most {MAX_SUM_ROWS} rows of {MAX_SUM_WIDTH}"
    return Claim((first, last), capturable=True, row_independent=True)


def _why_not_packed(ask: Ask) -> str:
    """Return why there is no kernel for matrices in the forms asked for, or nothing."""
    from dovetail.sdk.quantization.forms import Int4, Mxfp4, Scaled  # imports torch, as forms did

    if not ask.device.is_interpreted and (ask.device.capability or (0, 0)) < HOPPER:
        return f"it multiplies by packed weights from compute capability {HOPPER[0]}.{HOPPER[1]} on"
    options = dict(ask.options)
    for form in options["forms"] if "forms" in options else (options["form"],):
        if not isinstance(form, Scaled | Int4 | Mxfp4):
            return f"no kernel for {'plain weights beside packed ones' if form is None else form}"
        if isinstance(form, Int4) and (form.group or 0) % INT4_GROUP:
            return f"no kernel for int4 in groups of {form.group}"
    return ""
