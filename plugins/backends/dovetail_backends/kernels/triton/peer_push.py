"""Sums over ranks whose shares are pushed: a rank writes its share into the memory of all others, and reads its own.

Of each eight bytes four are two numbers of the share, and four the number of the launch: what has that number has come,
and no signal is needed behind the numbers. That is one trip over the link instead of two and a fence, for twice the
bytes. Eight bytes that are aligned come whole. Source: NCCL's protocol "LL" works so.

Two places are used in turn. Who writes one again has what all ranks pushed in the launch between, and a rank that
pushes in a launch has ended the one before: it has read its place.

T rows, H their width, N ranks. See `peer_sum.py`.
"""

from __future__ import annotations

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

PUSHED_BYTES = 8
"""Of two numbers."""


@triton.jit
def push_kernel(
    share, value, weight, total, normed, launches, pointers, pushed_at, is_alone, eps, stride_share, stride_value,
    H: tl.constexpr, BLOCK: tl.constexpr, RANK: tl.constexpr, SIZE: tl.constexpr, ROWS: tl.constexpr,
    PAIRS: tl.constexpr, HAS_VALUE: tl.constexpr, HAS_NORM: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """A program a row; arguments as in `_peer_sum_kernel`, rows in pairs of numbers.

    `pushed_at` is where in the ranks' memory `[2, N, ROWS, PAIRS]` begins. A rank that `is_alone` pushes into the
    places of all others, in its own memory.
    """
    if PDL:  # what follows loads its weights while this waits for the others
        gdc_launch_dependents()
        gdc_wait()
    row = tl.program_id(0).to(tl.int64)
    dtype = share.dtype.element_ty
    pairs = tl.arange(0, BLOCK)
    inside = pairs < H // 2
    launch = tl.load(launches + row) + 1
    turn = (launch & 1).to(tl.int64)
    mine = tl.load((share + row * stride_share).to(tl.pointer_type(tl.int32)) + pairs, mask=inside, other=0)
    packed = (launch.to(tl.int64) << 32) | (mine.to(tl.int64) & 0xFFFFFFFF)
    for rank in tl.static_range(SIZE):
        if rank != RANK:
            place = RANK + (rank - RANK) * is_alone
            at = pushed_at + ((turn * SIZE + place) * ROWS + row) * PAIRS * 8
            there = (tl.load(pointers + rank) + at).to(tl.pointer_type(tl.int64))
            tl.store(there + pairs, packed, mask=inside)
    low = tl.zeros([BLOCK], dtype=tl.float32)
    high = tl.zeros([BLOCK], dtype=tl.float32)
    own = tl.load(pointers + RANK)
    for rank in tl.static_range(SIZE):
        bits = mine
        if rank != RANK:
            at = pushed_at + ((turn * SIZE + rank) * ROWS + row) * PAIRS * 8
            bits = _come((own + at).to(tl.pointer_type(tl.int64)) + pairs, inside, launch)
        low += _low(bits, dtype)
        high += _high(bits, dtype)
    low, high = low.to(dtype).to(tl.float32), high.to(dtype).to(tl.float32)
    if HAS_VALUE:
        before = tl.load((value + row * stride_value).to(tl.pointer_type(tl.int32)) + pairs, mask=inside, other=0)
        low = (_low(before, dtype) + low).to(dtype).to(tl.float32)
        high = (_high(before, dtype) + high).to(dtype).to(tl.float32)
    _store(total + row * H, pairs, inside, low, high, dtype)
    if HAS_NORM:
        scale = 1.0 / tl.sqrt(tl.sum(low * low + high * high, 0) / H + eps)
        factors = tl.load(weight.to(tl.pointer_type(tl.int32)) + pairs, mask=inside, other=0)
        low = (low * scale).to(dtype).to(tl.float32) * _low(factors, dtype)
        high = (high * scale).to(dtype).to(tl.float32) * _high(factors, dtype)
        _store(normed + row * H, pairs, inside, low, high, dtype)
    tl.store(launches + row, launch)


@triton.jit
def _come(source, inside, launch):
    """Wait until all pairs of a place are of this launch, and return their numbers."""
    found = tl.load(source, mask=inside, other=0, volatile=True)
    while tl.sum(((found >> 32).to(tl.int32) != launch).to(tl.int32) * inside.to(tl.int32), 0) > 0:
        found = tl.load(source, mask=inside, other=0, volatile=True)
    return found.to(tl.int32)


@triton.jit
def _low(bits, dtype: tl.constexpr):
    return bits.to(tl.int16).to(dtype, bitcast=True).to(tl.float32)


@triton.jit
def _high(bits, dtype: tl.constexpr):
    return (bits >> 16).to(tl.int16).to(dtype, bitcast=True).to(tl.float32)


@triton.jit
def _store(row, pairs, inside, low, high, dtype: tl.constexpr):
    """Write two numbers at a time."""
    first = low.to(dtype).to(tl.int16, bitcast=True).to(tl.int32) & 0xFFFF
    second = high.to(dtype).to(tl.int16, bitcast=True).to(tl.int32) << 16
    tl.store(row.to(tl.pointer_type(tl.int32)) + pairs, first | second, mask=inside)
