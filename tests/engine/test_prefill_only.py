"""The beginning of a prompt, computed before the rest is known: the request finds it, and nothing else changes."""

from __future__ import annotations

import random
from typing import Any

import pytest
from test_steps_as_data import BOTH, Run, start, want

from dovetail.engine.request import StepPlan
from dovetail.messages import Abort, Admitted, SamplerParams

PARAMS = SamplerParams(max_tokens=6, temperature=1.0)
PAGE = 4


def noted(core: Any) -> list[StepPlan]:
    """Every plan that the engine makes from now on."""
    plans: list[StepPlan] = []
    schedule = core.scheduler.schedule
    core.scheduler.schedule = lambda: plans.append(schedule()) or plans[-1]
    return plans


def new(rng: random.Random, num: int) -> list[int]:
    """Random tokens that end nothing."""
    return [rng.randrange(90) for _ in range(num)]


@BOTH
def test_the_request_computes_the_rest_alone(overlap: bool) -> None:
    """Each token of the prompt is computed once; the reply is that of the request by itself; the end says how many."""
    core, _ = start(overlap)
    run, plans, told = Run(core), noted(core), list[Any]()
    core.send = told.append
    prompt = new(random.Random(1), 90)
    run.submit(1000, prompt[:30], SamplerParams(max_tokens=1), prefill_only=True)
    run.step()
    run.submit(1001, prompt[:61], SamplerParams(max_tokens=1), prefill_only=True)
    run.submit(1, prompt, PARAMS)
    run.drain()
    assert run.tokens == {1000: [], 1001: [], 1: want(prompt, PARAMS, 1)}
    assert [run.finishes[handle].reason for handle in (1000, 1001, 1)] == ["stop", "stop", "length"]
    chunks = [(c.request.handle, c.start, c.num_new, c.samples) for plan in plans for c in plan.chunks]
    assert sum(num for _, _, num, _ in chunks) == len(prompt)
    assert [start + num for handle, start, num, _ in chunks if handle == 1001][-1] == 60
    assert [samples for *_, samples in chunks] == [False] * (len(chunks) - 1) + [True]
    handles = [handle for message in told if isinstance(message, Admitted) for handle in message.handles]
    assert handles == [1000, 1001, 1]


def test_its_end_tells_what_was_cached() -> None:
    """Pages that were there before, of the whole pages that it stands for; all of them need no step."""
    core, _ = start(overlap=True)
    run, ends = Run(core), {}
    step = core.step

    def kept() -> Any:
        made = step()
        ends.update({delta.handle: delta for delta in made.deltas if delta.finish is not None})
        return made

    core.step = kept  # type: ignore[method-assign]
    prompt = new(random.Random(2), 50)
    for handle, num in ((1, 18), (2, 50), (3, 43)):
        run.submit(handle, prompt[:num], SamplerParams(max_tokens=1), prefill_only=True)
        before = core.scheduler.num_launched
        run.drain()
        assert (core.scheduler.num_launched == before) == (handle == 3)
    assert {handle: (end.prompt_tokens, end.cached_tokens) for handle, end in ends.items()} == {
        1: (16, 0), 2: (48, 16), 3: (40, 40)
    }  # fmt: skip


def test_what_cannot_be_cached_is_not_computed() -> None:
    """Less than a page, or a cache that is off: it ends at once, with the reason, and no step."""
    core, _ = start(overlap=False)
    run = Run(core)
    run.submit(1, [5] * (PAGE - 1), PARAMS, prefill_only=True)
    core.pages._use_tree = False
    run.submit(2, [5] * 40, PARAMS, prefill_only=True)
    run.drain()
    assert [run.finishes[handle].reason for handle in (1, 2)] == ["abort", "abort"]
    assert core.scheduler.num_launched == 0


def test_salts_are_kept_from_one_another() -> None:
    """What was computed under one salt is nothing to a request with another."""
    core, _ = start(overlap=True)
    run, plans = Run(core), noted(core)
    prompt = new(random.Random(3), 40)
    run.submit(1000, prompt[:20], PARAMS, prefill_only=True, cache_salt="a")
    run.drain()
    run.submit(1, prompt, PARAMS, cache_salt="b")
    run.drain()
    assert sum(c.num_new for plan in plans for c in plan.chunks if c.request.handle == 1) == 40
    assert run.tokens[1] == want(prompt, PARAMS, 1)


@BOTH
@pytest.mark.parametrize("seed", range(4))
def test_random_loads(overlap: bool, seed: int) -> None:
    """Few pages and rows, aborts, failing steps, neighbours: each reply is the one it gets alone; no page is lost."""
    rng = random.Random(seed)
    core, executor = start(overlap, num_pages=60, rows=3)
    run, prompts, early = Run(core), dict[int, list[int]](), dict[int, list[int]]()
    executor.fails = lambda step: rng.random() < 0.02
    common = new(rng, 40)
    for handle in range(1, 25):
        prompt = common[: rng.choice((0, 0, 25, 40))] + new(rng, rng.randrange(1, 60))
        early[handle] = [1000 * handle + at for at in range(rng.randrange(3))]
        for at, number in enumerate(early[handle]):
            run.submit(number, prompt[: (at + 1) * len(prompt) // 3], PARAMS, prefill_only=True)
            for _ in range(rng.randrange(3)):
                run.step()
        if rng.random() < 0.8:
            prompts[handle] = prompt
            run.submit(handle, prompt, PARAMS)
        if rng.random() < 0.3:
            for number in early[handle]:
                core.handle(Abort(number))
        run.step()
    run.drain()
    done = {handle for handle in prompts if run.finishes[handle].reason != "abort"}
    assert len(done) > len(prompts) // 2
    assert {handle: run.tokens[handle] for handle in done} == {
        handle: want(prompts[handle], PARAMS, handle) for handle in done
    }
    assert all(not run.tokens[number] for numbers in early.values() for number in numbers)
    assert core.stats().num_used_tokens == 0
