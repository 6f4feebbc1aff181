"""Short convolutions between two gates (LFM2) or by themselves (Mamba 1) in Triton.

The decode step is one kernel; prompts are convolved by that of `conv_qkv`.

T tokens, P channels, K taps.
"""

from __future__ import annotations

from typing import TypeVar

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from dovetail.sdk.layers.ops.conv import ConvAct
from dovetail_backends.kernels.triton.delta import silu
from dovetail_backends.kernels.triton.delta_pieces import CHANNELS, TOKENS, convolve, gated, keep
from dovetail_backends.kernels.triton.pdl import launch_options

Given = TypeVar("Given", Tensor, None, Tensor | None)


@triton.jit
def _prefill_kernel(
    x, before, behind, weight, bias, lens, rows, starts, table, saves, conv, copies, out,
    x_token, before_token, behind_token,
    P: tl.constexpr, K: tl.constexpr, BLOCK_T: tl.constexpr, BLOCK_C: tl.constexpr, SILU: tl.constexpr,
    PDL: tl.constexpr,
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
            starts, table, saves, conv, copies, out, 0, P, P, P, K, BLOCK_T, BLOCK_C, SILU,
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


def _in_rows(one: Given) -> Given:
    """Return operands whose channels stand side by side."""
    return one if one is None or one.stride(-1) == 1 else one.contiguous()


def _stride(one: Tensor | None) -> int:
    return 0 if one is None else one.stride(0)


def short_conv_prefill(
    x: Tensor, before: Tensor | None, behind: Tensor | None, weight: Tensor, bias: Tensor | None, lens: Tensor,
    rows: Tensor, starts: Tensor, pieces: Tensor, table: Tensor, saves: Tensor, conv: Tensor, copies: Tensor, *,
    act: ConvAct,
) -> Tensor:  # fmt: skip
    """See `conv.short_conv_prefill`: one kernel for the tokens, and one for what rings keep."""
    x, before, behind = _in_rows(x), _in_rows(before), _in_rows(behind)
    _, taps, channels = conv.shape
    out = torch.empty(len(x), channels, dtype=x.dtype, device=x.device)
    if len(rows) == 0:
        return out
    sizes, blocks = {"P": channels, "K": taps, "BLOCK_C": CHANNELS, "num_warps": 4}, triton.cdiv(channels, CHANNELS)
    strides = _stride(x), _stride(before)
    _prefill_kernel[(len(table), blocks)](
        x, before, behind, weight, bias, lens, rows, starts, table, saves, conv, copies, out, *strides,
        _stride(behind), BLOCK_T=TOKENS, SILU=act == "silu", **sizes, **launch_options(x),
    )  # fmt: skip
    _ring_kernel[(len(rows), blocks)](x, before, lens, rows, starts, conv, *strides, **sizes, **launch_options(x))
    return out


@triton.jit
def _decode_kernel(
    x, before, behind, weight, bias, rows, positions, conv, out, x_token, before_token, behind_token,
    P: tl.constexpr, K: tl.constexpr, BLOCK_C: tl.constexpr, SILU: tl.constexpr, PDL: tl.constexpr,
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
    found = total.to(out.dtype.element_ty).to(tl.float32)
    if SILU:
        found = silu(found).to(out.dtype.element_ty).to(tl.float32)
    if behind is not None:
        found = found * tl.load(behind + token * behind_token + own, mask=inside, other=0.0).to(tl.float32)
    tl.store(out + token * P + own, found.to(out.dtype.element_ty), mask=inside)
    # Each program reads its own channels only, so the newest input may take the oldest one's place.
    tl.store(ring + position % K * P, new, mask=inside)


def short_conv_decode(
    x: Tensor, before: Tensor | None, behind: Tensor | None, weight: Tensor, bias: Tensor | None, rows: Tensor,
    positions: Tensor, conv: Tensor, *, act: ConvAct,
) -> Tensor:  # fmt: skip
    """See `conv.short_conv_decode`: one kernel."""
    x, before, behind = _in_rows(x), _in_rows(before), _in_rows(behind)
    _, taps, channels = conv.shape
    out = torch.empty(len(x), channels, dtype=x.dtype, device=x.device)
    if len(x):
        strides = _stride(x), _stride(before), _stride(behind)
        _decode_kernel[(len(x), triton.cdiv(channels, CHANNELS))](
            x, before, behind, weight, bias, rows, positions, conv, out, *strides,
            P=channels, K=taps, BLOCK_C=CHANNELS, SILU=act == "silu", num_warps=4, **launch_options(x),
        )  # fmt: skip
    return out
