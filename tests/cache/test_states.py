"""Recurrent states in memory, where copies of them stand, and what the plan counts."""

from __future__ import annotations

import pytest
import torch

from dovetail.cache.pool import KVCache, StateCache
from dovetail.contracts.attention import StateSave
from dovetail.contracts.cache import FULL, CacheTensor, Recurrent, Window
from dovetail.contracts.config import LayerSpec, cache_groups
from dovetail.engine.kv_cache_manager import StateGrid
from dovetail.messages.step import MAX_SAVES
from dovetail.runtime.memory.estimates import group_token_bytes

CPU = torch.device("cpu")
STATE = (CacheTensor("conv", (2, 3)), CacheTensor("memory", (4,), "float32"))
OTHER = (CacheTensor("memory", (5,)),)
SPECS = (
    LayerSpec(index=0, reach=Recurrent(), state=STATE),
    LayerSpec(index=1, num_qo_heads=2, num_kv_heads=2, qk_dim=8, v_dim=8),
    LayerSpec(index=2, reach=Recurrent(), state=STATE),
    LayerSpec(index=3, reach=Recurrent(), state=OTHER),
    LayerSpec(index=4, num_qo_heads=2, num_kv_heads=2, qk_dim=8, v_dim=8, reach=Window(4)),
)


@pytest.fixture
def cache() -> KVCache:
    """Four device rows, and three copies of each group's states beside zeros."""
    groups = cache_groups(SPECS)
    assert [group.name for group in groups] == ["full", "window-4", "recurrent", "recurrent-2"]
    return KVCache(groups, [9, 9, 4, 4], 4, torch.bfloat16, CPU, 4)


def test_states_have_their_own_shapes_and_dtypes(cache: KVCache) -> None:
    """A row for each device row, in each layer; the plan counts what is there."""
    states = StateCache(cache)
    assert {name: (tuple(x.shape), x.dtype) for name, x in states.rows(2).items()} == {
        "conv": ((4, 2, 3), torch.bfloat16),
        "memory": ((4, 4), torch.float32),
    }
    assert states.rows(3)["memory"].shape == (4, 5)
    sizes = [group_token_bytes(group, 2) for group in cache_groups(SPECS)[2:]]
    assert sizes == [2 * (6 * 2 + 4 * 4), 5 * 2]
    assert [own.num_bytes for own in cache.states.values()] == [(4 + 4) * size for size in sizes]


def test_a_copy_comes_into_rows_as_it_was(cache: KVCache) -> None:
    """Byte for byte, of its own layer and group only; copy 0 is zeros."""
    states = StateCache(cache)
    torch.manual_seed(0)
    for index in (0, 2, 3):
        for own in states.rows(index).values():
            own.copy_(torch.randn(own.shape))
    before = {index: {name: own.clone() for name, own in states.rows(index).items()} for index in (0, 2, 3)}
    for index in (0, 2):
        states.save(index, 2, {name: own[1:2] for name, own in states.rows(index).items()})
    states.load(2, [2, 0], [3, 0])
    for index in (0, 2):
        for name, own in states.rows(index).items():
            old = before[index][name]
            assert torch.equal(own[3], old[1])
            assert torch.equal(own[1:3], old[1:3])
            assert not own[0].any()
    assert all(torch.equal(own, before[3][name]) for name, own in states.rows(3).items())
    assert [states.wants(3, StateSave(group, 0, 4, 1)) for group in (2, 3)] == [False, True]


def test_a_copy_that_is_scrubbed_is_zeros(cache: KVCache) -> None:
    """In every layer and tensor, and nothing else."""
    states = StateCache(cache)
    for index in (0, 2):
        for copy in (1, 2):
            states.save(index, copy, {name: torch.ones_like(own[:1]) for name, own in states.rows(index).items()})
    cache.zero_pages(2, [1])
    states.load(2, [1, 2], [0, 1])
    for index in (0, 2):
        assert [[bool(own[row].any()) for row in (0, 1)] for own in states.rows(index).values()] == [[False, True]] * 2


@pytest.mark.parametrize(
    ("start", "end", "known", "branch", "want", "spare"),
    [
        (0, 150, 150, 0, [144], [120, 96, 48]),
        (0, 144, 144, 0, [120], [96, 72, 24, 144]),
        (0, 48, 150, 0, [], [48]),
        (0, 72, 150, 0, [], [48, 72]),
        (0, 50, 150, 0, [], [48]),
        (48, 150, 150, 100, [144, 96], [120]),
        (96, 150, 150, 100, [144], [120]),
        (0, 24, 24, 24, [24], []),
        (0, 23, 23, 23, [], []),
        (0, 25, 25, 25, [24], []),
    ],
)
def test_where_copies_stand(start: int, end: int, known: int, branch: int, want: list[int], spare: list[int]) -> None:
    """At multiples of a page and of what is folded at once: where a prompt ends, and where it parted; then others."""
    grid = StateGrid((FULL, Recurrent(8, in_place=True)), 12)
    assert grid.grid == 24
    found = grid.places(start, end, known, branch)
    assert found == [(at, False) for at in want] + [(at, True) for at in spare]


def test_copies_that_cost_time_are_few() -> None:
    """Where a layer folds in pieces that end at copies, spare ones are taken at the ends of chunks alone."""
    grid = StateGrid((FULL, Recurrent(8, in_place=True), Recurrent(8)), 12)
    assert grid.places(0, 150, 150, 50) == [(144, False), (48, False)]
    assert grid.places(0, 72, 150, 0) == [(72, True)]


def test_a_step_takes_no_more_copies_than_graphs_have_places_for() -> None:
    """However long the chunk is."""
    grid = StateGrid((FULL, Recurrent(1, in_place=True)), 1)
    assert len(grid.places(0, 99_999, 100_000, 50_000)) == MAX_SAVES - 1
    assert len(grid.places(0, 100_000, 100_000, 50_000)) == MAX_SAVES


def test_chunks_end_where_tokens_are_folded_at_once() -> None:
    """So that each schedule folds alike, wherever one began; where a step has no room for that they end anywhere."""
    grid = StateGrid((FULL, Recurrent(8), Recurrent(12)), 4)
    assert grid.interval == 24
    assert [grid.aligned(0, num, 100) for num in (23, 24, 60)] == [0, 24, 48]
    assert [grid.aligned(5, num, 100) for num in (18, 19, 60)] == [0, 19, 43]
    assert grid.aligned(0, 20, 20) == 20
    assert StateGrid((FULL, Window(8)), 4).aligned(3, 5, 100) == 5
