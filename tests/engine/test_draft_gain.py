"""Drafts are verified where that brings more tokens a second: an engine on a made-up clock, with and without drafts."""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
from script_executor import next_token
from test_steps_as_data import Run, start, want

from dovetail.engine.core import EngineCore
from dovetail.engine.draft_record import FIRST, LEAST_PAUSE, MOST_PAUSE, DraftRecord
from dovetail.engine.request import EngineRequest, StepPlan
from dovetail.engine.speculation import REFRESHED, TRUSTED, Cost, Gain, Speculation, StepCosts
from dovetail.messages import SamplerParams
from dovetail.messages.step import PrefillGraph, StepInput

GRAPHS = [PrefillGraph(16, 1), PrefillGraph(64, 64), PrefillGraph(128, 64), PrefillGraph(512, 64)]
HOST = 0.4
"""Milliseconds between two steps in which the device waits, where the first has to be read before."""


class Device:
    """What steps take by a clock of its own, in milliseconds: 1 for rows that decode, more where drafts are verified.

    `num_verified` are those.
    """

    def __init__(self, executor: Any, verify: Callable[[int], float] = lambda tokens: 1.4 + tokens / 300) -> None:
        self.now = self.free = 0.0
        self.verify = verify
        self.num_verified = 0
        self._ends: list[float] = []
        launch, read = executor.launch, executor.read

        def launched(step: StepInput) -> None:
            launch(step)
            drafted = 0 if step.num_drafts is None else int(step.num_new[step.num_drafts > 0].sum())
            self.num_verified += drafted > 0
            took = (self.verify(drafted) if drafted else 0.0) + (1.0 if drafted < step.num_new.sum() else 0.0)
            self.now += HOST / 2
            self.free = max(self.free, self.now) + took
            self._ends.append(self.free)

        def finished() -> Any:
            self.now = max(self.now, self._ends.pop(0)) + HOST / 2
            return read()

        executor.launch, executor.read = launched, finished


def likely(chance: Callable[[EngineRequest], float], rng: random.Random, num: int = 8) -> Any:
    """Drafts of which each is right with some chance, by the request."""

    def guess(request: EngineRequest) -> list[int]:
        tokens = list(request.ids)
        for _ in range(num):
            right = next_token(request.seed, tuple(tokens))
            tokens.append(right if rng.random() < chance(request) else (right + 1) % 90)
        return tokens[len(request.ids) :]

    return lambda requests: [guess(request) if chance(request) else [] for request in requests]


def engine(rows: int, propose: Any = None, verify: Any = None) -> tuple[EngineCore, Device]:
    """An engine over a scripted executor; what it guesses is verified where that pays."""
    core, executor = start(True, num_pages=60 * rows, rows=rows)
    device = Device(executor, **({} if verify is None else {"verify": verify}))
    core.scheduler.limits = core.recovery._asked = replace(
        core.scheduler.limits, max_places=512, max_prefill_tokens=512
    )
    if propose is not None:
        core.scheduler.speculation = made = Speculation(propose, core.info.vocab_size)
        made.gain = Gain(lambda: GRAPHS, StepCosts(lambda: device.now))
    return core, device


def serve(core: EngineCore, device: Device, rows: int, num: int, length: int = 120) -> float:
    """Tokens a millisecond of replies of so many tokens, the next request sent when one ends; they are right."""
    run, params = Run(core), SamplerParams(max_tokens=length, temperature=0, ignore_eos=True)
    run.tokens = {}
    began, handles = device.now, iter(range(1, num + 1))

    def send() -> None:
        for handle in handles:
            run.submit(handle, [handle % 90, 3, 5], params)
            return

    for _ in range(rows):
        send()
    done = 0
    while core.has_work:
        run.step()
        for _ in range(len(run.finishes) - done):
            send()
        done = len(run.finishes)
    for handle in range(1, num + 1, 7):
        assert run.tokens[handle] == want([handle % 90, 3, 5], params, handle)
    return num * length / (device.now - began)


def ratio(rows: int, chance: Callable[[EngineRequest], float], num: int, verify: Any = None) -> tuple[float, Device]:
    """How many times as many tokens a second come with drafts."""
    plain = serve(*engine(rows), rows, num)
    core, device = engine(rows, likely(chance, random.Random(1)), verify)
    return serve(core, device, rows, num) / plain, device


@pytest.mark.parametrize(("rows", "num", "least"), [(1, 4, 2.0), (8, 24, 2.0), (24, 48, 1.5)])
def test_text_that_repeats_is_faster(rows: int, num: int, least: float) -> None:
    """Where nearly all holds, nearly all is verified."""
    assert ratio(rows, lambda request: 0.98, num)[0] > least


@pytest.mark.sampled
@pytest.mark.parametrize("chance", [0.0, 0.02, 0.3])
@pytest.mark.parametrize(("rows", "num"), [(1, 6), (8, 24), (24, 48)])
def test_text_that_does_not_is_no_slower(rows: int, num: int, chance: float) -> None:
    """Nothing to guess, guesses that are wrong, and such as are right too seldom: within 2 % of what comes without."""
    assert ratio(rows, lambda request: chance, num)[0] > 0.98


@pytest.mark.parametrize("chance", [0.5, 0.7])
@pytest.mark.parametrize(("rows", "num"), [(1, 6), (8, 24)])
def test_between_the_two_nothing_is_lost(rows: int, num: int, chance: float) -> None:
    """Whether it pays depends on the device: it never costs."""
    assert ratio(rows, lambda request: chance, num)[0] > 0.98


def test_verification_that_costs_more_than_it_brings_stops() -> None:
    """A device on which it takes ten times a step: it is tried a few times, not in every step, though all holds."""
    found, device = ratio(8, lambda request: 1.0, 48, verify=lambda tokens: 10.0)
    assert 0 < device.num_verified < 12
    assert found > 0.95


def test_a_few_of_many_do_not_slow_the_others() -> None:
    """Three of 48 requests repeat themselves: verifying would cost all of them more than these three gain."""
    assert ratio(48, lambda request: 1.0 if request.handle <= 3 else 0.0, 48)[0] > 0.98


def test_half_of_some_do_not_slow_the_others() -> None:
    """Four of eight repeat themselves: a step would bring more tokens, but to these four, and the rest would wait."""
    assert ratio(8, lambda request: 1.0 if request.handle % 2 else 0.0, 24)[0] > 0.98


def test_most_of_some_gain_for_all() -> None:
    """Seven of eight do."""
    assert ratio(8, lambda request: 1.0 if request.handle % 8 else 0.0, 24)[0] > 1.1


@pytest.mark.parametrize("is_late", [True, False])
def test_a_request_that_changes_is_followed(is_late: bool) -> None:
    """The first half of each reply repeats itself, or the second: that half is faster, and the other no slower."""
    found, device = ratio(4, lambda request: float((request.num_output > 60) == is_late), 24)
    assert found > 1.3
    assert device.num_verified > 20


def test_what_was_slow_once_is_tried_again() -> None:
    """Verification that is slow at first, as somebody compiles, is not off for good: its cost is measured anew."""
    core, device = engine(4, likely(lambda request: 1.0, random.Random(1)))
    device.verify = lambda tokens: 30.0 if device.now < 300 else 1.5
    assert serve(core, device, 4, 80) > 1.5 * serve(*engine(4), 4, 80)


def test_steps_without_drafts_are_measured_between_those_with() -> None:
    """Where all steps verify, a few do not, now and then: what these would cost is not what it was long ago."""
    core, device = engine(4, likely(lambda request: 1.0, random.Random(1)))
    serve(core, device, 4, 20)
    gain = core.scheduler.speculation.gain if core.scheduler.speculation is not None else None
    assert gain is not None
    before, cost = device.num_verified, gain.costs.plain(4, 0)
    cost.at = gain.costs.now - REFRESHED - 1
    num = cost.num
    serve(core, device, 4, 20)
    assert cost.num > num
    assert device.num_verified > before


def test_costs_are_of_what_they_say() -> None:
    """The first step of a kind does not count, one in whose way something else was counts little, old ones expire."""
    cost = Cost()
    for at, seconds in enumerate((50.0, 2.0, 2.0, 1000.0)):
        cost.add(seconds, at)
    assert cost.seconds == 2.0 + 0.25 * (8.0 - 2.0)
    assert cost.known(3 + TRUSTED)
    assert not cost.known(4 + TRUSTED)
    assert not Cost(1.0, 1, 0).known(0)


def test_no_step_that_waited_counts_as_one_that_runs_ahead() -> None:
    """A step behind one that was read before it was planned took longer: it says nothing of steps that overlap."""
    now = iter([1.0, 2.0, 10.0, 11.0, 12.0, 13.0])
    costs = StepCosts(lambda: next(now))
    rows: Any = [DraftRecord()] * 4
    for may_draft in (False, False, True, False, False, False):
        costs.read(StepPlan(rows, [], may_draft=may_draft), GRAPHS[0] if may_draft else None)
    assert (costs.plain(4, 0).num, costs.plain(4, 0).seconds) == (3, 1.0)
    assert (costs.verify(GRAPHS[0], 4).num, costs.verify(GRAPHS[0], 4).seconds) == (1, 8.0)


def test_who_has_no_drafts_is_asked_ever_more_rarely() -> None:
    """Twice as long each time, no longer than there are rows, until there is something to be had."""
    record, length, asked = DraftRecord(), 10, []
    while length < 800:
        if record.is_asked(length):
            record.asked(length, (), 64)
            asked.append(length)
        length += 1
    waits = [b - a for a, b in itertools.pairwise(asked)]
    assert waits[:4] == [16, 32, 64, 64]
    record.asked(length, [1] * 8, 64)
    record.compare([0] * length + [1] * 8)
    record.asked(length + 8, [1] * 8, 64)
    assert record.is_promising
    assert (record.due, record.pause) == (length + 8 + 64, LEAST_PAUSE)
    new = DraftRecord()
    new.asked(20, [1, 2, 3, 4, 5], 64)
    assert new.due == 20 + FIRST
    few = DraftRecord()
    for length in range(0, 1000, 100):
        few.asked(length, (), 1)
    assert few.due == 900 + LEAST_PAUSE
    many = DraftRecord()
    for length in range(0, 1000, 100):
        many.asked(length, (), 10_000)
    assert many.due == 900 + MOST_PAUSE


def test_what_holds_is_known_without_verification() -> None:
    """Drafts are compared with what came, as far as it has come."""
    record = DraftRecord()
    record.asked(3, [7, 8, 9, 10], 1)
    record.compare([1, 2, 3, 7, 8])
    assert (record.held, record.failed, record.ids) == (2, 0, ())
    record.asked(5, [1, 2, 3], 1)
    record.compare([1, 2, 3, 7, 8, 1, 5, 3, 9])
    assert (record.held, record.failed) == (0.75 * 2 + 1, 1)
    record.compare([1, 2, 3, 7, 8, 1, 5, 3, 9])
    assert record.failed == 1


@pytest.mark.parametrize(
    ("rows", "chunks", "prompt", "expected"),
    [
        (3, 0, 0, [8, 8, 8]),
        (10, 0, 0, [8] * 4),
        (10, 6, 0, []),
        (3, 1, 50, [4, 4, 3]),
        (10, 1, 60, [1, 1]),
        (3, 1, 64, []),
    ],
)
def test_no_more_is_chosen_than_a_graph_takes(rows: int, chunks: int, prompt: int, expected: list[int]) -> None:
    """Of 4 chunks and 64 tokens, what prompts take comes off; without room for all rows, those with the best drafts."""
    costs = StepCosts()
    for _ in range(2):
        costs.plain(rows, prompt).add(1.0, 0)
        for left in range(rows):
            costs.verify(PrefillGraph(64, 4), left).add(0.1, 0)
    gain = Gain(lambda: [PrefillGraph(16, 1), PrefillGraph(64, 4)], costs)
    found = gain._best([(1.0, 0.9, 8)] * rows, rows, chunks, prompt, 256)
    assert sorted((n for n in found.num.tolist() if n), reverse=True) == expected
    assert found.has_room == (rows + chunks <= 4 and len(expected) > 0)
