"""An engine whose steps are replays gives what an engine without graphs gives: tokens, log probabilities, ends.

On CPU, see `fake_graphs`. So the way through captured decode steps and prefills, padded rows, captured and deferred
draws, masks, penalties and chunks is gone in every run of the tests; a GPU adds streams and real kernels.
"""

from __future__ import annotations

import math
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
import torch
from fake_graphs import SIZES, make_captured, use_triton
from served_loads import Load, loads, serve

from dovetail.contracts.attention import ForwardBatch
from dovetail.engine.core import EngineCore
from dovetail.messages import Finish, SamplerParams, Submit
from dovetail.sdk.rows import MAX_TOP
from dovetail_testing.engine import make_core
from dovetail_testing.models import make_model

SETTINGS: dict[str, Any] = {
    "page_size": 4,
    "chunked_prefill_size": 40,
    "max_running_requests": 7,
    "max_total_tokens": 900,
    "dtype": "float32",
}
HEADS = {"num_attention_heads": 2, "num_key_value_heads": 1}
OVERLAPPED = pytest.mark.parametrize(
    "overlap", [pytest.param(False, marks=pytest.mark.full), True], ids=["in turn", "overlapped"]
)
"""Both in `make test-all`."""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny model of one layer."""
    return make_model(tmp_path_factory.mktemp("model"), "Qwen3ForCausalLM", num_hidden_layers=1, **HEADS)


@pytest.fixture
def make(folder: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., EngineCore]:
    """Makes engines that replay, by default all that can be."""
    use_triton(monkeypatch)

    def made(overlap: bool = False, **kinds: bool) -> EngineCore:
        return make_captured(folder, overlap_on_cpu=overlap, disable_overlap_schedule=not overlap, **kinds, **SETTINGS)

    return made


def adjusted(core: EngineCore) -> int:
    """How often draws were replayed that adjust what they draw from."""
    graphs: Any = core.executor.stepper._graphs
    return sum(done.adjusted.graph.graph.num_replays for done in graphs.decode._captured.values())


def replays(core: EngineCore) -> tuple[set[int], set[Any], int]:
    """Decode buckets and prefill sizes that were replayed, and how often plain draws were."""
    graphs: Any = core.executor.stepper._graphs
    buckets = {key.rows for key, done in graphs.decode._captured.items() if done.step.graph.num_replays}
    prefills = () if graphs.prefill is None else graphs.prefill._captured.items()
    draws = sum(done.draw.graph.num_replays for done in graphs.decode._captured.values() if done.draw is not None)
    return buckets, {size for size, done in prefills if done.graph.graph.num_replays}, draws


@pytest.mark.parametrize(
    ("seed", "overlap"), [(1, True), pytest.param(2, False, marks=pytest.mark.full)], ids=["overlapped", "in turn"]
)
def test_replayed_steps_give_what_eager_steps_give(
    seed: int, overlap: bool, make: Callable[..., EngineCore], folder: Path
) -> None:
    """Greedy, drawn, filtered, penalized, biased, banned, constrained, with log probabilities: in every graph."""
    asked = loads(seed)
    want = serve(make_core(folder, **SETTINGS), asked)
    core = make(overlap)
    assert serve(core, asked) == want
    buckets, sizes, _ = replays(core)
    assert buckets >= {1, 2, 4}
    assert sizes == set(SIZES)
    assert adjusted(core) > 5


@OVERLAPPED
def test_masks_and_counts_are_applied_in_graphs(
    overlap: bool, make: Callable[..., EngineCore], folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """No decode row of a replayed step is sampled outside, before its minimum length or not, beside prompts or not."""
    chosen = {"min_tokens": 9, "max_tokens": 14, "ignore_eos": True, "stop_token_ids": tuple(range(0, 190, 13))}
    asked = [(ids, msgspec.structs.replace(params, **chosen), i != 1) for i, (ids, params, _) in enumerate(loads(8, 4))]
    want = serve(make_core(folder, **SETTINGS), asked, every=1)
    core = make(overlap)
    stepper: Any = core.executor.stepper
    outside, later, kept = [], stepper._later, 0
    beside, choose, prefill = [], stepper.choose, stepper._prefill

    def noted(part: Any, logits: Any, step: Any) -> None:
        if step.decode_graph is not None:
            outside.extend(part.at[part.at < step.num_decode])
        later(part, logits, step)

    def chosen_late(launched: Any, late: Any) -> None:
        nonlocal kept
        kept += int((late.mask_of < -1).sum())
        num = launched.step.num_decode
        beside.append(launched.step.prefill_graph is not None and (late.mask_of[:num] != -1).any())
        choose(launched, late)

    monkeypatch.setattr(stepper, "_later", noted)

    def overwriting(*args: Any) -> None:
        prefill(*args)
        for done in stepper._graphs.decode._captured.values():
            done.step.outputs.logits.fill_(-77.0)
            done.step.outputs.non_finite.fill_(True)

    monkeypatch.setattr(stepper, "_prefill", overwriting)
    monkeypatch.setattr(stepper, "choose", chosen_late)
    assert serve(core, asked, every=1) == want
    assert not outside
    assert any(beside)
    assert kept > 6
    assert adjusted(core) > 6


@pytest.mark.first(1)
@OVERLAPPED
@pytest.mark.parametrize("rivals", [MAX_TOP, MAX_TOP + 1], ids=["in a graph", "outside"])
def test_masks_that_the_device_keeps_are_given_up_when_a_step_fails(
    rivals: int, overlap: bool, make: Callable[..., EngineCore], folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Draws that fail before a mask was copied: every token is still the same, wherever it is drawn."""
    chosen = {"max_tokens": 12, "ignore_eos": True, "logprobs": rivals, "logit_bias": {}}
    asked = [(ids, msgspec.structs.replace(params, **chosen), i != 1) for i, (ids, params, _) in enumerate(loads(8, 4))]
    want = serve(make_core(folder, **SETTINGS), asked, every=1)
    core = make(overlap)
    stepper: Any = core.executor.stepper
    choose, failed, kept = stepper.choose, 0, 0

    def failing(launched: Any, late: Any) -> None:
        nonlocal failed, kept
        kept += int((late.mask_of < -1).sum())
        if len(late.keep) and kept and failed < 2:
            failed += 1
            raise RuntimeError("no")
        choose(launched, late)

    monkeypatch.setattr(stepper, "choose", failing)
    assert serve(core, asked, every=1) == want
    assert failed == 2


def test_full_batches_are_padded_and_drawn_in_graphs(make: Callable[..., EngineCore], folder: Path) -> None:
    """Rows that come and go while seven decode: no bucket fits exactly, and the draw follows who is there."""
    rng = random.Random(4)
    asked: list[Load] = []
    for i in range(20):
        params = SamplerParams(
            max_tokens=3 + i % 7, temperature=0.9 * (i % 3 > 0), top_k=i % 4, seed=i, ignore_eos=True
        )
        asked.append(([rng.randrange(190) for _ in range(4 + i % 5)], params, False))
    want = serve(make_core(folder, **SETTINGS), asked, every=1)
    core = make(True)
    assert serve(core, asked, every=1) == want
    buckets, _, draws = replays(core)
    assert buckets >= {4}
    assert draws > 10


@pytest.mark.parametrize("kinds", [{"prefill": False}, {"decode": False}], ids=str)
def test_half_of_a_step_without_its_graph_is_run_eagerly(
    kinds: dict[str, bool], make: Callable[..., EngineCore], folder: Path
) -> None:
    """Only decode steps are captured, or only prefills: steps of both are eager, and all tokens are the same."""
    asked = loads(5, num=9)
    want = serve(make_core(folder, **SETTINGS), asked)
    assert serve(make(True, **kinds), asked) == want


@OVERLAPPED
def test_grammars_that_come_late_keep_their_requests_silent(
    overlap: bool, make: Callable[..., EngineCore], folder: Path
) -> None:
    """A constrained request is prefilled and gets its first token when it is decided, in a graph or not."""
    asked = loads(6, num=10)
    want = serve(make_core(folder, **SETTINGS), asked, patience=7)
    assert serve(make(overlap), asked, patience=7) == want
    assert any(constrained for _, _, constrained in asked)


@OVERLAPPED
def test_a_token_that_is_not_finite_ends_one_request_of_a_replay(
    overlap: bool, make: Callable[..., EngineCore]
) -> None:
    """NaN in a decode row of a padded batch: that request ends, the others get their tokens, no page is spoilt."""
    prompts = [[(7 * i + j) % 180 for j in range(9)] for i in range(5)]
    params = SamplerParams(max_tokens=8, temperature=0, ignore_eos=True)
    want = serve(make(overlap), [(prompt, params, False) for prompt in prompts])
    core = make(overlap)
    pool, forward, spoilt = core.executor.runner.pool, core.executor.runner.model.forward, []

    def spoil(ids: torch.Tensor, batch: ForwardBatch) -> torch.Tensor:
        hidden: torch.Tensor = forward(ids, batch)
        found = ((batch.positions == 12) & (batch.kv_slots >= 0)).nonzero()
        if not spoilt and len(found):
            spoilt.append(int(batch.rows[found[0]]))
            hidden[found[0]] = math.nan
            slot = int(batch.kv_slots[found[0]])
            pool.layer(0)[slot // 4, :, slot % 4] = math.nan
        return hidden

    core.executor.runner.model.forward = spoil
    ends: dict[int, Finish] = {}
    tokens: list[list[int]] = [[] for _ in prompts]
    for handle, prompt in enumerate(prompts):
        core.handle(Submit(rid="", handle=handle, prompt_ids=prompt, params=params))
    for _ in range(100):
        if not core.has_work:
            break
        for delta in core.step().deltas:
            tokens[delta.handle] += delta.ids
            ends |= {delta.handle: delta.finish} if delta.finish else {}
    bad = [handle for handle, finish in ends.items() if "not finite" in (finish.message or "")]
    assert len(bad) == len(spoilt) == 1
    assert [t for i, t in enumerate(tokens) if i not in bad] == [t for i, (t, _, _) in enumerate(want) if i not in bad]
    assert tokens[bad[0]] == want[bad[0]][0][: len(tokens[bad[0]])]
    assert core.pages.check_ownership([])
    pool.zero_pages(0, [page for _, page in core.rows.to_zero])  # as the next step would
    assert torch.isfinite(pool.layer(0)).all()


def test_replayed_steps_of_two_groups_give_what_eager_steps_give(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A model of whose layers one has a window: slots of the second group are found within the graph."""
    window = {"use_sliding_window": True, "sliding_window": 9, "max_window_layers": 1, "layer_types": None}
    folder = make_model(tmp_path, "Qwen2ForCausalLM", num_hidden_layers=2, **HEADS, **window)
    asked = loads(5, 7, grammars=False, logprobs=False)
    want = serve(make_core(folder, **SETTINGS), asked)
    use_triton(monkeypatch)
    core = make_captured(folder, overlap_on_cpu=True, **SETTINGS)
    assert [len(pool._layers) for pool in core.executor.runner.pool.pools] == [1, 1]
    assert serve(core, asked) == want
    buckets, prefills, _ = replays(core)
    assert len(buckets) > 1
    assert prefills


@OVERLAPPED
def test_hidden_states_are_pooled_between_replays(make: Callable[..., EngineCore], folder: Path, overlap: bool) -> None:
    """Such steps run eagerly; tokens and numbers are those of an engine without graphs."""
    asked = loads(5, 8, grammars=False, logprobs=False)

    def run(core: EngineCore) -> dict[int, Any]:
        found: dict[int, Any] = {}
        left = list(enumerate(asked))
        for _ in range(400):
            if left:
                at, (prompt, params, _) = left.pop(0)
                core.handle(Submit(rid="", handle=2 * at, prompt_ids=prompt, params=params))
                pool: Any = ("last", "mean")[at % 2]
                core.handle(Submit(rid="", handle=2 * at + 1, prompt_ids=prompt[::-1], params=params, pool=pool))
            for delta in core.step().deltas:
                found.setdefault(delta.handle, []).extend(delta.ids)
                if delta.pooled is not None:
                    found[delta.handle] = np.frombuffer(delta.pooled, dtype=np.float32)
            if not left and not core.has_work:
                break
        assert core.pages.check_ownership([])
        return found

    captured = make(overlap)
    graphs, plain = run(captured), run(make_core(folder, **SETTINGS))
    assert replays(captured)[0]
    assert graphs.keys() == plain.keys() == set(range(16))
    for handle, found in graphs.items():
        if handle % 2:
            np.testing.assert_allclose(found, plain[handle], atol=1e-4)
        else:
            assert found == plain[handle]
