"""The selective scan of Mamba 1 in Triton: states of a block of channels stand in registers, tokens come one by one.

T tokens, P channels, D numbers of each.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from dovetail_backends.kernels.triton.delta import silu, softplus
from dovetail_backends.kernels.triton.pdl import launch_options

CHANNELS = 64
"""Of a program."""


@triton.jit
def _fold(
    x, dt, b, c, gate, out, token, own, d, in_c, in_d, state, a, bias, skip,
    x_token, dt_token, b_token, c_token, gate_token, P: tl.constexpr,
):  # fmt: skip
    """Fold a token into `[channels, D]`, write what it reads, and return the state."""
    wide = tl.load(x + token * x_token + own, mask=in_c, other=0.0).to(tl.float32)
    step = softplus(tl.load(dt + token * dt_token + own, mask=in_c, other=0.0).to(tl.float32) + bias)
    key = tl.load(b + token * b_token + d, mask=in_d, other=0.0).to(tl.float32)
    query = tl.load(c + token * c_token + d, mask=in_d, other=0.0).to(tl.float32)
    state = state * tl.exp(a * step[:, None]) + (step * wide)[:, None] * key[None, :]
    read = tl.sum(state * query[None, :], 1) + skip * wide
    by = silu(tl.load(gate + token * gate_token + own, mask=in_c, other=0.0).to(tl.float32))
    tl.store(out + token * P + own, (read * by).to(out.dtype.element_ty), mask=in_c)
    return state


@triton.jit
def _prefill_kernel(
    x, dt, b, c, gate, a_log, dt_bias, skip, rows, pieces, table, saves, out, state, copies,
    x_token, dt_token, b_token, c_token, gate_token,
    P: tl.constexpr, D: tl.constexpr, BLOCK_C: tl.constexpr, BLOCK_D: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """One program per block of channels and request: all of its tokens, one by one."""
    if PDL:
        gdc_launch_dependents()
        gdc_wait()
    own, request, d = tl.program_id(0) * BLOCK_C + tl.arange(0, BLOCK_C), tl.program_id(1), tl.arange(0, BLOCK_D)
    in_c, in_d = own < P, d < D
    inside, at = in_c[:, None] & in_d[None, :], own[:, None] * D + d[None, :]
    first, last = tl.load(pieces + request), tl.load(pieces + request + 1)
    if first < last:
        kept = state + tl.load(rows + request) * (P * D) + at
        now = tl.load(kept, mask=inside, other=0.0).to(tl.float32)
        a = -tl.exp(tl.load(a_log + at, mask=inside, other=0.0))
        bias = tl.load(dt_bias + own, mask=in_c, other=0.0)
        own_skip = tl.load(skip + own, mask=in_c, other=0.0)
        for piece in range(first, last):
            begin = tl.load(table + piece * 3 + 1)
            end = begin + tl.load(table + piece * 3 + 2)
            for token in range(begin, end):
                now = _fold(
                    x, dt, b, c, gate, out, token, own, d, in_c, in_d, now, a, bias, own_skip,
                    x_token, dt_token, b_token, c_token, gate_token, P,
                )  # fmt: skip
                now = now.to(state.dtype.element_ty).to(tl.float32)
            copy = tl.load(saves + piece)
            if copy >= 0:
                tl.store(copies + copy * (P * D) + at, now, mask=inside)
        tl.store(kept, now, mask=inside)


@triton.jit
def _decode_kernel(
    x, dt, b, c, gate, a_log, dt_bias, skip, rows, out, state,
    x_token, dt_token, b_token, c_token, gate_token,
    P: tl.constexpr, D: tl.constexpr, BLOCK_C: tl.constexpr, BLOCK_D: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """One program per block of channels and token."""
    if PDL:
        gdc_launch_dependents()
    own, token = tl.program_id(0) * BLOCK_C + tl.arange(0, BLOCK_C), tl.program_id(1).to(tl.int64)
    d = tl.arange(0, BLOCK_D)
    in_c, in_d = own < P, d < D
    inside, at = in_c[:, None] & in_d[None, :], own[:, None] * D + d[None, :]
    kept = state + tl.load(rows + token) * (P * D) + at  # as the state, it was there before this step began
    now = tl.load(kept, mask=inside, other=0.0).to(tl.float32)
    a = -tl.exp(tl.load(a_log + at, mask=inside, other=0.0))
    bias, own_skip = tl.load(dt_bias + own, mask=in_c, other=0.0), tl.load(skip + own, mask=in_c, other=0.0)
    if PDL:
        gdc_wait()
    now = _fold(
        x, dt, b, c, gate, out, token, own, d, in_c, in_d, now, a, bias, own_skip,
        x_token, dt_token, b_token, c_token, gate_token, P,
    )  # fmt: skip
    tl.store(kept, now, mask=inside)


def _sizes(a_log: Tensor) -> dict[str, int]:
    channels, dim = a_log.shape
    return {"P": channels, "D": dim, "BLOCK_C": CHANNELS, "BLOCK_D": triton.next_power_of_2(dim), "num_warps": 4}


def selective_scan_prefill(
    x: Tensor, dt: Tensor, b: Tensor, c: Tensor, gate: Tensor, a_log: Tensor, dt_bias: Tensor, skip: Tensor,
    rows: Tensor, starts: Tensor, pieces: Tensor, table: Tensor, saves: Tensor, state: Tensor, copies: Tensor,
) -> Tensor:  # fmt: skip
    """See `scan.selective_scan_prefill`: one kernel, the same for requests of one token and of many."""
    given = [one if one.stride(-1) == 1 else one.contiguous() for one in (x, dt, b, c, gate)]
    out = x.new_zeros(x.shape)
    if len(rows):
        sizes = _sizes(a_log)
        _prefill_kernel[(triton.cdiv(sizes["P"], CHANNELS), len(rows))](
            *given, a_log, dt_bias, skip, rows, pieces, table, saves, out, state, copies,
            *(one.stride(0) for one in given), **sizes, **launch_options(x),
        )  # fmt: skip
    return out


def selective_scan_decode(
    x: Tensor, dt: Tensor, b: Tensor, c: Tensor, gate: Tensor, a_log: Tensor, dt_bias: Tensor, skip: Tensor,
    rows: Tensor, state: Tensor,
) -> Tensor:  # fmt: skip
    """See `scan.selective_scan_decode`: one kernel."""
    given = [one if one.stride(-1) == 1 else one.contiguous() for one in (x, dt, b, c, gate)]
    out = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    if len(x):
        sizes = _sizes(a_log)
        _decode_kernel[(triton.cdiv(sizes["P"], CHANNELS), len(x))](
            *given, a_log, dt_bias, skip, rows, out, state, *(one.stride(0) for one in given), **sizes,
            **launch_options(x),
        )  # fmt: skip
    return out
