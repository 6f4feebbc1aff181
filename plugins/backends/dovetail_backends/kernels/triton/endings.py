"""What product kernels do once their inputs are summed up: parts of a split sum, norm, scales, bias, gate.

N outputs, K inputs. Each is inlined where it is called: the compiled kernels are what they were when each had its own.
"""

from __future__ import annotations

import triton
import triton.language as tl

from dovetail_backends.kernels.triton.silu import act_gated


@triton.jit
def summed_parts(
    total, part, arrived, place, split, inner, SPLITS: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_M: tl.constexpr
):
    """Add up the sums of the programs that share tile number `place`; returns that, and whether this one is the last.

    `inner` `[BLOCK_N, BLOCK_M]` are places within a tile of `part`, where all leave their sums; `arrived` counts them,
    from zero and back to it.
    """
    tl.store(part + (place * SPLITS + split) * (BLOCK_N * BLOCK_M) + inner, total)
    tl.debug_barrier()
    is_last = tl.atomic_add(arrived + place, 1, sem="acq_rel") == SPLITS - 1
    if is_last:
        tl.store(arrived + place, 0)
        # In the order of the parts, whoever is last: the same sum each time.
        total = tl.zeros([BLOCK_N, BLOCK_M], tl.float32)
        for other in tl.static_range(SPLITS):
            at_part = part + (place * SPLITS + other) * (BLOCK_N * BLOCK_M)
            total += tl.load(at_part + inner, cache_modifier=".cg")
    return total, is_last


@triton.jit
def ended_tile(
    total, up_total, squares, row_scale, bias, n, eps, N: tl.constexpr, K: tl.constexpr,
    ROW_SCALE: tl.constexpr, NORM: tl.constexpr, BIAS: tl.constexpr, GATE: tl.constexpr, ACT: tl.constexpr,
    dtype: tl.constexpr,
):  # fmt: skip
    """Return outputs `[BLOCK_N, BLOCK_M]` in float32 of sums over the inputs, `n` `[BLOCK_N]`.

    With GATE, `up_total` are of outputs `n + N`. With NORM, `squares` are of the rows, `[BLOCK_M]`: the norm's weight
    is in the sums already, its factor is not.
    """
    if ROW_SCALE:
        total *= tl.load(row_scale + n, mask=n < N, other=0.0)[:, None]
        if GATE:
            up_total *= tl.load(row_scale + N + n, mask=n < N, other=0.0)[:, None]
    if NORM:
        factor = 1.0 / tl.sqrt(squares / K + eps)
        total *= factor[None, :]
        if GATE:
            up_total *= factor[None, :]
    if BIAS:
        total += tl.load(bias + n, mask=n < N, other=0.0).to(tl.float32)[:, None]
        if GATE:
            up_total += tl.load(bias + N + n, mask=n < N, other=0.0).to(tl.float32)[:, None]
    if GATE:
        total = act_gated(total, up_total, ACT, dtype)
    return total


@triton.jit
def ended_row(
    total, up_total, squares, bias, n, eps, N: tl.constexpr, K: tl.constexpr,
    NORM: tl.constexpr, BIAS: tl.constexpr, GATE: tl.constexpr, ACT: tl.constexpr, dtype: tl.constexpr,
):  # fmt: skip
    """As `ended_tile` for one row: outputs `[BLOCK_N]`, and `squares` of its inputs, which are added up here."""
    if NORM:
        factor = 1.0 / tl.sqrt(tl.sum(squares, 0) / K + eps)
        total *= factor
        if GATE:
            up_total *= factor
    if BIAS:
        total += tl.load(bias + n, mask=n < N, other=0.0).to(tl.float32)
        if GATE:
            up_total += tl.load(bias + N + n, mask=n < N, other=0.0).to(tl.float32)
    if GATE:
        total = act_gated(total, up_total, ACT, dtype)
    return total
