"""Schedule policies: the orders of the built-ins, and what becomes of a policy's mistakes."""

from __future__ import annotations

import asyncio
import logging
from array import array
from collections.abc import Sequence
from typing import Any

import pytest

from dovetail.cache.radix import RadixTree
from dovetail.contracts.errors import PluginError
from dovetail.contracts.scheduling import PrefixView, SchedulePolicy, WaitingRequest
from dovetail.demo import MODEL_DIR
from dovetail.engine.policy import policy_of
from dovetail.engine.request import EngineRequest
from dovetail.messages import SamplerParams, Submit
from dovetail.plugins import Registry, load, make_plan
from dovetail_testing.engine import collect, make_client, make_policy


def request(arrival: int, num_prompt: int = 4, max_tokens: int = 5, priority: int = 0) -> EngineRequest:
    """As the engine makes it."""
    params = SamplerParams(max_tokens=max_tokens)
    submit = Submit(rid="", handle=arrival, prompt_ids=[arrival] * num_prompt, params=params, priority=priority)
    return EngineRequest.from_submit(submit, arrival=arrival, eos_ids=())


def arrivals(policy: str, waiting: Sequence[EngineRequest], tree: RadixTree) -> list[int]:
    """The order that a built-in gives."""
    return [r.arrival for r in make_policy(policy).order(waiting, tree)]


def test_the_built_ins_order_as_their_names_say() -> None:
    """Priority always comes first; then arrival, what is cached, or what may be generated."""
    tree = RadixTree(page_size=2)
    tree.insert(array("i", [3, 3]), [[1]])
    waiting = [request(4, priority=1), request(1, max_tokens=5), request(2, max_tokens=9), request(3, max_tokens=7)]
    assert arrivals("fcfs", waiting, tree) == [4, 1, 2, 3]
    assert arrivals("priority", waiting, tree) == [4, 1, 2, 3]
    assert arrivals("lpm", waiting, tree) == [4, 3, 1, 2]
    assert arrivals("lof", waiting, tree) == [4, 2, 3, 1]
    assert [make_policy(name).preempts for name in ("fcfs", "lof", "lpm", "priority")] == [False, False, False, True]


class Faulty(SchedulePolicy):
    """Does what `answer` says."""

    answer: Any = None

    def order(self, waiting: Sequence[WaitingRequest], cache: PrefixView) -> Sequence[WaitingRequest]:
        found: Sequence[WaitingRequest] = self.answer(waiting)
        return found


@pytest.mark.parametrize(
    ("answer", "why"),
    [
        (lambda waiting: [*waiting, request(9)], "ValueError: it returned a request twice, or one that was not given"),
        (lambda waiting: [waiting[0], waiting[0]], "ValueError: it returned a request twice"),
        (lambda waiting: waiting[0].nothing, "AttributeError"),
        (lambda waiting: None, "TypeError"),
    ],
)
def test_a_policy_at_fault_costs_nobody_their_place(answer: Any, why: str, caplog: pytest.LogCaptureFixture) -> None:
    """The step goes by arrival, and the log says it once, with the plugin's name."""
    policy = policy_of(type("Wrong", (Faulty,), {"answer": staticmethod(answer)}), "schedule_policy 'wrong' of acme 1")
    waiting, tree = [request(1), request(2)], RadixTree(page_size=2)
    with caplog.at_level(logging.ERROR, "dovetail.engine.policy"):
        assert [policy.order(waiting, tree) is waiting for _ in range(3)] == [True] * 3
    (record,) = caplog.records
    assert record.getMessage().startswith("schedule_policy 'wrong' of acme 1: order failed (")
    assert why in record.getMessage()


def test_whoever_a_policy_leaves_out_waits() -> None:
    """A shorter answer is allowed."""
    policy = policy_of(type("First", (Faulty,), {"answer": staticmethod(lambda waiting: waiting[:1])}), "")
    waiting = [request(1), request(2)]
    assert list(policy.order(waiting, RadixTree(page_size=2))) == waiting[:1]


def test_a_plan_with_a_model_has_a_policy() -> None:
    """`fcfs`, if none is named; an unknown name says which there are."""
    plan = make_plan(Registry.scan(), model="Qwen3ForCausalLM", attention_backend="auto", device="cpu")
    assert [planned.name for planned in plan.of_kind("schedule_policy")] == ["fcfs"]
    auto = make_plan(Registry.scan(), model="Qwen3ForCausalLM", schedule_policy="auto", device="cpu")
    assert [planned.name for planned in auto.of_kind("schedule_policy")] == ["fcfs"]
    assert load(plan, "api").plan.of_kind("schedule_policy") == plan.of_kind("schedule_policy")
    with pytest.raises(PluginError, match=r"--schedule-policy 'lmp': not installed; installed: fcfs, lof, lpm, prior"):
        make_plan(Registry.scan(), model="Qwen3ForCausalLM", schedule_policy="lmp")
    with pytest.raises(TypeError, match="shedule_policy is no kind of plugin"):
        make_plan(Registry.scan(), shedule_policy="lpm")


def test_the_engine_admits_by_the_policy_of_its_plan() -> None:
    """With one row, `lof` answers whoever may generate most before those that came earlier."""

    async def serve(ended: list[int]) -> None:
        client = make_client(MODEL_DIR, schedule_policy="lof", max_running_requests=1)
        await client.start()

        async def one(num: int) -> None:
            submit = Submit(rid="", prompt_ids=[5, num], params=SamplerParams(max_tokens=num, ignore_eos=True))
            await collect(client, submit)
            ended.append(num)

        try:
            await asyncio.gather(*(one(num) for num in (40, 2, 4, 8)))
        finally:
            await client.close()

    ended: list[int] = []
    asyncio.run(serve(ended))
    assert ended == [40, 8, 4, 2]
