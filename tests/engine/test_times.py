"""What an engine tells of where a request's time went."""

from __future__ import annotations

import pytest
from script_executor import ENDS, ScriptExecutor

from dovetail.demo import MODEL_DIR
from dovetail.engine import request as requests
from dovetail.engine import stats_log
from dovetail.engine.core import EngineCore
from dovetail.engine.streams import RequestEntry
from dovetail.messages import Abort, Control, ControlReply, SamplerParams, Submit, Times, TokenDelta
from dovetail.plugins import load
from dovetail_testing.engine import make_plans


class Clock:
    """Goes on by a second with each step."""

    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


class World:
    """An engine without a model, and what it said of times."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, *, rows: int = 1, num_pages: int = 80) -> None:
        self.clock = Clock()
        monkeypatch.setattr(requests, "perf_counter", self.clock)
        settings, plan = make_plans(MODEL_DIR, max_running_requests=rows, page_size=4, chunked_prefill_size=24)
        executor = ScriptExecutor(num_pages=num_pages, page_size=4)
        self.core = EngineCore(settings, load(plan, "engine"), executor, eos_ids=ENDS)
        self.as_times: dict[int, list[Times]] = {}
        self.num_tokens: dict[int, int] = {}

    def submit(self, handle: int, num_prompt: int, max_tokens: int, **more: object) -> None:
        self.as_times[handle], self.num_tokens[handle] = [], 0
        params = SamplerParams(max_tokens=max_tokens)
        prompt = [handle] * num_prompt
        self.core.handle(Submit(rid="", handle=handle, prompt_ids=prompt, params=params, **more))  # type: ignore[arg-type]

    def step(self) -> None:
        self.clock.now += 1.0
        for delta in self.core.step().deltas:
            self.num_tokens[delta.handle] += len(delta.ids)
            if delta.times is not None:
                self.as_times[delta.handle].append(delta.times)

    def drain(self) -> None:
        for _ in range(500):
            if not self.core.has_work:
                return
            self.step()
        pytest.fail("it does not end")


def test_times_come_with_the_first_token_and_the_end(monkeypatch: pytest.MonkeyPatch) -> None:
    """One row for two requests: the second waits as long as the first runs; a prompt of three chunks takes three."""
    world = World(monkeypatch)
    world.submit(1, 60, 4)
    world.submit(2, 8, 2)
    world.drain()
    assert world.as_times[1] == [Times(1, None, 3, 3, 0), Times(1, None, 3, 6, 0)]
    assert world.as_times[2] == [Times(7, None, 7, 7, 0), Times(7, None, 7, 8, 0)]


def test_a_request_of_one_token_is_told_of_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its first token is its last."""
    world = World(monkeypatch)
    world.submit(1, 4, 1)
    world.drain()
    assert world.as_times[1] == [Times(1, None, 1, 1, 0)]


def test_who_is_aborted_in_the_queue_was_never_admitted(monkeypatch: pytest.MonkeyPatch) -> None:
    """All of its time is the queue's."""
    world = World(monkeypatch)
    world.submit(1, 4, 9)
    world.submit(2, 4, 1)
    world.step()
    world.step()
    world.core.handle(Abort(2))
    world.step()
    assert world.as_times[2] == [Times(None, None, None, 2, 0)]


def test_waiting_again_is_told_apart(monkeypatch: pytest.MonkeyPatch) -> None:
    """A request that gave its pages up waits until there is room again; admission and first token stay."""
    world = World(monkeypatch, rows=2, num_pages=12)
    world.core.scheduler.ratio.value = 0.1
    world.submit(1, 8, 30)
    world.submit(2, 8, 30)
    world.drain()
    assert world.num_tokens == {1: 30, 2: 30}
    first, last = world.as_times[2]
    assert (first.waited_s, last.admitted_s, last.first_s) == (0, first.admitted_s, first.first_s)
    assert last.waited_s > 0
    assert world.as_times[1][-1].waited_s == 0


def test_of_two_grammars_the_first_is_timed(monkeypatch: pytest.MonkeyPatch) -> None:
    """One that fails in the middle of a text is followed by another."""
    clock = Clock()
    monkeypatch.setattr(requests, "perf_counter", clock)
    marks = requests.Timing()
    clock.now += 2
    marks.decided()
    clock.now += 5
    marks.decided()
    assert marks.as_times() == Times(None, 2, None, 7, 0)


def test_times_survive_being_merged() -> None:
    """A reader that comes late gets the latest."""
    first, last = Times(1, None, 2, 2, 0), Times(1, None, 2, 9, 0)
    entry = RequestEntry(Submit(rid="", handle=1, prompt_ids=[1], params=SamplerParams(max_tokens=9)), 1)
    for times in (first, None, last, None):
        entry.put(TokenDelta(handle=1, ids=[1], times=times))
    waiting = entry._waiting
    assert waiting is not None
    assert (waiting.times, waiting.ids) == (last, [1] * 4)


def steps(world: World, after: int = 0) -> list[dict[str, float]]:
    reply = world.core.handle(Control(id=1, op="steps", after=after))
    assert isinstance(reply, ControlReply)
    found: list[dict[str, float]] = reply.result["steps"]
    return found


def test_the_last_steps_are_told(monkeypatch: pytest.MonkeyPatch) -> None:
    """What each computed and when, the oldest first; those after a number, and no more than are kept."""
    world = World(monkeypatch, rows=2)
    monkeypatch.setattr(stats_log, "perf_counter", world.clock)
    assert steps(world) == []
    world.submit(1, 60, 4)
    world.submit(2, 8, 2)
    world.drain()
    as_times = steps(world)
    assert [row["step"] for row in as_times] == list(range(1, len(as_times) + 1))
    assert sum(row["num_prefill_tokens"] for row in as_times) == 68
    assert sum(row["num_decode"] for row in as_times) == 3 + 1
    assert [row["ago_s"] for row in as_times] == list(range(len(as_times) - 1, -1, -1))
    assert as_times[0]["num_queued"] >= as_times[-1]["num_queued"] == 0
    assert steps(world, after=len(as_times) - 2) == as_times[-2:]
    assert steps(world, after=10**9) == []
    for handle in range(3, 9):
        world.submit(handle, 4, 100)
        world.drain()
    assert len(steps(world)) == stats_log.KEPT_STEPS
