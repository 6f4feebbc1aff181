"""Scheduling without a model: a fake step says what would have been computed."""

from __future__ import annotations

import logging
import random
from collections.abc import Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dovetail.contracts.cache import FULL, Chunk, Reach, Recurrent, Window
from dovetail.engine.device_rows import DeviceRows
from dovetail.engine.kv_cache_manager import KVCacheManager
from dovetail.engine.limits import StepLimits
from dovetail.engine.request import EngineRequest, StepPlan
from dovetail.engine.scheduler import (
    BACKGROUND_INTERVAL_S,
    BUSY_INTERVAL_S,
    BUSY_ROWS,
    IDLE_DELAY_S,
    LowPriorityThrottle,
    Scheduler,
)
from dovetail.messages import BACKGROUND, Finish, SamplerParams, Submit
from dovetail.runtime.memory.plan import floor_pages, seen_pages
from dovetail_testing.engine import make_policy

POLICIES = ("fcfs", "lof", "lpm", "priority")


class World:
    """A scheduler, and steps that append token 1 to whatever samples, read `depth` steps late."""

    def __init__(
        self,
        num_pages: int = 20,
        page_size: int = 4,
        policy: str = "fcfs",
        depth: int = 0,
        reaches: Sequence[Reach] = (FULL,),
        num_copies: int = 5,
        **limits: int,
    ) -> None:
        most, prefill = limits.get("max_running_requests", 8), limits.get("max_prefill_tokens", 32)
        sizes = [num_pages]
        for reach in reaches[1:]:
            if isinstance(reach, Recurrent):
                sizes.append(num_copies)
                continue
            assert isinstance(reach, Window | Chunk)
            sizes.append(min(num_pages, floor_pages(seen_pages(reach, page_size), most, prefill, page_size)))
        self.pages = KVCacheManager(DeviceRows(most), page_size=page_size, num_pages=sizes, reaches=reaches)
        step = StepLimits(max_running_requests=most, max_prefill_tokens=prefill)
        self.now = 100.0
        self.scheduler = Scheduler(self.pages, make_policy(policy), step, LowPriorityThrottle(lambda: self.now))
        self.count = 0
        self.depth = depth
        self.flying: list[StepPlan] = []
        self.done: list[EngineRequest] = []

    def add(self, prompt: list[int], max_tokens: int, priority: int = 0) -> EngineRequest:
        """Queue a request."""
        self.count += 1
        params = SamplerParams(max_tokens=max_tokens)
        message = Submit(rid="", handle=self.count, prompt_ids=prompt, params=params, priority=priority)
        request = EngineRequest.from_submit(message, arrival=self.count, eos_ids=())
        self.scheduler.add(request)
        return request

    def step(self) -> StepPlan:
        """Launch one step and read what is under way beyond `depth` steps; the book is checked after it."""
        plan = self.scheduler.schedule()
        if plan.requests:
            self.scheduler.launching(plan)
            self.scheduler.launched(plan)
            self.flying.append(plan)
        while len(self.flying) > (self.depth if plan.requests else 0):
            self._settle(self.flying.pop(0))
        assert self.pages.check_counts(self.scheduler.running)
        assert self.pages.check_ownership(self.scheduler.running)
        return plan

    def _settle(self, plan: StepPlan) -> None:
        self.scheduler.step_finished(plan)
        self.scheduler.counted(plan)
        for request in plan.decode + [chunk.request for chunk in plan.chunks if chunk.samples]:
            if request.finish is None:
                request.append_token(1)
                if request.finish is not None:
                    self.scheduler.end(request)
                    self.done.append(request)

    def drain(self, most: int = 5000) -> None:
        """Step until nothing is left."""
        for _ in range(most):
            if not self.scheduler.has_work and not self.flying:
                return
            before = len(self.flying)
            plan = self.step()
            wait_s = self.scheduler.background.wait_s()
            assert plan.requests or before or wait_s, "a step with work to do computed nothing"
            self.now += 0 if plan.requests else wait_s
        pytest.fail("the scheduler does not finish")


def test_prompts_are_cut_to_the_budget_and_decode_goes_on_beside_them() -> None:
    """A long prompt runs in chunks of the step's budget while a decoding request gets its token in every step."""
    world = World(num_pages=60, max_prefill_tokens=10)
    first = world.add([1, 2, 3], 30)
    world.step()
    world.add(list(range(25)), 5)
    sizes = []
    for _ in range(3):
        plan = world.step()
        assert plan.decode == [first]
        sizes.append([c.num_new for c in plan.chunks])
    assert sizes == [[10], [10], [5]]


def test_requests_that_share_a_prefix_wait_for_it_and_hit_the_cache() -> None:
    """Of equal prompts that arrive together, one is computed and the others find its pages."""
    world = World(num_pages=60)
    requests = [world.add(list(range(17)), 3) for _ in range(4)]
    plan = world.step()
    assert [c.request for c in plan.chunks] == requests[:1]
    plan = world.step()
    assert [(c.request, c.num_new) for c in plan.chunks] == [(r, 1) for r in requests[1:]]
    assert [r.cached_len for r in requests] == [0, 16, 16, 16]


def test_a_full_pool_retracts_the_latest_and_logs_it(caplog: pytest.LogCaptureFixture) -> None:
    """When decoding outgrows the pool, the latest request goes back, keeps its tokens, and all finish."""
    world = World(num_pages=12)
    world.scheduler.ratio.value = 0.0
    requests = [world.add([i] * 8, 24) for i in range(3)]
    with caplog.at_level(logging.INFO, "dovetail"):
        world.drain()
    assert [r.num_output for r in requests] == [24] * 3
    assert requests[0].num_retractions == 0
    assert requests[2].num_retractions > 0
    assert any(
        r.getMessage().startswith("KV cache pool is full. Retract requests. #retracted_reqs: ") for r in caplog.records
    )


def test_a_retracted_request_is_not_admitted_before_its_pending_token_is_read() -> None:
    """Its next prefill includes the token that an unread step has sampled for it, although it fits right away."""
    world = World(depth=1)
    request = world.add([1, 2, 3], 9)
    world.step()
    world.step()
    world.scheduler.retract([request])
    assert (request.num_output, request.in_flight) == (1, 1)
    assert world.step().requests == []
    [chunk] = world.step().chunks
    assert (request.num_output, chunk.start + chunk.num_new) == (2, 5)


def test_no_step_is_planned_behind_the_last_token() -> None:
    """Steps whose tokens are not read yet count: a request of two tokens is in two steps."""
    world = World(depth=3)
    world.add([1, 2, 3], 2)
    assert [len(world.step().requests) for _ in range(3)] == [1, 1, 0]


def test_priority_goes_first_and_preempts_only_under_its_policy() -> None:
    """A higher priority is admitted first; it pushes out a running request only with `priority`."""
    for policy, retracted in (("fcfs", 0), ("priority", 1)):
        world = World(num_pages=8, policy=policy)
        low = world.add([1] * 20, 8)
        world.step()
        world.add([2] * 4, 4)
        high = world.add([3] * 20, 8, priority=5)
        world.drain()
        assert low.num_retractions == retracted
        assert len(world.done) == 3
        assert (world.done.index(high) < world.done.index(low)) == (policy == "priority")


def test_the_longest_cached_prefix_goes_first_under_lpm() -> None:
    """A later request with a cached prefix overtakes one without."""
    world = World(policy="lpm", max_running_requests=1)
    world.add([7] * 12, 1)
    world.drain()
    cold, warm = world.add([1] * 12, 1), world.add([7] * 12, 1)
    world.drain()
    assert world.done[1:] == [warm, cold]


def test_an_abort_gives_everything_back_at_any_stage() -> None:
    """Waiting, half-prefilled and decoding requests can be removed; nothing stays held."""
    world = World(max_prefill_tokens=5, max_running_requests=2)
    requests = [world.add([i] * 12, 10) for i in range(3)]
    for _ in range(4):
        world.step()
    for request in requests:
        world.scheduler.end(request)
        assert world.pages.check_counts(world.scheduler.running)
        assert world.pages.check_ownership(world.scheduler.running)
        assert world.scheduler.find(request.handle) is None
    assert world.pages.num_used == 0


def test_background_requests_hold_back_for_others_and_a_while_after() -> None:
    """Beside anyone else they take part in one step per pulse, a few at a time; when all is quiet they go on."""
    world = World(num_pages=90, max_running_requests=8)
    background = [world.add([i] * 5, 60, BACKGROUND) for i in range(6)]
    world.step()
    assert world.step().decode == background
    world.add([7, 7], 9)
    plans = [world.step() for _ in range(9)]
    assert [len(p.decode) for p in plans] == [BUSY_ROWS, *[1] * 8]
    assert [r.priority for r in world.done] == [0]
    assert world.step().requests == []
    world.now += BACKGROUND_INTERVAL_S
    assert len(world.step().requests) == BUSY_ROWS
    world.add([7, 7], 2)
    world.now += BACKGROUND_INTERVAL_S
    assert len(world.step().requests) == 1
    world.now += BUSY_INTERVAL_S
    assert len(world.step().requests) == 1 + BUSY_ROWS
    assert world.step().requests == []
    assert 0 < world.scheduler.background.wait_s() <= BACKGROUND_INTERVAL_S
    world.now += IDLE_DELAY_S
    assert world.step().decode == background


@pytest.mark.parametrize("policy", ["fcfs", "lpm", "priority"])
def test_background_requests_give_way_where_room_is_short(policy: str) -> None:
    """Pages and rows of background requests go to whoever else comes, under every policy, and all finish."""
    world = World(num_pages=12, max_running_requests=2, policy=policy)
    background = [world.add([i] * 12, 8, BACKGROUND) for i in range(2)]
    world.step()
    other = world.add([9] * 20, 3)
    assert other in world.step().requests
    assert sum(r.num_retractions for r in background) >= 1
    world.drain()
    assert world.done[0] is other
    assert set(world.done) == {other, *background}


@given(st.integers(0, 2**32), st.sampled_from(POLICIES), st.integers(1, 5))
def test_random_loads_always_finish_and_lose_no_page(seed: int, policy: str, page_size: int) -> None:
    """Whatever arrives, is aborted or retracted: every request ends, and all pages are free or cached in the end."""
    rng = random.Random(seed)
    num_pages = rng.randrange(80 // page_size, 200 // page_size)
    world = World(num_pages=num_pages, page_size=page_size, policy=policy, depth=rng.randrange(3))
    capacity = world.pages.allocators[0].num_pages * page_size
    added = aborted = 0
    for _ in range(rng.randrange(1, 60)):
        for _ in range(rng.randrange(3)):
            prompt = [rng.randrange(2) for _ in range(rng.randrange(1, 40))]
            world.add(prompt, min(rng.randrange(1, 40), capacity - len(prompt)), rng.choice([0, 1, BACKGROUND]))
            added += 1
        if rng.random() < 0.2 and world.scheduler.has_work:
            pool = [*world.scheduler.waiting, *world.scheduler.running]
            gone = rng.choice(pool)
            world.scheduler.end(gone)
            gone.finish = Finish("abort")
            aborted += 1
        if world.scheduler.has_work:
            world.step()
    world.drain()
    assert len(world.done) == added - aborted
    assert world.pages.num_used == 0
    world.pages.flush()
    assert world.pages.allocators[0].num_free == world.pages.allocators[0].num_pages
