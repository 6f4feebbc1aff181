"""What a step costs the host does not depend on how many wait, and nobody waits for work that is in no hurry."""

from __future__ import annotations

import gc
import importlib.util
import random
import sys
from array import array
from collections.abc import Callable
from pathlib import Path
from types import FrameType
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dovetail.cache.radix import RadixTree
from dovetail.engine.admission import MAX_MATCHED
from dovetail.engine.owners import WaitQueue, rank
from dovetail.engine.policy import MAX_LOOKED_UP
from dovetail.engine.request import EngineRequest
from dovetail.messages import BACKGROUND, SamplerParams, Submit
from dovetail_testing.engine import make_policy

spec = importlib.util.spec_from_file_location("queue_world", Path(__file__).parent / "test_scheduler.py")
assert spec is not None
assert spec.loader is not None
_scheduler = sys.modules[spec.name] = importlib.util.module_from_spec(spec)
spec.loader.exec_module(_scheduler)
World: Any = _scheduler.World


def num_operations(work: Callable[[], object]) -> int:
    """Count the bytecodes that `work` takes, those of its loops and sort keys included."""
    num = 0

    def trace(frame: FrameType, event: str, arg: object) -> Any:
        nonlocal num
        frame.f_trace_opcodes, frame.f_trace_lines = True, False
        num += event == "opcode"
        return trace

    before = sys.gettrace()
    gc.disable()  # its callbacks would count
    sys.settrace(trace)
    try:
        work()
    finally:
        sys.settrace(before)
        gc.enable()
    return num


def full(policy: str, num_waiting: int, **options: Any) -> Any:
    """A world whose rows are all taken, with a queue."""
    world = World(num_pages=6000, policy=policy, max_running_requests=32, **options)
    for i in range(32):
        world.add([i, 1, 2], 500)
    for _ in range(6):
        world.step()
    assert sum(r.on_device for r in world.scheduler.running) == 32
    for i in range(num_waiting):
        world.add([7] * 40 + [i % 97], 9)
    return world


@pytest.mark.parametrize("policy", ["fcfs", "lof", "lpm", "priority"])
def test_a_step_with_a_long_queue_costs_what_one_with_a_short_queue_costs(policy: str) -> None:
    """With all rows taken, 3,000 waiting requests take as many operations as 30."""
    few, many = (num_operations(full(policy, num).step) for num in (30, 3000))
    assert many < few + 300


@pytest.mark.parametrize("policy", ["fcfs", "lof", "lpm", "priority"])
def test_a_queue_that_cannot_come_in_for_want_of_pages_is_not_matched(policy: str) -> None:
    """With rows free and no page, what 3,000 requests cost is bounded, and next to nothing while nothing changes."""

    def make(num: int) -> Any:
        world = World(num_pages=40, policy=policy, max_running_requests=32, max_prefill_tokens=64)
        world.add([1] * 20, 90)
        world.step()
        for i in range(num):
            world.add([i % 90 + 2] * 100, 30)
        world.step()
        assert len(world.scheduler.running) == 1
        return world

    few, many = (num_operations(make(num).step) for num in (300, 3000))
    assert many < few + 20_000  # of a thousand that are looked at
    world = make(300)
    matched: list[EngineRequest] = []
    match = world.pages.match
    world.pages.match = lambda request: (matched.append(request), match(request))
    for _ in range(3):
        world.step()
    assert matched == []


def test_a_line_that_waits_for_one_prefix_is_matched_in_bounds() -> None:
    """Of 3,000 requests that share what one computes, a bounded number is matched in that step; all share it."""
    world = World(num_pages=600, max_running_requests=64, max_prefill_tokens=512)
    followers = [world.add([3] * 200 + [i % 90], 1) for i in range(3000)]
    matched: list[EngineRequest] = []
    match = world.pages.match
    world.pages.match = lambda request: (matched.append(request), match(request))
    assert [c.request for c in world.step().chunks] == followers[:1]
    assert len(matched) == 1 + MAX_MATCHED
    assert len(world.step().chunks) == 64
    assert {r.cached_len for r in followers[1:64]} == {200}


def test_lpm_matches_a_few_a_step_and_only_what_changed() -> None:
    """Of 100 requests a bounded number is matched in a step; once all are, none until pages come or go."""
    tree = RadixTree(4)
    tree.insert([9] * 40, [list(range(1, 11))])
    waiting = [make(i, [9] * (i % 50) + [1] * 9) for i in range(1, 101)]
    counted = 0
    count = tree.count

    def counting(ids: Any, salt: str) -> int:
        nonlocal counted
        counted += 1
        return count(ids, salt)

    tree.count = counting  # type: ignore[method-assign]
    policy = make_policy("lpm")
    for step in range(1, 14):
        policy.order(waiting, tree)
        assert counted == min(100, step * MAX_LOOKED_UP)
    best = policy.order(waiting, tree)
    assert [r.matched_pages for r in best] == sorted((min(10, i % 50 // 4) for i in range(1, 101)), reverse=True)


def make(arrival: int, prompt: list[int], priority: int = 0) -> EngineRequest:
    """A request as the engine makes it."""
    submit = Submit(rid="", handle=arrival, prompt_ids=prompt, params=SamplerParams(max_tokens=1), priority=priority)
    return EngineRequest.from_submit(submit, arrival=arrival, eos_ids=())


@given(st.lists(st.tuples(st.sampled_from([BACKGROUND, -1, 0, 5]), st.booleans()), max_size=60))
def test_the_queue_is_always_in_order(ops: list[tuple[int, bool]]) -> None:
    """After any additions and removals it is as sorting gives it, the background last and apart."""
    queue, rng, inside = WaitQueue(), random.Random(len(ops)), []
    for arrival, (priority, leaves) in enumerate(ops):
        request = make(arrival, [1], priority)
        queue.add(request)
        inside.append(request)
        if leaves:
            queue.remove(inside.pop(rng.randrange(len(inside))))
    assert list(queue) == sorted(inside, key=rank)
    assert queue.first(9, background=True) == [r for r in queue if r.priority == BACKGROUND][:9]
    assert queue.first(9, background=False) == [r for r in queue if r.priority != BACKGROUND][:9]
    with pytest.raises(ValueError, match="not in the queue"):
        queue.remove(make(len(ops), [1]))


def steps_to_first_token(shares: bool) -> int:
    """Steps that a foreground request of 1,523 tokens takes while a background prompt is paused in its middle."""
    world = World(num_pages=500, page_size=16, max_prefill_tokens=128)
    prompt = [(i * 7) % 90 for i in range(1523)]
    world.add(prompt, 4, BACKGROUND)
    for _ in range(3):
        world.step()
    other = world.add(prompt if shares else prompt[::-1], 4)
    for step in range(1, 400):
        world.step()
        if other.num_output:
            return step
    return -1


def test_nobody_waits_for_a_page_that_paused_background_work_would_compute() -> None:
    """A request that shares all of it gets its first token sooner than one that shares nothing."""
    unshared = steps_to_first_token(shares=False)
    assert unshared == 12
    assert steps_to_first_token(shares=True) == 12 - 3


def test_background_work_takes_no_budget_row_or_reserve_from_others() -> None:
    """Whoever comes is computed in the very next step, with the whole budget, however much background there is."""
    world = World(num_pages=100, max_running_requests=4, max_prefill_tokens=32)
    background = [world.add([i] * 60, 200, BACKGROUND) for i in range(6)]
    for _ in range(6):
        world.step()
    world.now += 100  # a pulse is due
    other = world.add([50] * 40, 4)
    assert [(c.request, c.num_new) for c in world.step().chunks] == [(other, 32)]
    assert world.step().chunks[0].request is other
    world.drain()
    assert set(world.done) == {other, *background}


def test_a_background_prompt_gives_its_pages_to_a_decoding_request() -> None:
    """Where a decoding request needs a page, a half-computed background prompt is retracted, not another reader."""
    world = World(num_pages=12, max_running_requests=4, max_prefill_tokens=16)
    world.scheduler.ratio.value = 0.0
    background = world.add([9] * 30, 2, BACKGROUND)
    world.step()
    others = [world.add([i] * 3, 12) for i in range(2)]
    for _ in range(30):
        world.scheduler.ratio.value = 0.0
        world.step()
    assert [r.num_retractions for r in others] == [0, 0]
    world.drain()
    assert set(world.done) == {background, *others}


def test_removing_a_request_does_not_search_for_it() -> None:
    """It takes as many operations among 3,000 waiting requests as among 300, but for the search by halves."""
    costs = []
    for num in (300, 3000):
        world = full("fcfs", num)
        costs.append(num_operations(lambda w=world, n=num: w.scheduler.end(w.scheduler.find(n))))
    assert costs[1] < costs[0] + 200


@given(st.integers(0, 2**32))
def test_counting_finds_what_matching_finds_and_changes_nothing(seed: int) -> None:
    """`count` says how long a match would be, without splitting a node."""
    rng, tree = random.Random(seed), RadixTree(3)
    for first in range(1, 100, 10):
        tree.insert([rng.randrange(2) for _ in range(24)], [range(first, first + 8)])
    before = [node.pages for node in tree.nodes()]
    asked = [array("i", [rng.randrange(2) for _ in range(rng.randrange(26))]) for _ in range(20)]
    counts = [tree.count(ids) for ids in asked]
    assert [node.pages for node in tree.nodes()] == before
    assert counts == [len(tree.match(ids)[0][0]) for ids in asked]
