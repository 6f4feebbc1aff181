"""Prefill graphs on CPU: what they are given, and that a padded step gives what an eager one gives."""

from __future__ import annotations

import math
import random
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import numpy as np
import pytest
import torch

from dovetail.engine.core import EngineCore
from dovetail.engine.request import Chunk
from dovetail.messages import SamplingParams, Submit
from dovetail.runtime import prefill_graphs
from dovetail.runtime.prefill_graphs import PATIENCE, STAND_IN_PATIENCE, PrefillGraphs, pack
from dovetail.runtime.prefill_sizes import MAX_CHUNKS, SINGLE, TOGETHER, Size, sizes
from dovetail.runtime.stepper import StepGraphs
from dovetail.testing.engine import make_core
from dovetail.testing.models import make_model
from dovetail_backends.triton import TritonBackend

SIZES = [Size(8, 1), Size(16, 1), Size(24, 5), Size(40, 5)]


def chunk(start: int, num_new: int, *, logprobs: bool = False) -> Chunk:
    """Of a request in row 7 and the pages 20, 21 … in this order."""
    request = Mock(ids=list(range(100, 200)), pages=list(range(20, 30)), row=7)
    request.prompt_logprobs = [] if logprobs else None
    return Chunk(request, start, num_new, samples=True)


def test_what_a_graph_reads() -> None:
    """Tokens stand one chunk behind the other, padding behind them and without a place; empty chunks at the end."""
    packed = pack([chunk(3, 4), chunk(0, 2)], Size(8, 3), page_size=4, spare_row=9)
    ids, positions, slots = packed[:24].reshape(3, 8).tolist()
    rows, lens, last = packed[24:33].reshape(3, 3).tolist()
    assert ids == [103, 104, 105, 106, 100, 101, 0, 0]
    assert positions == [3, 4, 5, 6, 0, 1, 0, 0]
    assert slots == [83, 84, 85, 86, 80, 81, -1, -1]
    assert (rows, lens, last) == ([7, 7, 9], [7, 2, 0], [3, 5, 0])
    assert packed[33:].tolist() == [0, 4, 6, 6]


def test_sizes_follow_the_model_and_the_limits() -> None:
    """A large model is captured for one short step; nothing is captured that no step reaches."""
    small = sizes(1 << 30, 8192, 256)
    assert small == [*(Size(n, 1) for n in SINGLE), *(Size(n, MAX_CHUNKS) for n in TOGETHER)]
    assert max(sizes(16 << 30, 8192, 256)) == Size(512, MAX_CHUNKS)
    assert max(sizes(1 << 30, 1100, 3)) == Size(1536, 3)
    assert len(set(sizes(1 << 30, 8192, 1))) == len(sizes(1 << 30, 8192, 1))


@pytest.fixture
def graphs(monkeypatch: pytest.MonkeyPatch) -> PrefillGraphs:
    """Capturing is noted only; those of one chunk are there."""
    monkeypatch.setattr(PrefillGraphs, "_capture", lambda self, size: self._captured.setdefault(size, Mock()))
    monkeypatch.setattr(prefill_graphs, "FIRST", SIZES[:2])
    monkeypatch.setattr(prefill_graphs, "SINGLE", (8, 16))
    made = PrefillGraphs(Mock(), Mock(), Mock(), 16, SIZES, Mock())
    made.capture_first()
    return made


def test_the_smallest_size_that_is_there_serves(graphs: PrefillGraphs) -> None:
    """By tokens and chunks; nothing serves prompts that want all their tokens' logits."""
    assert graphs.size_for([chunk(0, 8)]) == Size(8, 1)
    assert graphs.size_for([chunk(5, 9)]) == Size(16, 1)
    assert graphs.size_for([chunk(0, 8), chunk(0, 8, logprobs=True)]) is None
    assert graphs.size_for([chunk(0, 1)] * 6) is None
    assert graphs.size_for([chunk(0, 41)]) is None


def test_a_missing_size_is_captured_when_it_has_been_missed_often(graphs: PrefillGraphs) -> None:
    """Until then a larger one serves, if it is there and not much larger, or none."""
    two = [chunk(0, 8), chunk(0, 9)]
    assert [graphs.size_for(two) for _ in range(PATIENCE)] == [None] * PATIENCE
    assert graphs.size_for(two) == SIZES[2]
    del graphs._captured[SIZES[0]], graphs._captured[SIZES[2]], graphs._missed[SIZES[2]]
    graphs._capture(SIZES[3])
    assert [graphs.size_for(two) for _ in range(STAND_IN_PATIENCE)] == [SIZES[3]] * STAND_IN_PATIENCE
    assert graphs.size_for(two) == SIZES[2]
    assert graphs.size_for([chunk(0, 1)]) == SIZES[1]
    del graphs._captured[SIZES[1]], graphs._captured[SIZES[2]]
    assert graphs.size_for([chunk(0, 1)]) is None


def test_a_size_without_memory_is_not_tried_again(graphs: PrefillGraphs, monkeypatch: pytest.MonkeyPatch) -> None:
    """A larger size that is there serves, or none; the failure is no failure of the step."""
    tries: list[Size] = []

    def capture(self: PrefillGraphs, size: Size) -> None:
        tries.append(size)
        raise torch.OutOfMemoryError("CUDA out of memory")

    monkeypatch.setattr(PrefillGraphs, "_capture", capture)
    two = [chunk(0, 8), chunk(0, 9)]
    assert [graphs.size_for(two) for _ in range(PATIENCE + 1)] == [None] * (PATIENCE + 1)
    assert tries == [SIZES[2]]
    for _ in range(3 * STAND_IN_PATIENCE):
        graphs.size_for(two)
    assert tries == [SIZES[2], SIZES[3]]


def test_idle_time_completes_the_sizes(graphs: PrefillGraphs) -> None:
    """One at a time, in order."""
    assert graphs.num_left == 2
    assert list(graphs._captured) == SIZES[:2]
    graphs.run_next()
    assert list(graphs._captured) == SIZES[:3]
    graphs.run_next()
    assert graphs.num_left == 0


class Recorded:
    """In place of a CUDA graph: runs the step again and overwrites its results, as a replay does."""

    def __init__(self, step: Callable[[], tuple[torch.Tensor, ...]]) -> None:
        self._step, self.results = step, tuple(result.clone() for result in step())

    def replay(self) -> None:
        """Compute the step on what its static inputs hold by now."""
        for old, new in zip(self.results, self._step(), strict=True):
            old.copy_(new)


class RecordingPool:
    """In place of `GraphPool`."""

    def capture(self, step: Callable[[], Any]) -> tuple[Any, Any]:
        """As there."""
        graph = Recorded(step)
        return graph, graph.results


@pytest.fixture
def core(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[bool], EngineCore]:
    """Makes engines on CPU with the Triton backend in its interpreter, with or without prefill graphs."""
    pytest.importorskip("triton.runtime.interpreter")
    monkeypatch.setattr(TritonBackend, "caps", replace(TritonBackend.caps, devices=frozenset({"cpu"})))
    monkeypatch.setattr("dovetail.plugins.plan._why_not", lambda record, device: None)
    make_model(tmp_path, "Qwen3ForCausalLM", num_hidden_layers=1)
    settings = {"attention_backend": "triton", "chunked_prefill_size": 40, "max_running_requests": 7, "page_size": 4}

    def make(has_graphs: bool) -> EngineCore:
        made = make_core(tmp_path, max_total_tokens=600, **settings)
        if has_graphs:
            runner, pool = made.runner, RecordingPool()
            parts = (runner.model, runner.attention, runner.state, runner.pool.page_size, SIZES)
            prefill = PrefillGraphs(*parts, pool)  # type: ignore[arg-type]
            with torch.inference_mode():
                while prefill.num_left:
                    prefill.run_next()
            decode = Mock()
            decode.choose.return_value = None
            made.stepper._graphs = StepGraphs(decode=decode, prefill=prefill)
        return made

    return make


def serve(core: EngineCore) -> dict[str, list[int]]:
    """Prompts that come alone, together and while others decode, some cut into chunks, some behind a cached prefix."""
    rng = random.Random(2)
    shared = [rng.randrange(190) for _ in range(13)]
    tokens: dict[int, list[int]] = {}
    for turn, lengths in enumerate(([5], [3, 2, 1], [16], [70, 2], [7, 7, 7, 7, 7], [1] * 6)):
        for i, length in enumerate(lengths):
            own = [rng.randrange(190) for _ in range(length)]
            params = SamplingParams(max_tokens=2, temperature=0.9 * (turn % 2), seed=turn, ignore_eos=True)
            prompt = shared[: 13 * (i % 2)] + own
            core.handle(Submit(rid="", handle=100 * turn + i, prompt_ids=prompt, params=params))
        while core.has_work:
            for delta in core.step().deltas:
                tokens.setdefault(delta.handle, []).extend(delta.ids)
    return tokens


def test_padded_steps_give_what_eager_steps_give(core: Callable[[bool], EngineCore]) -> None:
    """Every request gets the same tokens, greedy and drawn; graphs served most steps."""
    with_graphs = core(True)
    prefill = with_graphs.stepper._graphs.prefill  # type: ignore[union-attr]
    assert prefill is not None
    used: list[tuple[Size, int]] = []
    run = prefill.run
    prefill.run = lambda chunks, size: used.append((size, len(chunks))) or run(chunks, size)  # type: ignore
    assert serve(with_graphs) == serve(core(False))
    assert {size for size, _ in used} == set(SIZES)
    assert {num for _, num in used} >= {1, 3, 5}


def test_padding_writes_nothing(core: Callable[[bool], EngineCore]) -> None:
    """Keys, values and device rows of others are as before a step that pads."""
    engine = core(True)
    pool, state = engine.runner.pool, engine.runner.state
    before = pool.layer(0).clone(), state.next_ids.clone(), state.seq_lens.clone()
    assert engine.stepper._graphs is not None
    prefill = engine.stepper._graphs.prefill
    assert prefill is not None
    with torch.inference_mode():
        prefill.run([], SIZES[3])
    after = pool.layer(0), state.next_ids, state.seq_lens
    for old, new in zip(before, after, strict=True):
        assert np.array_equal(old.numpy(), new.numpy())


@pytest.mark.parametrize("at", [3, 39, 41, 60], ids=["first chunk", "its end", "second chunk", "last token"])
def test_a_token_that_is_not_finite_ends_its_request_under_graphs(core: Callable[[bool], EngineCore], at: int) -> None:
    """Of a chunk that samples or not, beside another prompt: that request alone ends."""
    engine = core(True)
    model, once = engine.runner.model, [True]
    forward = model.forward

    def spoil(ids: torch.Tensor, batch: Any) -> torch.Tensor:
        hidden: torch.Tensor = forward(ids, batch)
        found = ((ids == 189) & (batch.positions == at)).nonzero()
        if once and len(found):
            once.clear()
            hidden[found[0]] = math.nan
        return hidden

    model.forward = spoil
    prompt = [(7 * i) % 180 for i in range(61)]
    prompt[at] = 189
    params = SamplingParams(max_tokens=3, temperature=0, ignore_eos=True)
    tokens: dict[int, list[int]] = {1: [], 2: [], 3: []}
    ends: dict[int, str | None] = {}
    engine.handle(Submit(rid="", handle=1, prompt_ids=prompt, params=params))
    engine.handle(Submit(rid="", handle=2, prompt_ids=prompt[::-1], params=params))
    for _ in range(30):
        for delta in engine.step().deltas:
            tokens[delta.handle] += delta.ids
            ends |= {delta.handle: delta.finish.message} if delta.finish else {}
        if len(ends) == 2 and 3 not in ends:
            engine.handle(Submit(rid="", handle=3, prompt_ids=prompt, params=params))
            ends[3] = None
    assert "not finite" in (ends[1] or "")
    assert (tokens[1], len(tokens[2]), len(tokens[3])) == ([], 3, 3)
