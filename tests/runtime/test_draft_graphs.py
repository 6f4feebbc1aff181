"""Drafts under graphs, on CPU: verified by a prefill's replay, with steps that overlap between."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest
from fake_graphs import SIZES, make_captured, use_triton

from dovetail.engine.core import EngineCore
from dovetail.engine.draft_record import DraftRecord
from dovetail.engine.request import EngineRequest, StepPlan
from dovetail.engine.speculation import Cost, Gain, Shares, StepCosts
from dovetail.engine.step_builder import GraphChooser
from dovetail.messages import SamplerParams, Submit
from dovetail.runtime.graphs.prefill import PrefillGraphs
from dovetail.runtime.graphs.verify import VerifyGraphs
from dovetail_testing.models import make_model

ASKED: tuple[dict[str, Any], ...] = (
    {"temperature": 0},
    {"temperature": 0.8, "seed": 3, "top_p": 0.9},
    {"temperature": 0, "frequency_penalty": 0.5},
    {"temperature": 0, "logprobs": 2},
    {"temperature": 0.7, "seed": 1, "min_tokens": 9, "logit_bias": {5: 3.0}},
)


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A small model; captured steps run in Triton's interpreter."""
    use_triton(monkeypatch)
    return make_model(tmp_path / "model", "Qwen3ForCausalLM", num_hidden_layers=1)


def serve(core: EngineCore, asked: Any = ASKED) -> dict[int, list[int]]:
    """Prompts that repeat, and what is said of them, in the order in which it came."""
    tokens: dict[int, list[int]] = {}
    for i, given in enumerate(asked):
        params = SamplerParams(max_tokens=24, ignore_eos=True, **given)
        core.handle(Submit(rid="", handle=i, prompt_ids=[5 + i, 6, 7] * 5, params=params))
    steps = 0
    while core.has_work:
        steps += 1
        assert steps < 500
        for delta in core.step().deltas:
            tokens.setdefault(delta.handle, []).extend(delta.ids)
    return tokens


def watched(monkeypatch: pytest.MonkeyPatch, graphs: type) -> list[Any]:
    """What is replayed."""
    found: list[Any] = []
    run = graphs.run  # type: ignore[attr-defined]
    monkeypatch.setattr(graphs, "run", lambda self, *args, **more: found.append(args) or run(self, *args, **more))
    return found


def plant(core: EngineCore, plain: dict[int, list[int]], rng: random.Random) -> None:
    """Let an engine guess what came without drafts, right for a while and then wrong, and verify it now and then."""

    def guess(request: EngineRequest) -> list[int]:
        ids = plain[request.handle][request.num_output :][: rng.randrange(7)]
        return [token if rng.random() < 0.8 else 1 for token in ids]

    speculation = core.scheduler.speculation
    assert speculation is not None
    speculation._propose = lambda requests: [guess(request) for request in requests]


@pytest.mark.parametrize("overlaps", [pytest.param(False, marks=pytest.mark.full), True])
@pytest.mark.parametrize(
    "asked",
    [
        pytest.param(ASKED, marks=pytest.mark.full, id="what a graph cannot draw"),
        pytest.param(ASKED[:2] * 3, id="temperature and filters"),
    ],
)
def test_replies_are_those_without_drafts(
    folder: Path, overlaps: bool, asked: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whatever the parameters, drafts in graphs or not, in each step or now and then between steps that overlap."""
    settings: dict[str, Any] = {"max_running_requests": 5, "max_total_tokens": 600, "overlap_on_cpu": overlaps}
    settings["page_size"] = 2
    rng = random.Random(5)
    plain = serve(make_captured(folder, **settings), asked)
    monkeypatch.setattr(DraftRecord, "is_asked", lambda self, length: True)
    monkeypatch.setattr(Gain, "is_promising", lambda self, rows, most: rng.random() < 0.6)

    def choose(self: Gain, plan: StepPlan, found: list[tuple[EngineRequest, list[int]]], most: int) -> Shares:
        shares = [(request, ids[: rng.randint(0, len(ids))]) for request, ids in found]
        return Shares([(request, ids) for request, ids in shares if ids], rng.random() < 0.5)

    monkeypatch.setattr(Gain, "choose", choose)
    core = make_captured(folder, speculator="ngram", **settings)
    plant(core, plain, rng)
    replays, verified = watched(monkeypatch, PrefillGraphs), watched(monkeypatch, VerifyGraphs)
    assert serve(core, asked) == plain
    stats = core.stats()
    assert stats.num_drafted_tokens > stats.num_accepted_tokens > 10
    assert len(replays) > 3
    assert verified or asked is ASKED
    assert core.pages.num_used == 0


def test_what_a_graph_cannot_verify_is_not_drafted(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """No more tokens and chunks than the largest graph takes, where that pays best; steps with drafts are replays."""
    core = make_captured(folder, speculator="ngram", max_running_requests=7, max_total_tokens=900, overlap_on_cpu=True)
    assert core.graphs.verifying() == SIZES
    assert core.scheduler.speculation is not None
    core.scheduler.speculation._propose = lambda requests: [[1] * 8] * len(requests)
    monkeypatch.setattr(DraftRecord, "hold", 0.9)
    monkeypatch.setattr(StepCosts, "plain", lambda self, rows, prompt: Cost(1.0, 2))
    monkeypatch.setattr(StepCosts, "verify", lambda self, graph, left: Cost(0.1, 2))
    sizes: list[tuple[int, int]] = []
    choose = GraphChooser.choose

    def noted(self: GraphChooser, plan: StepPlan) -> Any:
        chosen = choose(self, plan)
        if plan.drafts:
            sizes.append((sum(chunk.num_new for chunk in plan.chunks), len(plan.chunks)))
            assert chosen[1] is not None
        return chosen

    monkeypatch.setattr(GraphChooser, "choose", noted)
    assert len(serve(core, [{"temperature": 0}] * 7)) == 7
    assert max(tokens for tokens, _ in sizes) == 40
    assert max(chunks for _, chunks in sizes) == 5
