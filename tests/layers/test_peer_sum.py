"""Sums in memory that all ranks see: what one rank computes of what the others left there, in Triton's interpreter.

The interpreter runs one program at a time, so the other ranks' shares and signals are there before.
"""

from __future__ import annotations

import logging
import os
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any, cast

import peer_process
import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from dovetail.contracts.device import Device, DeviceView
from dovetail.contracts.layers import BuildContext, Parallel, Stream
from dovetail.contracts.ranks import PeerMemory
from dovetail.runtime.kernels.binding import PLAIN as BY_MEANING
from dovetail.runtime.kernels.binding import KernelBinder, LoadedSet
from dovetail.sdk.layers.norm import RMSNorm
from dovetail.sdk.layers.ops import reference
from dovetail.sdk.layers.plain import PLAIN
from dovetail_backends.devices.cuda_ranks import CudaCommunicator
from dovetail_backends.kernels.triton import TritonKernels
from dovetail_backends.kernels.triton import peer_sum as sums
from dovetail_backends.kernels.triton.peer_sum import PUSHED_ROWS, PeerBuffers, Sums, peer_sum

CPU = torch.device("cpu")
ROWS, WIDTH = 6, 112


class World:
    """The memory of some ranks, in one process."""

    def __init__(self, size: int, dtype: torch.dtype) -> None:
        self.size, self.dtype = size, dtype
        self.memory = [torch.zeros(PeerBuffers.num_bytes(size, ROWS, WIDTH), dtype=torch.uint8) for _ in range(size)]
        self.pointers = torch.tensor([memory.data_ptr() for memory in self.memory])
        self.peers = [
            PeerBuffers.over(PeerMemory(rank, size, self.memory[rank], self.pointers), ROWS, WIDTH)
            for rank in range(size)
        ]

    def signals(self, rank: int) -> Tensor:
        """Those that a rank has got, `[2, rows, size]`."""
        return self.memory[rank][: 8 * ROWS * self.size].view(torch.int32).view(2, ROWS, self.size)

    def numbers(self, rank: int) -> Tensor:
        """A rank's shares and sums, `[2, 2, rows, width]`."""
        start = 8 * ROWS * self.size
        return self.memory[rank][start : start + 8 * ROWS * WIDTH].view(self.dtype).view(2, 2, ROWS, WIDTH)

    def pushed(self, rank: int) -> Tensor:
        """What was pushed to a rank, `[2, size, rows, width / 2, 4]` with two numbers in front of the launch's."""
        at = PeerBuffers.pushed_at(self.size, ROWS, WIDTH)
        return self.memory[rank][at:].view(torch.int16).view(2, self.size, ROWS, WIDTH // 2, 4)

    def others_have_come(self, rank: int, shares: list[Tensor], launch: int) -> None:
        """Write what the other ranks write in a launch."""
        rows, width = shares[0].shape
        for other in range(self.size):
            if other != rank:
                self.numbers(other)[0, launch % 2, :rows, :width] = shares[other]
                self.signals(rank)[0, :rows, other] = launch

    def owners_have_added(self, rank: int, total: Tensor, launch: int) -> None:
        """Write what the owners of rows write in a launch of two shots."""
        rows, width = total.shape
        for row in range(rows):
            owner = row % self.size
            if owner != rank:
                self.numbers(owner)[1, launch % 2, row, :width] = total[row]
                self.signals(rank)[1, row, owner] = launch


def check(found: Tensor, expected: Tensor) -> None:
    """Equal bit by bit; in bfloat16, which Triton's interpreter cuts off where it should round, nearly."""
    if found.dtype == torch.float16:
        assert torch.equal(found, expected)
    else:
        torch.testing.assert_close(found, expected, rtol=2**-6, atol=2**-6)


def alone(size: int, rows: int, width: int) -> PeerBuffers:
    return PeerBuffers.over(PeerMemory.alone(0, size, PeerBuffers.num_bytes(size, rows, width), CPU), rows, width)


def random(*shape: int, seed: int, dtype: torch.dtype) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


@pytest.mark.sampled("how", "dtype")
@pytest.mark.parametrize("size", [2, 3, 4])
@pytest.mark.parametrize("how", ["pushed", "read", "owners"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_every_rank_computes_the_reference(size: int, how: Sums, dtype: torch.dtype) -> None:
    """Bit by bit, in launches that follow each other, of other sizes; with a stream and a norm, or without."""
    for rank in range(size):
        world = World(size, dtype)
        for launch, (rows, width) in enumerate([(1, 100), (5, 112), (3, 64), (6, 8 if how == "pushed" else 7)], 1):
            shares = [random(rows, width, seed=10 * launch + other, dtype=dtype) for other in range(size)]
            summed = shares[0].float()
            for share in shares[1:]:
                summed = summed + share.float()
            total = summed.to(dtype)
            # Programs count their own launches: rows that took part in fewer are behind.
            counted = world.peers[rank].launches[:rows] + 1
            for row in range(rows):
                one = [share[row : row + 1] for share in shares]
                world_row = Row(world, row)
                if how == "pushed":
                    world_row.others_have_pushed(rank, one, int(counted[row]))
                else:
                    world_row.others_have_come(rank, one, int(counted[row]))
                if how == "owners":
                    world_row.owner_has_added(rank, total[row], int(counted[row]))
            value = random(rows, width, seed=launch, dtype=dtype) if launch != 2 else None
            weight = random(width, seed=99, dtype=dtype) if launch > 2 else None
            found, normed = peer_sum(shares[rank], world.peers[rank], value, weight, 1e-5, how=how)
            expected = total if value is None else value + total
            check(found, expected)
            if weight is None:
                assert normed is None
            else:
                assert normed is not None
                torch.testing.assert_close(normed, reference.rms_norm(found, weight, 1e-5), rtol=2**-6, atol=2**-6)
            assert torch.equal(world.peers[rank].launches[:rows], counted)
            told(world, rank, counted, how, shares[rank])


class Row:
    """One row of a world: the programs are independent of each other."""

    def __init__(self, world: World, row: int) -> None:
        self.world, self.row = world, row

    def others_have_come(self, rank: int, shares: list[Tensor], launch: int) -> None:
        for other in range(self.world.size):
            if other != rank:
                self.world.numbers(other)[0, launch % 2, self.row, : shares[other].shape[1]] = shares[other][0]
                self.world.signals(rank)[0, self.row, other] = launch

    def others_have_pushed(self, rank: int, shares: list[Tensor], launch: int) -> None:
        for other in range(self.world.size):
            if other != rank:
                pairs = shares[other][0].view(torch.int16).view(-1, 2)
                place = self.world.pushed(rank)[launch % 2, other, self.row, : len(pairs)]
                place[:, :2] = pairs
                place[:, 2:] = torch.tensor([launch], dtype=torch.int32).view(torch.int16)

    def owner_has_added(self, rank: int, total: Tensor, launch: int) -> None:
        owner = self.row % self.world.size
        if owner != rank:
            self.world.numbers(owner)[1, launch % 2, self.row, : len(total)] = total
            self.world.signals(rank)[1, self.row, owner] = launch


def told(world: World, rank: int, counted: Tensor, how: Sums, share: Tensor) -> None:
    """All that have to be told were told: everybody, or the owner of a row, and by it everybody."""
    for row, launch in enumerate(counted.tolist()):
        owner = row % world.size
        for other in range(world.size):
            if other == rank:
                continue
            first, second = (int(world.signals(other)[phase, row, rank]) for phase in (0, 1))
            assert first == (launch if how == "read" or (how == "owners" and other == owner) else 0)
            assert second == (launch if how == "owners" and rank == owner else 0)
            pushed = world.pushed(other)[launch % 2, rank, row, : share.shape[1] // 2]
            if how == "pushed":
                assert torch.equal(pushed[:, :2].reshape(-1), share[row].view(torch.int16))
                assert pushed[:, 2:].contiguous().view(torch.int32).unique().tolist() == [launch]
            else:
                assert not pushed.any()


def test_how_a_sum_is_made() -> None:
    """Few rows of pairs are pushed, others read, many of several ranks added by owners."""
    peers = [alone(size, 256, 4096) for size in (2, 4)]
    share = torch.zeros(64, 4096, dtype=torch.float16)
    assert [[one.usual(share[:rows]) for rows in (1, 16, 32, 33, 64)] for one in peers] == [
        ["pushed", "pushed", "pushed", "pushed", "pushed"],
        ["pushed", "pushed", "owners", "owners", "owners"],
    ]
    assert peers[0].usual(share[:4, :4095]) == "read"
    assert peers[0].usual(share[:4], share[:4, :64].reshape(-1)[1:].reshape(1, -1)[:, :64]) == "read"
    assert peers[0].usual(torch.zeros(PUSHED_ROWS + 1, 2, dtype=torch.float16)) == "read"


@pytest.mark.parametrize("how", ["pushed", "read"])
def test_launches_may_overflow(how: Sums) -> None:
    """After 2³¹ launches of a program signals count on from below zero."""
    world = World(2, torch.float16)
    shares = [random(1, 64, seed=other, dtype=torch.float16) for other in range(2)]
    world.peers[0].launches[0] = 2**31 - 2
    for launch in (2**31 - 1, -(2**31), -(2**31) + 1):
        world.others_have_come(0, shares, launch)
        Row(world, 0).others_have_pushed(0, shares, launch)
        found, _ = peer_sum(shares[0], world.peers[0], how=how)
        assert torch.equal(found, (shares[0].float() + shares[1].float()).to(torch.float16))
        assert int(world.peers[0].launches[0]) == launch


class Doubled:
    """What ranks of one's own kind exchange: each rank's share is this one's."""

    def __init__(self) -> None:
        self.summed: list[tuple[int, ...]] = []

    def all_reduce(self, share: Tensor) -> Tensor:
        self.summed.append(tuple(share.shape))
        return (share.float() * 2).to(share.dtype)


@pytest.fixture
def launched(monkeypatch: pytest.MonkeyPatch) -> list[tuple[Any, ...]]:
    """Shapes of the sums that kernels made, with how many further operands each had."""
    seen: list[tuple[Any, ...]] = []

    def noted(share: Tensor, peers: PeerBuffers, *given: Any) -> Any:
        seen.append((tuple(share.shape), len([one for one in given if one is not None])))
        return peer_sum(share, peers, *given)

    monkeypatch.setattr(sums, "peer_sum", noted)
    return seen


def bound(peers: int, links: Doubled, dtype: torch.dtype = torch.float16) -> tuple[KernelBinder, BuildContext]:
    """A model's context on the first of two ranks, whose kernels are ours."""
    sets = [LoadedSet("triton", "kernels 'triton'", TritonKernels(), True)]
    binder = KernelBinder(sets, DeviceView("cpu", is_interpreted=True), peers=peers)
    parallel = Parallel(rank=0, size=2, all_reduce=links.all_reduce)
    return binder, BuildContext(device=CPU, dtype=dtype, factory=PLAIN, parallel=parallel, kernels=binder)


def lent(num_bytes: int) -> PeerMemory:
    return PeerMemory.alone(0, 2, num_bytes, CPU)


def served(binder: KernelBinder) -> dict[str, list[tuple[int, int, str]]]:
    return {use.operation: list(use.served) for use in binder.table if use.operation.startswith("rank_sum")}


def test_a_stream_is_added_up_and_normalised_by_one_kernel(launched: list[tuple[Any, ...]]) -> None:
    """A rank that stands for all launches the kernels of connected ones; more rows go the device's own way."""
    links = Doubled()
    binder, ctx = bound(2, links)
    norm, summed = RMSNorm(64, 1e-6, ctx), ctx.rank_sums(64)
    binder.freeze()
    binder.connect(lent)
    many = 1 << 31
    bands = [(0, 256, "triton"), (257, many - 1, "composed")]
    assert served(binder) == {
        "rank_sum H=64": [(0, 256, "triton"), (257, many - 1, BY_MEANING)],
        "rank_sum_add H=64": bands,
        "rank_sum_norm H=64": bands,
    }
    norm.weight.fill_(1.0)
    value, share = (random(3, 64, seed=seed, dtype=torch.float16) for seed in (1, 2))
    doubled = value + (share.float() * 2).to(torch.float16)
    stream = Stream(value.clone()).plus_share(share, summed)
    torch.testing.assert_close(norm(stream), norm(doubled), rtol=2**-9, atol=2**-9)
    assert torch.equal(stream.total(), doubled)
    assert torch.equal(Stream(value.clone()).plus_share(share, summed).total(), doubled)
    assert torch.equal(summed(share), (share.float() * 2).to(torch.float16))
    assert launched == [((3, 64), 3), ((3, 64), 1), ((3, 64), 0)]
    assert not links.summed
    assert summed(share[:0]).shape == (0, 64)
    many_shares = random(300, 64, seed=3, dtype=torch.float16)
    stream = Stream(torch.zeros_like(many_shares)).plus_share(many_shares, summed)
    assert norm(stream).shape == (300, 64)
    assert torch.equal(stream.total(), many_shares * 2)
    assert links.summed == [(300, 64)]
    wide = value.float()
    assert torch.equal(Stream(wide.clone()).plus_share(share, summed).total(), wide + share * 2)
    assert norm(Stream(wide.clone()).plus_share(share, summed)).dtype == torch.float32


def test_ranks_that_share_no_memory_add_up_plainly(launched: list[tuple[Any, ...]]) -> None:
    """Where the ranks find none when they meet, where they say so before, and of numbers that no kernel adds up."""
    links = Doubled()
    binder, ctx = bound(2, links)
    summed, share = ctx.rank_sums(64), random(3, 64, seed=2, dtype=torch.float16)
    binder.freeze()
    binder.connect(lent)
    binder.connect(lambda num_bytes: None)
    assert {name for bands in served(binder).values() for *_, name in bands} == {BY_MEANING, "composed"}
    assert ("triton", "the ranks share no memory") in {why for use in binder.table for why in use.others}
    assert torch.equal(Stream(share.clone()).plus_share(share, summed).total(), share * 3)
    for peers, dtype in ((0, torch.float16), (2, torch.float32)):
        binder, ctx = bound(peers, links, dtype)
        given = share.to(dtype)
        assert torch.equal(ctx.rank_sums(64)(given), given * 2)
        binder.connect(lent)  # of no set
        assert "triton" not in {name for bands in served(binder).values() for *_, name in bands}
    assert not launched
    assert links.summed == [(3, 64)] * 3


@pytest.mark.parametrize("size", [2, pytest.param(3, marks=pytest.mark.full)])
def test_processes_add_up_in_memory_that_they_share(size: int, tmp_path: Path) -> None:
    """Each rank pushes into the others' memory and waits for theirs; what the kernels return is the shares' sum."""
    command = [sys.executable, peer_process.__file__]
    environment = {**os.environ, "TRITON_INTERPRET": "1"}
    ranks = [subprocess.Popen([*command, str(rank), str(size), tmp_path], env=environment) for rank in range(size)]
    try:
        assert [rank.wait(120) for rank in ranks] == [0] * size
    finally:
        for rank in ranks:
            rank.kill()
    found = [load_file(tmp_path / f"{rank}.safetensors") for rank in range(size)]
    for at in range(peer_process.ROUNDS):
        rows = len(found[0][f"sum{at}"])
        total = sum(peer_process.share_of(rank, at, rows).float() for rank in range(size)).half()
        stream = peer_process.share_of(99, at, rows) + total
        for each in found:
            assert torch.equal(each[f"sum{at}"], total)
            assert torch.equal(each[f"total{at}"], stream)
            torch.testing.assert_close(
                each[f"norm{at}"],
                reference.rms_norm(stream, torch.ones(stream.shape[1]).half(), 1e-6),
                rtol=2**-9,
                atol=2**-9,
            )


def test_ranks_that_do_not_let_go_are_left(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    """The device of a lost rank's peers waits for ever; what ends an engine does not."""
    monkeypatch.setattr(logging.getLogger("dovetail"), "propagate", True)
    monkeypatch.setattr("dovetail_backends.devices.cuda_ranks.CLOSE_S", 0.05)
    let_go = threading.Event()
    monkeypatch.setattr("dovetail_backends.devices.cuda_ranks.dist.destroy_process_group", let_go.wait)
    links = CudaCommunicator(0, 2, Device(CPU))
    links.close()  # was never connected
    assert not caplog.records
    links._group = cast("Any", "a group")
    links.close()
    assert "a rank was lost" in caplog.text
    links.close()
    assert len(caplog.records) == 1
    let_go.set()


def test_memory_of_lost_ranks_is_not_freed(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    """Freeing it waits for the device, which waits for a lost rank: closing returns, and NCCL is not asked either."""
    monkeypatch.setattr(logging.getLogger("dovetail"), "propagate", True)
    monkeypatch.setattr("dovetail_backends.devices.cuda_ranks._is_idle_within", lambda device, limit_s: False)
    freed, left = [], []
    monkeypatch.setattr("dovetail_backends.devices.cuda_ranks.dist.destroy_process_group", lambda: left.append(1))

    class Shared:
        def __del__(self) -> None:
            freed.append(1)

    links = CudaCommunicator(0, 2, Device(CPU))
    links._group, links._shared = cast("Any", "a group"), cast("Any", [Shared()])
    links.close()
    assert (freed, left) == ([], [])
    assert "the device waits for it" in caplog.text
    links._group, links._shared = cast("Any", "a group"), cast("Any", [Shared()])
    monkeypatch.setattr("dovetail_backends.devices.cuda_ranks._is_idle_within", lambda device, limit_s: True)
    links.close()
    assert (freed, left) == ([1], [1])
