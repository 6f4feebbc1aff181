"""The book of pages is watched: leaks and pages of two owners are repaired, counted and logged."""

from __future__ import annotations

import importlib.util
import logging
import random
import sys
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from script_executor import ENDS, ScriptExecutor

from dovetail.contracts.cache import FULL, Window
from dovetail.demo import MODEL_DIR
from dovetail.engine import recovery
from dovetail.engine.core import EngineCore
from dovetail.engine.recovery import SHARED_PAGE, KVCacheChecker
from dovetail.engine.request import EngineRequest
from dovetail.messages import SamplerParams, Submit
from dovetail.plugins import load
from dovetail_testing.engine import make_plans

spec = importlib.util.spec_from_file_location("scheduler_world", Path(__file__).parent / "test_scheduler.py")
assert spec is not None
assert spec.loader is not None
_scheduler = sys.modules[spec.name] = importlib.util.module_from_spec(spec)
spec.loader.exec_module(_scheduler)
World: Any = _scheduler.World


GROUPS = ((FULL,), (FULL, Window(6)))


def loaded(seed: int = 0, group: int = 0, **options: Any) -> Any:
    """A world in the middle of some requests, with cached prefixes; faults are of one cache group."""
    rng = random.Random(seed)
    world = World(num_pages=60, reaches=GROUPS[group], **options)
    world.group = group
    for _ in range(4):
        world.add([rng.randrange(3) for _ in range(17)], 6)
    world.drain()
    for _ in range(4):
        world.add([rng.randrange(3) for _ in range(rng.randrange(5, 25))], 20)
    for _ in range(3):
        world.step()
    assert world.scheduler.running
    return world


def end(world: Any, victims: list[EngineRequest]) -> None:
    """What the engine does with requests whose pages were shared."""
    for request in victims:
        world.scheduler.end(request)


def holder(world: Any) -> EngineRequest:
    """A running request with pages of its own."""
    return holders(world)[0]


def holders(world: Any) -> list[EngineRequest]:
    """All of them."""
    return [r for r in world.scheduler.running if len(r.pages[world.group]) > r.num_tree_pages]


def allocator(world: Any) -> Any:
    """Of the group that is at fault."""
    return world.pages.allocators[world.group]


def leak(world: Any) -> None:
    """A page leaves the free list and reaches nobody."""
    allocator(world).allocate(2)


def free_twice(world: Any) -> None:
    """A page is in the free list twice, and in place of another."""
    [page] = allocator(world).allocate(1)
    allocator(world).allocate(1)
    allocator(world).free([page, page])


def free_while_held(world: Any) -> None:
    """A page is in use and in the free list."""
    allocator(world).free([holder(world).pages[world.group][-1]])


def hold_twice(world: Any) -> None:
    """Two requests own one page."""
    one, other = holders(world)[:2]
    one.pages[world.group][-1] = other.pages[world.group][-1]


def cache_what_is_held(world: Any) -> None:
    """The tree and a request own one page."""
    node = next(node for node in world.pages.tree.nodes() if node.num_locks == 0 and node.pages[world.group][-1])
    node.pages[world.group][-1] = holder(world).pages[world.group][-1]


def lock_for_nobody(world: Any) -> None:
    """A path stays locked though its request is gone."""
    node = next(node for node in world.pages.tree.nodes() if node.num_locks == 0)
    world.pages.tree.lock(node)


FAULTS: list[tuple[Callable[[Any], None], int]] = [
    (leak, 0),
    (free_twice, 0),
    (free_while_held, 0),
    (hold_twice, 2),
    (cache_what_is_held, 1),
    (lock_for_nobody, 0),
]


@pytest.mark.parametrize("group", [0, 1])
@pytest.mark.parametrize(("fault", "num_victims"), FAULTS, ids=lambda x: getattr(x, "__name__", str(x)))
def test_a_fault_is_repaired_and_the_others_go_on(fault: Callable[[Any], None], num_victims: int, group: int) -> None:
    """Only requests that shared a page are ended; the rest finish, and every page is free or cached in the end."""
    world = loaded(group=group)
    running = world.scheduler.running
    assert world.pages.check_ownership(running)
    fault(world)
    assert not world.pages.check_ownership(running) or fault is lock_for_nobody
    found = world.pages.repair(world.scheduler.running)
    assert found
    assert len(found.affected) == num_victims
    end(world, found.affected)
    assert world.pages.check_counts(world.scheduler.running)
    assert world.pages.check_ownership(world.scheduler.running)
    assert not world.pages.repair(world.scheduler.running)
    world.drain()
    assert world.pages.num_used == 0
    world.pages.flush()
    for own in world.pages.allocators:
        assert own.num_free == own.num_pages == len(set(own.free_pages))


@given(st.integers(0, 2**32), st.lists(st.sampled_from([fault for fault, _ in FAULTS]), min_size=1, max_size=4))
def test_any_mix_of_faults_is_repaired_in_one_go(seed: int, faults: list[Callable[[Any], None]]) -> None:
    """After one repair the book is right, whatever was wrong with it."""
    world = loaded(seed, group=seed % 2, page_size=random.Random(seed).randrange(1, 5))
    for fault in faults:
        try:
            fault(world)
        except (StopIteration, ValueError, IndexError):
            continue  # nobody to do this to in this world
    end(world, world.pages.repair(world.scheduler.running).affected)
    assert world.pages.check_counts(world.scheduler.running)
    assert world.pages.check_ownership(world.scheduler.running)
    world.drain()
    world.pages.flush()
    for own in world.pages.allocators:
        assert sorted(own.free_pages) == list(range(1, own.num_pages + 1))


def test_a_sound_book_is_left_alone() -> None:
    """A repair of nothing changes nothing: cached prefixes and locks stay."""
    world = loaded()
    before = [(node.pages, node.num_locks) for node in world.pages.tree.nodes()]
    counts = (world.pages.tree.num_evictable, world.pages.tree.num_locked, sorted(world.pages.allocators[0].free_pages))
    assert world.pages.check_counts(world.scheduler.running)
    assert not world.pages.repair(world.scheduler.running)
    assert [(node.pages, node.num_locks) for node in world.pages.tree.nodes()] == before
    after = (world.pages.tree.num_evictable, world.pages.tree.num_locked, sorted(world.pages.allocators[0].free_pages))
    assert after == counts


def test_the_watch_looks_now_and_then_counts_and_logs(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """A leak is found at the next look, repaired, counted, and logged as one error."""
    monkeypatch.setattr(recovery, "CHECK_INTERVAL", 4)
    world = loaded()
    watch = KVCacheChecker(world.pages)
    for _ in range(8):
        assert watch.check(world.scheduler.running) == []
    leak(world)
    with caplog.at_level(logging.ERROR, "dovetail"):
        for _ in range(4):
            assert watch.check(world.scheduler.running) == []
    assert (watch.num_repairs, watch.num_repaired_pages) == (1, 2)
    assert [record.getMessage().split(":")[0] for record in caplog.records] == [
        "Page accounting was wrong and is repaired"
    ]
    world.drain()
    assert world.pages.num_used == 0


def test_what_counts_do_not_show_is_found_when_nothing_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    """A page freed twice in place of another changes no count; the look at every page waits for an idle moment."""
    monkeypatch.setattr(recovery, "CHECK_INTERVAL", 2)
    world = loaded()
    watch = KVCacheChecker(world.pages)
    free_twice(world)
    monkeypatch.setattr(watch, "_steps_to_deep", 5)
    for _ in range(8):
        watch.check(world.scheduler.running)
    assert watch.num_repairs == 0
    for request in list(world.scheduler.running):
        world.scheduler.end(request)
    watch.check(world.scheduler.running)
    assert watch.num_repairs == 1


def test_requests_that_shared_a_page_are_handed_to_the_engine(monkeypatch: pytest.MonkeyPatch) -> None:
    """`look` returns them, and a request that is none of them keeps its pages."""
    monkeypatch.setattr(recovery, "CHECK_INTERVAL", 1)
    world = loaded()
    hold_twice(world)
    world.pages.allocators[0].allocate(1)  # what the lost page's count would show
    innocent = [list(r.pages[0]) for r in world.scheduler.running]
    victims = KVCacheChecker(world.pages).check(world.scheduler.running)
    assert len(victims) == 2
    kept = [list(r.pages[0]) for r in world.scheduler.running if r not in victims]
    assert all(pages in innocent for pages in kept)
    end(world, victims)
    world.drain()


def test_the_engine_ends_requests_that_shared_a_page(monkeypatch: pytest.MonkeyPatch) -> None:
    """Both finish with the reason after the next step; a third request gets all its tokens."""
    monkeypatch.setattr(recovery, "CHECK_INTERVAL", 1)
    options, plan = make_plans(MODEL_DIR, page_size=4, max_running_requests=3)
    core = EngineCore(options, load(plan, "engine"), ScriptExecutor(num_pages=40, page_size=4), eos_ids=ENDS)
    for handle in (1, 2, 3):
        params = SamplerParams(max_tokens=12, ignore_eos=True)
        core.handle(Submit(rid="", handle=handle, prompt_ids=[handle] * 9, params=params))
    core.step()
    hold_twice(SimpleNamespace(scheduler=core.scheduler, group=0))
    core.pages.allocators[0].allocate(1)  # so that the counts show it
    deltas = [delta for _ in range(2) for delta in core.step().deltas]
    assert {delta.handle: delta.finish for delta in deltas if delta.finish} == {1: SHARED_PAGE, 2: SHARED_PAGE}
    while core.has_work:
        deltas += core.step().deltas
    assert sum(len(delta.ids) for delta in deltas if delta.handle == 3) == 12
    assert core.pages.num_used == 0
