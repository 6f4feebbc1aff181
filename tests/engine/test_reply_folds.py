"""Replies that come back: with `--fold-replies` the next turn finds them, with the bits of a cold start."""

from __future__ import annotations

import random
import sys
from pathlib import Path
from typing import Any

import pytest

from dovetail.engine.core import EngineCore
from dovetail.messages import Abort, Admitted, SamplerParams, Submit, TokenDelta
from dovetail_testing.engine import make_core

sys.path.insert(0, str(Path(__file__).parents[1] / "models"))  # the checkpoints with weak decays
from delta_models import make_delta

SETTINGS: dict[str, Any] = {"page_size": 4, "max_total_tokens": 4096, "model_impl": "dovetail", "batch_invariant": True}
PARAMS = SamplerParams(max_tokens=70, temperature=0, ignore_eos=True, logprobs=2)
GRID = 64


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A checkpoint of Qwen3.5."""
    made = tmp_path_factory.mktemp("delta")
    make_delta(made, "qwen3_5_text", max_position_embeddings=2048)
    return made


def run(core: EngineCore, asked: dict[int, list[int]], params: SamplerParams = PARAMS) -> dict[int, list[TokenDelta]]:
    """Run requests until nothing is left to do; every delta is of one of them."""
    found: dict[int, list[TokenDelta]] = {handle: [] for handle in asked}
    for handle, ids in asked.items():
        core.handle(Submit(rid="", handle=handle, prompt_ids=ids, params=params))
    while core.has_work:
        for delta in core.step().deltas:
            found[delta.handle].append(delta)
        assert core.pages.check_counts(core.scheduler.running)
        assert core.pages.check_ownership(core.scheduler.running)
    assert core.stats().num_used_tokens == 0
    return found


def ids_of(deltas: list[TokenDelta]) -> list[int]:
    """The tokens of a reply."""
    return [token for delta in deltas for token in delta.ids]


def seen(deltas: list[TokenDelta]) -> tuple[list[int], list[Any]]:
    """Tokens, and log probabilities to the last bit."""
    return ids_of(deltas), [logprob for delta in deltas for logprob in delta.logprobs or ()]


def new(rng: random.Random, num: int) -> list[int]:
    """Random tokens."""
    return [rng.randrange(5, 130) for _ in range(num)]


@pytest.mark.parametrize(
    "overlap", [pytest.param(False, marks=pytest.mark.full, id="in turn"), pytest.param(True, id="overlapped")]
)
def test_the_next_turn_finds_the_reply(overlap: bool, folder: Path) -> None:
    """Three turns: all but the new text and less than a step of the grid; tokens and their bits are those of a miss."""
    rng, both = random.Random(1), {"overlap_on_cpu": overlap, "disable_overlap_schedule": not overlap}
    core, plain = (make_core(folder, fold_replies=folds, **both, **SETTINGS) for folds in (True, False))
    said: list[int] = []
    for turn in range(3):
        prompt = said + new(rng, 50 if turn else 100)
        reply, other = run(core, {turn: prompt})[turn], run(plain, {turn: prompt})[turn]
        [cold] = run(make_core(folder, **SETTINGS), {0: prompt}).values()
        assert seen(reply) == seen(cold)
        assert reply[-1].cached_tokens == len(said) // GRID * GRID
        assert other[-1].cached_tokens < reply[-1].cached_tokens or not turn
        said = prompt + ids_of(reply)


def test_a_reply_is_folded_once_and_unheard(folder: Path) -> None:
    """Its tokens behind the prompt's copy, in one chunk; no message names it; a short reply is not worth it."""
    core = make_core(folder, fold_replies=True, **SETTINGS)
    told: list[Any] = []
    core.send = told.append
    chunks: list[tuple[bool, int, int]] = []
    schedule = core.scheduler.schedule

    def noted() -> Any:
        plan = schedule()
        chunks.extend((chunk.request.prefill_only, chunk.start, chunk.num_new) for chunk in plan.chunks)
        return plan

    core.scheduler.schedule = noted  # type: ignore[method-assign]
    prompts = {1: new(random.Random(2), 100), 2: new(random.Random(3), 70)}
    run(core, prompts)
    assert sorted(chunks) == [(False, 0, 70), (False, 0, 100), (True, 64, 64), (True, 64, 64)]
    assert [handle for message in told if isinstance(message, Admitted) for handle in message.handles] == [1, 2]
    chunks.clear()
    run(core, {3: new(random.Random(4), 66)}, SamplerParams(max_tokens=5, temperature=0, ignore_eos=True))
    assert chunks == [(False, 0, 66)]


def test_what_ends_badly_is_not_folded(folder: Path) -> None:
    """An aborted request leaves what it had, and nothing is computed for it any more."""
    core = make_core(folder, fold_replies=True, **SETTINGS)
    core.handle(Submit(rid="", handle=1, prompt_ids=new(random.Random(5), 60), params=PARAMS))
    for _ in range(40):
        core.step()
    core.handle(Abort(1))
    assert [delta.handle for delta in core.step().deltas] == [1]
    assert not core.has_work


def test_a_fold_that_fails_is_nobodys_error(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Steps with it raise: it is ended alone, no client hears of it, and the next request is served."""
    core = make_core(folder, fold_replies=True, **SETTINGS)
    stepper: Any = core.executor.stepper  # type: ignore[attr-defined]
    launch, failures = stepper.launch, []

    def failing(step: Any) -> Any:
        if any(chunk.request.prefill_only for chunk in plans[-1].chunks):
            failures.append(step.step)
            raise RuntimeError("a fault")
        return launch(step)

    plans: list[Any] = []
    schedule = core.scheduler.schedule
    monkeypatch.setattr(core.scheduler, "schedule", lambda: plans.append(schedule()) or plans[-1])
    monkeypatch.setattr(stepper, "launch", failing)
    first = run(core, {1: new(random.Random(6), 100)})[1]
    assert failures
    assert [delta.finish.reason for delta in first if delta.finish is not None] == ["length"]
    assert run(core, {2: new(random.Random(7), 30)})[2][-1].finish is not None


def test_folds_wait_while_a_crowd_does(folder: Path) -> None:
    """With more waiting than can run, replies are not folded: what they would delay comes first."""
    core = make_core(folder, fold_replies=True, max_running_requests=2, **SETTINGS)
    added: list[bool] = []
    add = core.scheduler.add
    core.scheduler.add = lambda request: added.append(request.prefill_only) or add(request)  # type: ignore
    run(core, {handle: new(random.Random(handle), 60) for handle in range(8)})
    assert 0 < sum(added) < 8


@pytest.mark.parametrize(
    "overlap", [pytest.param(False, marks=pytest.mark.full, id="in turn"), pytest.param(True, id="overlapped")]
)
def test_a_beginning_that_was_computed_early_is_gone_on_from(overlap: bool, folder: Path) -> None:
    """From the last step of the grid; tokens and their bits are those of a miss."""
    core = make_core(folder, overlap_on_cpu=overlap, disable_overlap_schedule=not overlap, **SETTINGS)
    prompt, first = new(random.Random(8), 300), SamplerParams(max_tokens=1)
    for handle, num in ((1000, 100), (1001, 210)):
        core.handle(Submit(rid="", handle=handle, prompt_ids=prompt[:num], params=first, prefill_only=True))
        core.step()
    core.handle(Submit(rid="", handle=1, prompt_ids=prompt, params=PARAMS))
    found: list[TokenDelta] = []
    while core.has_work:
        found += [delta for delta in core.step().deltas if delta.handle == 1]
    [cold] = run(make_core(folder, **SETTINGS), {1: prompt}).values()
    assert seen(found) == seen(cold)
    assert found[-1].cached_tokens == 210 // GRID * GRID
