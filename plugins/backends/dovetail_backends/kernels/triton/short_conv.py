"""Short convolutions between two gates (LFM2) in Triton: the decode step in one kernel, prompts by that of `conv_qkv`.

T tokens, P channels, K taps.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from dovetail_backends.kernels.triton.delta_pieces import CHANNELS, TOKENS, convolve, gated, keep
from dovetail_backends.kernels.triton.pdl import launch_options


@triton.jit
def _prefill_kernel(
    x, before, behind, weight, bias, lens, rows, starts, table, saves, conv, copies, out,
    x_token, before_token, behind_token,
    P: tl.constexpr, K: tl.constexpr, BLOCK_T: tl.constexpr, BLOCK_C: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """One program per piece and block of channels; rings are read only."""
    if PDL:
        gdc_launch_dependents()
        gdc_wait()
    piece, block = tl.program_id(0), tl.program_id(1)
    num = tl.load(table + piece * 3 + 2)
    if num > 0:
        convolve(
            x, x_token, 0, before, before_token, behind, behind_token, block, piece, num, weight, bias, lens, rows,
            starts, table, saves, conv, copies, out, 0, P, P, P, K, BLOCK_T, BLOCK_C,
        )  # fmt: skip


@triton.jit
def _ring_kernel(
    x, before, lens, rows, starts, conv, x_token, before_token,
    P: tl.constexpr, K: tl.constexpr, BLOCK_C: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """One program per request and block of channels, when nobody reads the rings any more."""
    if PDL:
        gdc_launch_dependents()
        gdc_wait()
    request, block = tl.program_id(0), tl.program_id(1)
    keep(x, x_token, 0, before, before_token, block, request, lens, rows, starts, conv, 0, P, P, P, K, BLOCK_C)


def short_conv_prefill(
    x: Tensor, before: Tensor, behind: Tensor, weight: Tensor, bias: Tensor | None, lens: Tensor, rows: Tensor,
    starts: Tensor, pieces: Tensor, table: Tensor, saves: Tensor, conv: Tensor, copies: Tensor,
) -> Tensor:  # fmt: skip
    """See `conv.short_conv_prefill`: one kernel for the tokens, and one for what rings keep."""
    x, before, behind = (one if one.stride(-1) == 1 else one.contiguous() for one in (x, before, behind))
    _, taps, channels = conv.shape
    out = torch.empty(len(x), channels, dtype=x.dtype, device=x.device)
    if len(rows) == 0:
        return out
    sizes, blocks = {"P": channels, "K": taps, "BLOCK_C": CHANNELS, "num_warps": 4}, triton.cdiv(channels, CHANNELS)
    strides = x.stride(0), before.stride(0)
    _prefill_kernel[(len(table), blocks)](
        x, before, behind, weight, bias, lens, rows, starts, table, saves, conv, copies, out, *strides,
        behind.stride(0), BLOCK_T=TOKENS, **sizes, **launch_options(x),
    )  # fmt: skip
    _ring_kernel[(len(rows), blocks)](x, before, lens, rows, starts, conv, *strides, **sizes, **launch_options(x))
    return out


@triton.jit
def _decode_kernel(
    x, before, behind, weight, bias, rows, positions, conv, out, x_token, before_token, behind_token,
    P: tl.constexpr, K: tl.constexpr, BLOCK_C: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """One program per token and block of channels."""
    if PDL:
        gdc_launch_dependents()
    token, own = tl.program_id(0).to(tl.int64), tl.program_id(1) * BLOCK_C + tl.arange(0, BLOCK_C)
    inside = own < P
    ring = conv + tl.load(rows + token) * (K * P) + own
    if PDL:
        gdc_wait()
    position = tl.load(positions + token)
    new = gated(x + own, x_token, before, before_token, own, token, inside)
    total = new.to(tl.float32) * tl.load(weight + own * K + K - 1, mask=inside, other=0.0).to(tl.float32)
    for back in tl.static_range(1, K):
        old = tl.load(ring + (position - back + K) % K * P, mask=inside, other=0.0)
        total += old.to(tl.float32) * tl.load(weight + own * K + K - 1 - back, mask=inside, other=0.0).to(tl.float32)
    if bias is not None:
        total += tl.load(bias + own, mask=inside, other=0.0).to(tl.float32)
    by = tl.load(behind + token * behind_token + own, mask=inside, other=0.0).to(tl.float32)
    found = total.to(out.dtype.element_ty).to(tl.float32) * by
    tl.store(out + token * P + own, found.to(out.dtype.element_ty), mask=inside)
    # Each program reads its own channels only, so the newest input may take the oldest one's place.
    tl.store(ring + position % K * P, new, mask=inside)


def short_conv_decode(
    x: Tensor, before: Tensor, behind: Tensor, weight: Tensor, bias: Tensor | None, rows: Tensor, positions: Tensor,
    conv: Tensor,
) -> Tensor:  # fmt: skip
    """See `conv.short_conv_decode`: one kernel."""
    x, before, behind = (one if one.stride(-1) == 1 else one.contiguous() for one in (x, before, behind))
    _, taps, channels = conv.shape
    out = torch.empty(len(x), channels, dtype=x.dtype, device=x.device)
    if len(x):
        strides = x.stride(0), before.stride(0), behind.stride(0)
        _decode_kernel[(len(x), triton.cdiv(channels, CHANNELS))](
            x, before, behind, weight, bias, rows, positions, conv, out, *strides,
            P=channels, K=taps, BLOCK_C=CHANNELS, num_warps=4, **launch_options(x),
        )  # fmt: skip
    return out
