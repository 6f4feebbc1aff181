"""Drafts on a CUDA device: verified by graphs, and the demo model says what it says without them."""

from __future__ import annotations

import random
from collections.abc import Iterator
from typing import Any

import pytest

from dovetail.demo import MODEL_DIR
from dovetail.engine.core import EngineCore
from dovetail.engine.speculation import Cost, StepCosts
from dovetail.messages import SamplerParams, Submit
from dovetail.runtime.graphs.verify import VerifyGraphs
from dovetail_testing.engine import make_core

pytestmark = pytest.mark.gpu


def engine(**settings: Any) -> EngineCore:
    """An engine whose rows do not depend on each other, with all of its graphs."""
    core = make_core(MODEL_DIR, device="cuda", batch_invariant=True, max_running_requests=16, **settings)
    while core.has_idle_tasks:
        core.run_idle_task()
    return core


def serve(core: EngineCore, num: int, together: bool) -> dict[int, list[int]]:
    """Replies to prompts that repeat, greedy and seeded."""
    rng, said = random.Random(3), dict[int, list[int]]()
    for i in range(num):
        prompt = [rng.randrange(10, 900) for _ in range(12)] * 3
        params = SamplerParams(
            max_tokens=72, ignore_eos=True, temperature=(0, 0.4, 0.8)[i % 3], seed=i, top_p=(1.0, 0.9)[i // 3 % 2]
        )
        core.handle(Submit(rid="", handle=i, prompt_ids=prompt, params=params))
        while core.has_work and (not together or i == num - 1):
            for delta in core.step().deltas:
                said.setdefault(delta.handle, []).extend(delta.ids)
    return said


@pytest.fixture(scope="module")
def engines() -> Iterator[tuple[EngineCore, EngineCore]]:
    """Without drafts and with."""
    plain, drafting = engine(), engine(speculator="ngram")
    yield plain, drafting
    plain.close()
    drafting.close()


@pytest.mark.parametrize("together", [False, True])
@pytest.mark.parametrize("is_free", [False, True])
def test_replies_are_those_without_drafts(
    engines: tuple[EngineCore, EngineCore], together: bool, is_free: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where drafts pay, and where each is verified as if that cost nothing."""
    plain, drafting = engines
    runs: list[int] = []
    run = VerifyGraphs.run
    monkeypatch.setattr(VerifyGraphs, "run", lambda self, *args, **more: runs.append(1) or run(self, *args, **more))
    if is_free:
        monkeypatch.setattr(StepCosts, "verify", lambda self, graph, left: Cost(1e-9, 2, 1 << 40))
    before = drafting.stats().num_accepted_tokens
    assert serve(drafting, 12, together) == serve(plain, 12, together)
    if is_free:
        assert drafting.stats().num_accepted_tokens > before
        assert runs
