"""Sums over ranks on GPUs of one host, in memory that all of them see: one kernel, with what is done to the sum anyway.

One program a row. Each rank puts its share into its own memory and signals the others; one that has heard of all reads
their shares and adds them in the order of the ranks, in float32: so all have the same bits, and those of
`Communicator.all_reduce` in plain torch. Of larger sums of more than two ranks each row is added by one of them, and
read by the others from it.

A program's memory is its own in every launch, and there are two of it, used in turn: who writes one again has heard
since that all have read it. Signals count launches and are compared so that they may overflow.

T rows, H their width, N ranks.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

TWO_SHOT_BYTES = 256 << 10
"""From this size on, of more than two ranks, a row is added once."""
FAR = 1 << 30


@dataclass(frozen=True, slots=True, eq=False)
class PeerBuffers:
    """This rank's memory, and where that of the others is.

    Attributes:
        rank: This one.
        size: N.
        rows: Most rows of a sum.
        width: Most numbers of a row, two bytes each.
        own: `num_bytes` bytes: signals `[2, rows, N]` int32, then shares and sums `[2, 2, rows, width]`.
        pointers: `[N]` int64: where each rank's `own` is, as this device sees it.
        handle: What keeps the others' memory in place.
        launches: `[rows]` int32: how often each program has run.
    """

    rank: int
    size: int
    rows: int
    width: int
    own: Tensor
    pointers: Tensor
    handle: Any
    launches: Tensor

    @classmethod
    def make(
        cls, rank: int, size: int, rows: int, width: int, own: Tensor, pointers: Tensor, handle: Any
    ) -> PeerBuffers:
        """Put them together; nothing was launched yet."""
        launches = torch.zeros(rows, dtype=torch.int32, device=own.device)
        return cls(rank, size, rows, width, own, pointers, handle, launches)

    @classmethod
    def alone(cls, rank: int, size: int, rows: int, width: int, device: torch.device) -> PeerBuffers:
        """Make buffers of a rank that stands for all: nobody waits for anybody."""
        own = torch.zeros(cls.num_bytes(size, rows, width), dtype=torch.uint8, device=device)
        own[: 8 * rows * size].view(torch.int32).fill_(FAR)
        pointers = torch.full((size,), own.data_ptr(), dtype=torch.int64, device=device)
        return cls.make(rank, size, rows, width, own, pointers, None)

    @staticmethod
    def num_bytes(size: int, rows: int, width: int) -> int:
        """Size of `own`."""
        return 2 * rows * size * 4 + 2 * 2 * rows * width * 2


def peer_sum(
    share: Tensor,
    peers: PeerBuffers,
    value: Tensor | None = None,
    weight: Tensor | None = None,
    eps: float = 0.0,
    *,
    two_shot: bool | None = None,
) -> tuple[Tensor, Tensor | None]:
    """Add up the ranks' shares.

    Args:
        share: `[T, H]`, two bytes a number, T and H at most those of `peers`.
        peers: The ranks'.
        value: `[T, H]`, added to the sum; None: nothing is.
        weight: `[H]` of an RMS norm of what comes of that; None: there is none.
        eps: Of that.
        two_shot: Whether a row is added by one rank; None: as is faster.

    Returns:
        The sum, with `value`, and its norm or None; the same on all ranks.
    """
    share = share if share.stride(-1) == 1 else share.contiguous()
    value = value if value is None or value.stride(-1) == 1 else value.contiguous()
    num, width = share.shape
    total = torch.empty(num, width, dtype=share.dtype, device=share.device)
    normed = None if weight is None else torch.empty_like(total)
    block = triton.next_power_of_2(width)
    if two_shot is None:
        two_shot = peers.size > 2 and share.numel() * share.element_size() >= TWO_SHOT_BYTES
    _peer_sum_kernel[(num,)](
        share, total if value is None else value, total if weight is None else weight, total,
        total if normed is None else normed, peers.launches, peers.pointers, eps, share.stride(0),
        0 if value is None else value.stride(0),
        H=width, BLOCK=block, RANK=peers.rank, SIZE=peers.size, ROWS=peers.rows, WIDTH=peers.width,
        HAS_VALUE=value is not None, HAS_NORM=weight is not None, TWO_SHOT=two_shot,
        num_warps=min(16, max(4, block // 512)),
    )  # fmt: skip
    return total, normed


@triton.jit
def _peer_sum_kernel(
    share, value, weight, total, normed, launches, pointers, eps, stride_share, stride_value,
    H: tl.constexpr, BLOCK: tl.constexpr, RANK: tl.constexpr, SIZE: tl.constexpr, ROWS: tl.constexpr,
    WIDTH: tl.constexpr, HAS_VALUE: tl.constexpr, HAS_NORM: tl.constexpr, TWO_SHOT: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    dtype = share.dtype.element_ty
    columns = tl.arange(0, BLOCK)
    inside = columns < H
    launch = tl.load(launches + row) + 1
    # In bytes: behind the signals, this program's shares of this turn, and behind all shares its sums.
    at = 2 * ROWS * SIZE * 4 + ((launch & 1) * ROWS + row) * WIDTH * 2
    sums = 2 * ROWS * WIDTH * 2
    mine = tl.load(share + row * stride_share + columns, mask=inside, other=0.0)
    own = tl.load(pointers + RANK)
    tl.store((own + at).to(tl.pointer_type(dtype)) + columns, mine, mask=inside)
    tl.debug_barrier()
    owner = row % SIZE
    if TWO_SHOT:
        if owner == RANK:
            _wait(own + row * SIZE * 4, launch, RANK, SIZE)
            added = _add(pointers, at, columns, inside, dtype, SIZE)
            tl.store((own + at + sums).to(tl.pointer_type(dtype)) + columns, added, mask=inside)
            tl.debug_barrier()
            _signal(pointers, (ROWS + row) * SIZE * 4, launch, RANK, SIZE)
        else:
            there = tl.load(pointers + owner)
            tl.atomic_xchg(
                (there + (row * SIZE + RANK) * 4).to(tl.pointer_type(tl.int32)), launch, sem="release", scope="sys"
            )
            told = (own + ((ROWS + row) * SIZE + owner) * 4).to(tl.pointer_type(tl.int32))
            while tl.atomic_add(told, 0, sem="acquire", scope="sys") - launch < 0:
                pass
            tl.debug_barrier()
        source = (tl.load(pointers + owner) + at + sums).to(tl.pointer_type(dtype))
        found = tl.load(source + columns, mask=inside, other=0.0, cache_modifier=".cv")
    else:
        _signal(pointers, row * SIZE * 4, launch, RANK, SIZE)
        _wait(own + row * SIZE * 4, launch, RANK, SIZE)
        found = _add(pointers, at, columns, inside, dtype, SIZE)
    if HAS_VALUE:
        before = tl.load(value + row * stride_value + columns, mask=inside, other=0.0)
        found = (before.to(tl.float32) + found.to(tl.float32)).to(dtype)
    tl.store(total + row * H + columns, found, mask=inside)
    if HAS_NORM:
        wide = found.to(tl.float32)
        scale = 1.0 / tl.sqrt(tl.sum(wide * wide, 0) / H + eps)
        factor = tl.load(weight + columns, mask=inside, other=0.0).to(tl.float32)
        scaled = (wide * scale).to(dtype).to(tl.float32) * factor
        tl.store(normed + row * H + columns, scaled.to(dtype), mask=inside)
    tl.store(launches + row, launch)


@triton.jit
def _signal(pointers, offset, launch, RANK: tl.constexpr, SIZE: tl.constexpr):
    """Tell all other ranks of a launch: what was written before is there then."""
    for rank in tl.static_range(SIZE):
        if rank != RANK:
            pad = (tl.load(pointers + rank) + offset + RANK * 4).to(tl.pointer_type(tl.int32))
            tl.atomic_xchg(pad, launch, sem="release", scope="sys")


@triton.jit
def _wait(pads, launch, RANK: tl.constexpr, SIZE: tl.constexpr):
    """Wait until all other ranks have told of a launch."""
    for rank in tl.static_range(SIZE):
        if rank != RANK:
            pad = (pads + rank * 4).to(tl.pointer_type(tl.int32))
            while tl.atomic_add(pad, 0, sem="acquire", scope="sys") - launch < 0:
                pass
    tl.debug_barrier()


@triton.jit
def _add(pointers, at, columns, inside, dtype: tl.constexpr, SIZE: tl.constexpr):
    """Add what all ranks have at a place, in their order."""
    found = tl.zeros(columns.shape, dtype=tl.float32)
    for rank in tl.static_range(SIZE):
        source = (tl.load(pointers + rank) + at).to(tl.pointer_type(dtype))
        found += tl.load(source + columns, mask=inside, other=0.0, cache_modifier=".cv").to(tl.float32)
    return found.to(dtype)
