"""Drafts that a step verifies: the same tokens as without them, in fewer steps, whatever was guessed."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import replace as replace_field
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from example_models import Example, prompt
from msgspec.structs import replace
from script_executor import next_token
from test_overlap import flat, random_params
from test_steps_as_data import Run, start, want

from dovetail.engine.core import EngineCore
from dovetail.engine.request import EngineRequest
from dovetail.engine.speculation import Speculation
from dovetail.messages import Abort, SamplerParams, Submit, TokenDelta
from dovetail.messages.step import SAMPLE, StepInput, no_ints
from dovetail.runtime.step import Drafts
from dovetail_testing.engine import make_core

Guess = Callable[[EngineRequest], Sequence[int]]


def speculate(core: EngineCore, guess: Guess) -> Speculation:
    """Let an engine verify what a test guesses."""
    made = Speculation(lambda requests: [guess(request) for request in requests], core.info.vocab_size)
    core.scheduler.speculation = made
    core.scheduler.limits = core.recovery._asked = replace_field(core.scheduler.limits, max_places=64)
    return made


def guesses(rng: random.Random, oracle: Callable[[EngineRequest], list[int]], most: int = 9) -> Guess:
    """Right for a while and then wrong, at random, now and then nothing or far too much."""

    def guess(request: EngineRequest) -> list[int]:
        found = oracle(request)[: rng.randrange(most + 1)]
        if found and rng.random() < 0.6:
            found[rng.randrange(len(found))] = rng.randrange(90)
        return found + [7] * (rng.random() < 0.05) * 100

    return guess


def scripted(request: EngineRequest) -> list[int]:
    """What the scripted executor will say next."""
    tokens = list(request.ids)
    for _ in range(12):
        tokens.append(next_token(request.seed, tuple(tokens)))
    return tokens[len(request.ids) :]


@pytest.mark.parametrize("seed", [0, 1, 2, *(pytest.param(n, marks=pytest.mark.full) for n in (3, 4, 5))])
def test_books_equal_the_device_whatever_holds(seed: int) -> None:
    """With drafts right and wrong at random, stops, aborts, retractions and failing steps, tokens and books are right.

    The executor keeps lengths and pages of its own from the messages, and fails where they differ.
    """
    rng = random.Random(seed)
    core, executor = start(False, num_pages=rng.choice([24, 40, 200]), rows=rng.choice([2, 6, 20]))
    made, run = speculate(core, guesses(rng, scripted)), Run(core)
    expected: dict[int, list[int]] = {}
    executor.fails = lambda step: rng.random() < 0.002
    for handle in range(1, 40):
        given = [rng.randrange(90) for _ in range(rng.randrange(1, 30))]
        stops = tuple(rng.randrange(96) for _ in range(rng.choice([0, 0, 6])))
        params = SamplerParams(
            max_tokens=rng.choice([1, 2, 30]), temperature=0, seed=handle, stop_token_ids=stops, ignore_eos=True
        )
        expected[handle] = want(given, params, handle)
        run.submit(handle, given, params)
        for _ in range(rng.randrange(4)):
            run.step()
        if rng.random() < 0.1:
            core.handle(Abort(handle))
            del expected[handle]
    executor.fails = lambda step: False
    run.drain()
    for handle, tokens in expected.items():
        assert run.tokens[handle] == tokens
    assert made.num_drafted > made.num_accepted > 20


def test_right_drafts_make_few_steps() -> None:
    """Eight right drafts a step: a reply of 90 tokens takes a prompt, and a step for every nine tokens."""
    core, executor = start(False)
    made, run = speculate(core, lambda request: scripted(request)[:8]), Run(core)
    run.submit(1, [3, 4, 5], SamplerParams(max_tokens=91, temperature=0, seed=1, ignore_eos=True))
    run.drain()
    assert len(run.tokens[1]) == 91
    assert len(executor.steps) == 1 + 10
    assert made.num_accepted == made.num_drafted == 80


def test_drafts_need_a_known_last_token() -> None:
    """While a step of a row is under way none of its drafts is verified: they would be guesses about the past."""
    core, _ = start(True)
    speculate(core, lambda request: scripted(request)[:8])
    run = Run(core)
    run.submit(1, [3, 4, 5], SamplerParams(max_tokens=20, temperature=0, seed=1, ignore_eos=True))
    run.drain()
    assert run.tokens[1] == want([3, 4, 5], SamplerParams(max_tokens=20), 1)


def test_places_are_shared_out() -> None:
    """A step draws at no more places than it has room for, and short drafts leave theirs to longer ones."""
    core, executor = start(False, num_pages=200, rows=6)
    speculate(core, lambda request: [1] * (1 if request.handle == 1 else 20))
    core.scheduler.limits = replace_field(core.scheduler.limits, max_places=12)
    run = Run(core)
    for handle in (1, 2, 3):
        run.submit(handle, [handle] * 3, SamplerParams(max_tokens=60, temperature=0, seed=handle, ignore_eos=True))
    run.step()
    run.step()
    step = executor.steps[-1]
    assert sorted(step.num_drafts.tolist()) == [1, 4, 4]
    assert len(step.places) == 12


def test_a_failing_verification_is_done_without_drafts() -> None:
    """A step that cannot verify ends nobody, not even a request that is alone: its tokens are drawn one by one."""
    core, executor = start(False)
    made, run = speculate(core, lambda request: scripted(request)[:8]), Run(core)
    executor.fails = lambda step: step.num_drafts is not None
    run.submit(1, [3, 4, 5], SamplerParams(max_tokens=30, temperature=0, seed=1, ignore_eos=True))
    run.drain()
    assert run.finishes[1].reason == "length"
    assert made.num_drafted == 0
    assert len(executor.steps) == 30


def test_numbers_that_are_not_finite_end_one_request() -> None:
    """NaN in a row with drafts: that request ends, its neighbour's tokens are right, and no page is lost."""
    core, executor = start(False)
    speculate(core, lambda request: scripted(request)[:4])
    run = Run(core)
    executor.finite = lambda step, at: not (step.step == 3 and at == 0)
    for handle in (1, 2):
        run.submit(handle, [handle] * 3, SamplerParams(max_tokens=30, temperature=0, seed=handle, ignore_eos=True))
    run.drain()
    reasons = sorted(finish.reason for finish in run.finishes.values())
    assert reasons == ["abort", "length"]
    lived = next(handle for handle, finish in run.finishes.items() if finish.reason == "length")
    assert run.tokens[lived] == want([lived] * 3, SamplerParams(max_tokens=30), lived)


def served(core: EngineCore, submits: Sequence[Submit], every: int = 0) -> dict[int, list[TokenDelta]]:
    """Step an engine to its end; with `every`, requests come one by one, so many steps apart."""
    found: dict[int, list[TokenDelta]] = {submit.handle: [] for submit in submits}
    waiting = list(submits)
    for _ in range(20_000):
        if waiting and (not every or core.step_count % every == 0 or not core.has_work):
            for submit in waiting if not every else waiting[:1]:
                core.handle(submit)
            waiting = [] if not every else waiting[1:]
        if not core.has_work and not waiting:
            break
        for delta in core.step().deltas:
            found[delta.handle].append(delta)
        assert core.pages.check_counts(core.scheduler.running)
        assert core.pages.check_ownership(core.scheduler.running)
    assert not core.has_work
    assert core.pages.num_used == 0
    return found


def replay(found: dict[int, list[TokenDelta]]) -> Callable[[EngineRequest], list[int]]:
    """An oracle that knows what came without drafts."""
    texts = {handle: [token for delta in deltas for token in delta.ids] for handle, deltas in found.items()}
    return lambda request: texts[request.handle][request.num_output :][:12]


@pytest.mark.first(1)
@pytest.mark.parametrize("seed", [0, 1, *(pytest.param(n, marks=pytest.mark.full) for n in (2, 3))])
def test_replies_do_not_depend_on_drafts(seed: int, qwen3: Path, prompts: list[list[int]]) -> None:
    """Mixed requests on a model, greedy and seeded, with penalties, log probabilities, retractions and prefix hits:
    the same tokens, log probabilities and ends.
    """
    rng = random.Random(seed)
    submits = [
        Submit(rid="", handle=i, prompt_ids=ids, params=replace(random_params(rng), max_tokens=rng.choice([2, 40])))
        for i, ids in enumerate(prompts * 2, 1)
    ]
    changes: dict[str, Any] = {
        "max_total_tokens": rng.choice([300, 4096]),
        "chunked_prefill_size": rng.choice([16, 512]),
        "page_size": rng.choice([1, 4, 16]),
        "max_running_requests": rng.choice([4, 40]),
    }
    every = rng.choice([0, 2])
    plain = served(make_core(qwen3, **changes), submits, every)
    core = make_core(qwen3, **changes)
    made = speculate(core, guesses(rng, replay(plain)))
    drafted = served(core, submits, every)
    assert {h: flat(d) for h, d in drafted.items()} == {h: flat(d) for h, d in plain.items()}
    assert made.num_drafted > made.num_accepted > 20


@pytest.mark.parametrize("name", ["two-widths", "latent"])
def test_groups_of_the_cache_take_drafts(name: str, tmp_path: Path) -> None:
    """Windows give back what nobody sees behind what holds, not behind a guess; latent rows are written over."""
    architecture = {"two-widths": "TwoWidthsForCausalLM", "latent": "LatentForCausalLM"}[name]
    example = Example(name, architecture)
    folder = example.reference().write_checkpoint(tmp_path)
    params = SamplerParams(max_tokens=60, temperature=0.8, seed=5, ignore_eos=True)
    submits = [Submit(rid="", handle=i, prompt_ids=prompt(n, n), params=params) for i, n in enumerate((3, 40, 90), 1)]
    plain = served(example.make_engine(folder), submits)
    core = example.make_engine(folder)
    made = speculate(core, guesses(random.Random(1), replay(plain)))
    drafted = served(core, submits)
    assert {h: flat(d) for h, d in drafted.items()} == {h: flat(d) for h, d in plain.items()}
    assert made.num_drafted > made.num_accepted > 20


def step_of(drafts: list[list[int]], known: list[int]) -> StepInput:
    """A step whose rows have so many known new tokens and these drafts; `known` 0: it decodes."""
    num_new = np.array([max(1, k) + len(d) for k, d in zip(known, drafts, strict=True)], dtype=np.int32)
    start = np.array([-1 if k == 0 else 10 for k in known], dtype=np.int32)
    ids = [token for k, d in zip(known, drafts, strict=True) for token in [0] * k + d]
    return StepInput(
        step=1, decode_graph=None, prefill_graph=None, zeroed=no_ints(), cleared=no_ints(), admit=(),
        tables=no_ints(), rows=np.arange(len(known), dtype=np.int32), start=start, num_new=num_new,
        task=np.full(len(known), SAMPLE, dtype=np.int32), waits=np.zeros(len(known), dtype=np.bool_),
        ids=np.array(ids, dtype=np.int32), num_drafts=np.array([len(d) for d in drafts], dtype=np.int32),
    )  # fmt: skip


def test_what_holds_is_what_a_loop_finds() -> None:
    """The first draft that was not drawn ends the row's tokens, for rows of any length side by side."""
    rng = random.Random(3)
    for _ in range(200):
        known = [0] * rng.randrange(3) + [rng.randrange(1, 4) for _ in range(rng.randrange(1, 6))]
        drafts = [[rng.randrange(3) for _ in range(rng.randrange(5))] if k else [] for k in known]
        step = step_of(drafts, known)
        drawn = [rng.randrange(3) for _ in step.places]
        found = Drafts.of(step, step.places)
        held, last, at = [], [], 0
        for ids in drafts:
            mine = drawn[at : at + len(ids) + 1]
            at += len(mine)
            num = next((i for i, (a, b) in enumerate(zip(mine, ids, strict=False)) if a != b), len(ids))
            held.append(num)
            last.append(mine[num])
        tensor = torch.tensor(drawn)
        assert found.num_held(tensor).tolist() == held
        assert found.last(tensor, found.num_held(tensor)).tolist() == last
