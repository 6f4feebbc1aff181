"""Sums over ranks on GPUs of one host, in memory that all of them see: one kernel, with what is done to the sum anyway.

One program a row, which adds the ranks' shares in their order, in float32: so all have the same bits, and those of
shares that the host adds up. There are three ways to get at them (`Sums`):

* pushed: each rank writes its share into the others' memory (`peer_push.py`); the fewest trips, the most bytes;
* read: each rank puts its share into its own memory and signals the others; one that has heard of all reads theirs;
* by owners: a row is added by one rank, and read by the others from it.

A program's memory is its own in every launch, and there are two of it, used in turn: who writes one again has heard
since that all have read it. Signals count launches and are compared so that they may overflow.

T rows, H their width, N ranks.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from dovetail.contracts.layers import Parallel
from dovetail.contracts.ranks import PeerMemory
from dovetail_backends.kernels.triton import MAX_SUM_ROWS, MAX_SUM_WIDTH, Peers
from dovetail_backends.kernels.triton.norms import rms_norm
from dovetail_backends.kernels.triton.pdl import launch_options
from dovetail_backends.kernels.triton.peer_push import PUSHED_BYTES, push_kernel

Sums = Literal["pushed", "read", "owners"]
PUSH_BYTES = 1 << 20
"""Up to this size, in bytes that a rank writes to all others, shares are pushed."""
OWNERS_BYTES = 256 << 10
"""From this size on, of more than two ranks, a row is added once."""
PUSHED_ROWS = 64
"""Most rows of a sum whose shares are pushed."""
FAR = 1 << 30


@dataclass(frozen=True, slots=True, eq=False)
class PeerBuffers:
    """This rank's memory, and where that of the others is.

    Attributes:
        rank: This one.
        size: N.
        rows: Most rows of a sum.
        width: Most numbers of a row, two bytes each.
        own: `num_bytes` bytes: signals `[2, rows, N]` int32, then shares and sums `[2, 2, rows, width]`, then what
            others pushed, `[2, N, min(rows, PUSHED_ROWS), width / 2]` of eight bytes.
        pointers: `[N]` int64: where each rank's `own` is, as this device sees it.
        launches: `[rows]` int32: how often each program has run.
        is_alone: Whether this rank stands for all, as in rehearsals.
    """

    rank: int
    size: int
    rows: int
    width: int
    own: Tensor
    pointers: Tensor
    launches: Tensor
    is_alone: bool = False

    @classmethod
    def over(cls, memory: PeerMemory, rows: int = MAX_SUM_ROWS, width: int = MAX_SUM_WIDTH) -> PeerBuffers:
        """Divide up `num_bytes` of memory that ranks share; a rank that stands for all waits for nobody."""
        if memory.is_alone:
            memory.own[: 8 * rows * memory.size].view(torch.int32).fill_(FAR)
        launches = torch.zeros(rows, dtype=torch.int32, device=memory.own.device)
        return cls(memory.rank, memory.size, rows, width, memory.own, memory.pointers, launches, memory.is_alone)

    @staticmethod
    def pushed_at(size: int, rows: int, width: int) -> int:
        """Where in `own` begins what others pushed: a multiple of eight bytes."""
        return -(-(2 * rows * size * 4 + 2 * 2 * rows * width * 2) // 8) * 8

    @classmethod
    def num_bytes(cls, size: int, rows: int = MAX_SUM_ROWS, width: int = MAX_SUM_WIDTH) -> int:
        """Size of `own`."""
        return cls.pushed_at(size, rows, width) + 2 * size * min(rows, PUSHED_ROWS) * -(-width // 2) * PUSHED_BYTES

    def usual(self, share: Tensor, *others: Tensor | None) -> Sums:
        """Return how a sum is made fastest: for few rows pushed, for many of more than two ranks by owners."""
        num_bytes = share.numel() * share.element_size()
        pushed = share.shape[0] <= PUSHED_ROWS and 2 * num_bytes * (self.size - 1) <= PUSH_BYTES
        if pushed and all(_is_of_pairs(one) for one in (share, *others) if one is not None):
            return "pushed"
        return "owners" if self.size > 2 and num_bytes >= OWNERS_BYTES else "read"


def _is_of_pairs(rows: Tensor) -> bool:
    """Whether rows can be read two numbers at a time."""
    return not (rows.shape[-1] % 2 or rows.data_ptr() % 4 or (rows.dim() > 1 and rows.stride(0) % 2))


def rank_sum(share: Tensor, ranks: Parallel, *, peers: Peers) -> Tensor:
    """See `reference.rank_sum`."""
    return peer_sum(share, peers.buffers)[0]


def rank_sum_add(share: Tensor, value: Tensor, ranks: Parallel, *, peers: Peers) -> Tensor:
    """See `reference.rank_sum_add`: one kernel, unless the stream has another dtype than what is added to it."""
    if value.dtype != share.dtype:
        return value + rank_sum(share, ranks, peers=peers)
    return peer_sum(share, peers.buffers, value)[0]


def rank_sum_norm(
    share: Tensor, value: Tensor, weight: Tensor, eps: float, ranks: Parallel, *, peers: Peers
) -> tuple[Tensor, Tensor]:
    """See `reference.rank_sum_norm`: likewise."""
    normed, total = None, share
    if value.dtype == weight.dtype == share.dtype:
        total, normed = peer_sum(share, peers.buffers, value, weight, eps)
    if normed is None:
        total = rank_sum_add(share, value, ranks, peers=peers)
        normed = rms_norm(total, weight, eps)
    return normed, total


def peer_sum(
    share: Tensor,
    peers: PeerBuffers,
    value: Tensor | None = None,
    weight: Tensor | None = None,
    eps: float = 0.0,
    *,
    how: Sums | None = None,
) -> tuple[Tensor, Tensor | None]:
    """Add up the ranks' shares.

    Args:
        share: `[T, H]`, two bytes a number, T and H at most those of `peers`.
        peers: The ranks'.
        value: `[T, H]`, added to the sum; None: nothing is.
        weight: `[H]` of an RMS norm of what comes of that; None: there is none.
        eps: Of that.
        how: The same on all ranks; None: as is fastest. Shares are pushed in pairs of numbers: H is even, and
            T at most `PUSHED_ROWS`.

    Returns:
        The sum, with `value`, and its norm or None; the same on all ranks.
    """
    share = share if share.stride(-1) == 1 else share.contiguous()
    value = value if value is None or value.stride(-1) == 1 else value.contiguous()
    num, width = share.shape
    if not num:
        return share.new_empty(num, width), None if weight is None else share.new_empty(num, width)
    how = how or peers.usual(share, value, weight)
    total = torch.empty(num, width, dtype=share.dtype, device=share.device)
    normed = None if weight is None else torch.empty_like(total)
    block = triton.next_power_of_2(width)
    given = (
        share, total if value is None else value, total if weight is None else weight, total,
        total if normed is None else normed, peers.launches, peers.pointers,
    )  # fmt: skip
    strides = share.stride(0), 0 if value is None else value.stride(0)
    around = {"HAS_VALUE": value is not None, "HAS_NORM": weight is not None, "RANK": peers.rank, "SIZE": peers.size}
    around |= {"num_warps": min(16, max(4, block // 512)), **launch_options(share)}
    if how == "pushed":
        at = PeerBuffers.pushed_at(peers.size, peers.rows, peers.width)
        push_kernel[(num,)](
            *given, at, int(peers.is_alone), eps, *strides,
            H=width, BLOCK=block // 2, ROWS=min(peers.rows, PUSHED_ROWS), PAIRS=-(-peers.width // 2), **around,
        )  # fmt: skip
        return total, normed
    _peer_sum_kernel[(num,)](
        *given, eps, *strides,
        H=width, BLOCK=block, ROWS=peers.rows, WIDTH=peers.width, BY_OWNERS=how == "owners", **around,
    )  # fmt: skip
    return total, normed


@triton.jit
def _peer_sum_kernel(
    share, value, weight, total, normed, launches, pointers, eps, stride_share, stride_value,
    H: tl.constexpr, BLOCK: tl.constexpr, RANK: tl.constexpr, SIZE: tl.constexpr, ROWS: tl.constexpr,
    WIDTH: tl.constexpr, HAS_VALUE: tl.constexpr, HAS_NORM: tl.constexpr, BY_OWNERS: tl.constexpr,
    PDL: tl.constexpr,
):  # fmt: skip
    if PDL:  # what follows loads its weights while this waits for the others
        gdc_launch_dependents()
        gdc_wait()
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
    if BY_OWNERS:
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
            arrived = (own + ((ROWS + row) * SIZE + owner) * 4).to(tl.pointer_type(tl.int32))
            while tl.atomic_add(arrived, 0, sem="acquire", scope="sys") - launch < 0:
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
