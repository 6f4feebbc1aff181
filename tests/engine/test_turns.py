"""Owners take turns: one that sends without end does not keep others waiting, and tokens follow weights."""

from __future__ import annotations

import random
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import count
from typing import Any

import pytest

from dovetail.contracts.scheduling import PrefixView, SchedulePolicy, WaitingRequest
from dovetail.engine.device_rows import DeviceRows
from dovetail.engine.kv_cache_manager import KVCacheManager
from dovetail.engine.limits import StepLimits
from dovetail.engine.owners import BEHIND, CREDIT, MIN_KNOWN, Owners
from dovetail.engine.policy import Policy, policy_of
from dovetail.engine.request import EngineRequest
from dovetail.engine.scheduler import LowPriorityThrottle, Scheduler
from dovetail.messages import BACKGROUND, SamplerParams, Submit
from dovetail_testing.engine import make_policy

POLICIES = ("fcfs", "lpm", "priority")
FLOOD = "flood"


@dataclass
class Load:
    """A scheduler without a model: whatever samples gets token 1. `waits` are steps to each owner's first tokens."""

    policy: Policy
    num_rows: int = 16
    num_pages: int = 4000
    page_size: int = 16
    max_prefill_tokens: int = 2048
    step: int = 0
    began: dict[EngineRequest, int] = field(default_factory=dict)
    waits: dict[str, list[int]] = field(default_factory=lambda: defaultdict(list))
    tokens: dict[str, int] = field(default_factory=lambda: defaultdict(int))
    on_end: Callable[[EngineRequest], object] = lambda request: None

    def __post_init__(self) -> None:
        pages = KVCacheManager(DeviceRows(self.num_rows), page_size=self.page_size, num_pages=[self.num_pages])
        limits = StepLimits(max_running_requests=self.num_rows, max_prefill_tokens=self.max_prefill_tokens)
        self.scheduler = Scheduler(pages, self.policy, limits, LowPriorityThrottle(lambda: 0.0))
        self._arrivals = count(1)

    def add(
        self, owner: str, prompt: Sequence[int], num_tokens: int, weight: float = 1.0, priority: int = 0
    ) -> EngineRequest:
        """Queue a request."""
        at = next(self._arrivals)
        params = SamplerParams(max_tokens=num_tokens)
        submit = Submit(
            rid="", handle=at, prompt_ids=list(prompt), params=params, owner=owner, weight=weight, priority=priority
        )
        request = EngineRequest.from_submit(submit, arrival=at, eos_ids=())
        self.scheduler.add(request)
        self.began[request] = self.step
        return request

    def run(self, num_steps: float = 1) -> None:
        """Make steps, each of which is read at once."""
        for _ in range(int(num_steps)):
            self.step += 1
            plan = self.scheduler.schedule()
            self.scheduler.launching(plan)
            self.scheduler.launched(plan)
            self.scheduler.step_finished(plan)
            self.scheduler.counted(plan)
            for chunk in plan.chunks:
                self.tokens[chunk.request.owner] += chunk.num_new
            for request in plan.sampled:
                self.tokens[request.owner] += 1
                if request.num_output == 0:
                    self.waits[request.owner].append(self.step - self.began[request])
                request.append_token(1)
                if request.finish is not None:
                    self.scheduler.end(request)
                    self.on_end(request)
            assert self.scheduler.pages.check_counts(self.scheduler.running)
            assert self.scheduler.pages.check_ownership(self.scheduler.running)


def p99(values: Sequence[int]) -> int:
    return sorted(values)[len(values) * 99 // 100]


def hundred(policy: str, *, is_flooded: bool) -> list[int]:
    """Steps to first tokens of 99 keys that fill some 12 of 16 rows; with a flood of 4,000 requests of 600 tokens."""
    load, rng = Load(make_policy(policy)), random.Random(3)
    load.on_end = load.began.pop
    if is_flooded:
        for i in range(4000):
            load.add(FLOOD, [7] * 40 + [i % 90, i // 90], 600)
        load.run(20)
    for _ in range(1000):
        if rng.random() < 0.3:
            owner = f"key-{rng.randrange(99)}"
            load.add(owner, [rng.randrange(90) for _ in range(rng.randrange(1, 200))], rng.randrange(4, 80))
        load.run()
    load.run(400)
    return [wait for owner, waits in load.waits.items() if owner != FLOOD for wait in waits]


@pytest.mark.parametrize("policy", POLICIES)
def test_a_flood_of_one_key_hardly_delays_the_first_tokens_of_99_others(policy: str) -> None:
    """Their p99 is at most twice what it is without the flood, and five steps."""
    alone, flooded = hundred(policy, is_flooded=False), hundred(policy, is_flooded=True)
    assert len(alone) == len(flooded) > 250
    assert p99(flooded) <= 2 * p99(alone) + 5


@pytest.mark.first(3)
@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("num_rows", [4, 16])
def test_tokens_follow_weights_while_all_have_work(policy: str, num_rows: int) -> None:
    """Eight owners of weights 1 to 4, with prompts and outputs of different lengths: within 10 % of their shares."""
    load, rng = Load(make_policy(policy), num_rows=num_rows), random.Random(5)
    weights = {f"key-{i}": 1.0 + i % 4 for i in range(8)}

    def again(request: EngineRequest) -> None:
        send(request.owner)

    def send(owner: str) -> None:
        size = 1 + int(owner[-1])
        load.add(owner, [rng.randrange(90) for _ in range(4 * size)], 4 * (9 - size), weights[owner])

    load.on_end = again
    for owner in weights:
        for _ in range(30):
            send(owner)
    load.run(300)
    before = dict(load.tokens)
    load.run(3000)
    done = {owner: load.tokens[owner] - before[owner] for owner in weights}
    for owner, weight in weights.items():
        assert done[owner] / sum(done.values()) == pytest.approx(weight / sum(weights.values()), rel=0.1)


def test_tokens_count_alike_in_short_requests_and_in_long_ones() -> None:
    """An owner whose requests are a token in and a token out has no more of both than one with long outputs."""
    load = Load(make_policy(), num_rows=4)
    load.on_end = lambda request: load.add(request.owner, [1], 1 if request.owner == "short" else 100)
    for owner in ("short", "long"):
        for _ in range(20):
            load.add(owner, [1], 1 if owner == "short" else 100)
    load.run(2000)
    before = dict(load.tokens)
    load.run(2000)
    short, long = (load.tokens[owner] - before[owner] for owner in ("short", "long"))
    assert short == pytest.approx(long, rel=0.1)


def test_one_owner_is_ordered_as_without_owners() -> None:
    """Each step computes the same, whether all requests have no owner, one, or none that the policy looks at."""

    class Together(type(make_policy()._plugin)):  # type: ignore[misc]
        across_owners = True

    def trace(policy: Policy, owners: Sequence[str]) -> list[Any]:
        load, rng, steps = Load(policy, num_rows=4, num_pages=60), random.Random(1), []
        for _ in range(300):
            if rng.random() < 0.3:
                owner, prompt = owners[rng.randrange(len(owners))], [rng.randrange(3)] * rng.randrange(1, 90)
                load.add(owner, prompt, rng.randrange(1, 90), priority=rng.choice((0, 0, 2)))
            load.run()
            steps.append(sorted(r.handle for r in load.scheduler.running))
        return steps

    plain = trace(make_policy(), [""])
    assert trace(make_policy(), ["one"]) == plain
    assert trace(policy_of(Together, "together"), ["a", "b"]) == trace(make_policy(), ["", ""])


def test_an_owner_that_waits_gets_the_youngest_row_of_one_with_more_than_its_share() -> None:
    """By weight, until neither has too many; what was taken is not taken back, and all finish."""
    load = Load(make_policy(), num_rows=8)
    old = [load.add("a", [i], 300) for i in range(9)]
    load.run(BEHIND / 8 + 1)
    new = [load.add("b", [50 + i], 300, weight=3.0) for i in range(9)]
    load.run()
    assert [r.row >= 0 for r in old] == [True] * 2 + [False] * 7
    assert [r.row >= 0 for r in new] == [True] * 6 + [False] * 3
    assert [r.num_retractions for r in old[:8]] == [0] * 2 + [1] * 6
    load.run(50)
    assert sum(r.num_retractions for r in (*old, *new)) == 6
    load.run(2000)
    assert all(r.finish is not None for r in (*old, *new))


def test_an_owner_that_waits_for_pages_gets_them_of_one_with_more_than_its_share() -> None:
    """Where rows are free and the pool is full of one owner's tokens, its youngest request goes back."""
    load = Load(make_policy(), num_rows=16, num_pages=64)
    old = [load.add("a", [i] * 150, 60) for i in range(6)]
    load.run(3)
    assert load.scheduler.pages.num_available < 30
    other = load.add("b", [50] * 300, 4)
    load.run()
    assert other.row >= 0
    assert sum(r.num_retractions for r in old) >= 1
    load.run(400)
    assert all(r.finish is not None for r in (*old, other))


def test_a_long_prompt_of_one_owner_does_not_take_another_ones_step() -> None:
    """Sixteen prompts of 4,000 tokens are on their way, 200 a step; who comes then begins in the next step."""
    load = Load(make_policy(), max_prefill_tokens=200, num_pages=9000)
    for i in range(16):
        load.add("a", [i] * 4000, 4)
    load.run(30)
    other = load.add("b", [99] * 20, 4)
    load.run(2)
    assert other.num_output


@pytest.mark.parametrize("num_owners", [1, 100])
def test_who_waits_for_a_prefix_keeps_nobody_else_waiting(num_owners: int) -> None:
    """Behind a hundred requests that share what one computes, of one owner or as many, another's begins at once."""
    load = Load(make_policy(), num_rows=128, max_prefill_tokens=64)
    for i in range(100):
        load.add(f"key-{i % num_owners}", [7] * 900 + [i], 1)
    load.run(2)
    other = load.add("other", [99] * 20, 1)
    load.run(2)
    assert other.num_output
    load.run(40)
    assert not load.scheduler.has_work


def test_a_prompt_that_gives_way_in_the_middle_is_computed_once() -> None:
    """Where the youngest request of the other owner is still computing its prompt, it goes back whole."""
    load = Load(make_policy(), num_rows=2, max_prefill_tokens=150)
    old = [load.add("a", [i] * 400, 40) for i in range(2)]
    load.run(4)
    new = [load.add("b", [50 + i] * 20, 4) for i in range(2)]
    load.run()
    assert [r.num_retractions for r in old] == [0, 1]
    load.run(60)
    assert all(r.finish is not None for r in (*old, *new))


def test_a_priority_goes_before_all_turns() -> None:
    """A request of a higher priority is next, however much its owner has had."""
    load = Load(make_policy(), num_rows=1)
    load.add("a", [1], 50)
    load.run(2)
    load.add("b", [2], 5)
    urgent = load.add("a", [3], 5, priority=1)
    while load.scheduler.find(1):
        load.run()
    load.run()
    assert urgent.row >= 0


def test_an_owner_gets_no_credit_for_time_in_which_it_sent_nothing() -> None:
    """Whoever comes after thousands of steps of others gets its share of what comes then, and some credit."""
    load = Load(make_policy(), num_rows=2)
    load.on_end = lambda request: load.add(request.owner, [1], 10)
    for start in ("a", "b", "c"):
        for _ in range(3):
            load.add(start, [1], 10)
        before = dict(load.tokens)
        load.run(4000)
        shares = [n - before.get(owner, 0) for owner, n in load.tokens.items()]
        assert max(shares) - min(shares) <= 1.1 * CREDIT + 50
        load.run(1000)
        before = dict(load.tokens)
        load.run(1000)
        shares = [n - before.get(owner, 0) for owner, n in load.tokens.items()]
        assert max(shares) <= 1.1 * min(shares)


def test_an_owner_gets_no_credit_for_rows_that_others_had_while_nobody_waited() -> None:
    """Of two with rows for thousands of steps, the one with fewer sends a flood: the other's next request is served."""
    load = Load(make_policy(), num_rows=8)
    for i in range(7):
        load.add("a", [i], 2001)
    load.run(2)
    load.add("b", [50], 9000)
    load.run(1950)
    for i in range(100):
        load.add("b", [60, i], 600)
    load.run(100)
    late = load.add("a", [7], 4)
    load.run(BEHIND)
    assert late.num_output


@pytest.mark.parametrize("policy", POLICIES)
def test_owners_of_work_in_no_hurry_take_turns_too(policy: str) -> None:
    """A flood of one keeps the lines of another's batch waiting for a row no longer than that takes to be free."""
    load = Load(make_policy(policy), num_rows=8)
    for i in range(200):
        load.add(FLOOD, [7] * 40 + [i], 600, priority=BACKGROUND)
    load.run(BEHIND / 8 + 1)
    for i in range(20):
        load.add("batch", [50, i], 10, priority=BACKGROUND)
    load.run(50)
    assert len(load.waits["batch"]) == 20
    urgent = load.add("c", [99], 4)
    load.run(2)
    assert urgent.num_output


class Watching(SchedulePolicy):
    """Notes whom it is asked to order."""

    asked: list[list[str]]

    def order(self, waiting: Sequence[WaitingRequest], cache: PrefixView) -> Sequence[WaitingRequest]:
        """As they stand."""
        self.asked.append(sorted({request.owner for request in waiting}))
        return waiting


@pytest.mark.parametrize("is_across", [False, True])
def test_a_policy_orders_one_owner_at_a_time_unless_it_is_fair_itself(is_across: bool) -> None:
    """It sees whose requests they are."""
    policy: type[Watching] = type("P", (Watching,), {"across_owners": is_across, "asked": []})
    load = Load(policy_of(policy, "watching"), num_rows=4)
    for i in range(12):
        load.add(f"key-{i % 3}", [i], 3)
    load.run(3)
    wanted = [["key-0", "key-1", "key-2"]] if is_across else [["key-0"], ["key-1"], ["key-2"]]
    assert [each for i, each in enumerate(policy.asked[:3]) if each not in policy.asked[:i]] == wanted


def test_a_step_looks_at_few_of_many_owners_and_requests() -> None:
    """With all rows taken by as many owners, what a step costs does not grow with owners, nor with one's 100,000."""
    calls = []
    for num_owners, num_each in ((40, 1), (2000, 1), (40, 2500)):
        load = Load(make_policy("lpm"), num_rows=16)
        for i in range(num_owners):
            for _ in range(num_each):
                load.add(f"key-{i}", [i % 90], 400)
        load.run(3)
        seen = 0
        order = load.policy.order

        def counting(waiting: Any, tree: Any, order: Any = order) -> Any:
            nonlocal seen
            seen += len(waiting)
            return order(waiting, tree)

        load.policy.order = counting  # type: ignore[method-assign]
        load.run(5)
        calls.append(seen)
    assert calls == [0, 0, 0]


def test_owners_that_left_are_forgotten() -> None:
    """Of 5,000 that came and went beside one that stays, few are remembered."""
    load = Load(make_policy(), num_rows=4)
    load.on_end = lambda request: load.add("stays", [1], 20) if request.owner == "stays" else None
    for _ in range(8):
        load.add("stays", [1], 20)
    for i in range(5000):
        load.add(f"key-{i}", [1], 1)
        load.run()
    owners: Owners = load.scheduler.owners[False]
    assert len(owners._known) <= 2 * MIN_KNOWN
