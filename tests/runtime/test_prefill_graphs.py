"""Prefill graphs on CPU: what they are given, and that a padded step gives what an eager one gives."""

from __future__ import annotations

import math
import random
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock

import numpy as np
import pytest
import torch
from fake_graphs import add_graphs

from dovetail.checkpoint.tokenizer_files import TokenizerFiles
from dovetail.engine.core import EngineCore
from dovetail.executor.local import LocalExecutor
from dovetail.messages import SamplerParams, Submit
from dovetail.messages.step import PrefillGraph, no_ints
from dovetail.plugins import load
from dovetail.runtime.device.device_state import DeviceState
from dovetail.runtime.graphs import prefill as prefill_graphs
from dovetail.runtime.graphs.batch import NO_TOKENS, tokens_of
from dovetail.runtime.graphs.prefill import PrefillGraphs, pack
from dovetail.runtime.memory.prefill_sizes import MAX_CHUNKS, SINGLE, TOGETHER, sizes
from dovetail.text.tokenizer.ends import end_ids
from dovetail_backends.triton import TritonBackend
from dovetail_testing.engine import make_plans
from dovetail_testing.models import make_model

SIZES = [PrefillGraph(8, 1), PrefillGraph(16, 1), PrefillGraph(24, 5), PrefillGraph(40, 5)]


def test_what_a_graph_reads() -> None:
    """Tokens stand one chunk behind the other, padding behind them and without a place; empty chunks at the end."""
    state = DeviceState(9, 10, torch.device("cpu"))
    state.pages[0, [7, 5]] = np.arange(20, 30)
    chunks = [(7, 3, 4), (5, 0, 2)]
    step: Any = SimpleNamespace(
        rows=np.array([row for row, _, _ in chunks]),
        start=np.array([start for _, start, _ in chunks]),
        num_new=np.array([num for _, _, num in chunks]),
        ids=np.array([103, 104, 105, 106, 100, 101]),
        saves=np.array([[2, 2], [5, 7], [1, 6], [30, 31]]),
    )
    packed = pack(tokens_of(step, state, page_size=4), step.rows, PrefillGraph(8, 3), padding_row=9, num_saves=4)
    ids, positions, slots = packed[:24].reshape(3, 8).tolist()
    rows, lens, last = packed[24:33].reshape(3, 3).tolist()
    assert ids == [103, 104, 105, 106, 100, 101, 0, 0]
    assert positions == [3, 4, 5, 6, 0, 1, 0, 0]
    assert slots == [83, 84, 85, 86, 80, 81, -1, -1]
    assert (rows, lens, last) == ([7, 5, 9], [7, 2, 0], [3, 5, 0])
    assert packed[33:37].tolist() == [0, 4, 6, 6]
    # The copies of states name chunks, not device rows.
    assert packed[37:].reshape(4, 4).tolist() == [[2, 1, 1, 30], [2, 0, 6, 31], [0, 0, 0, -1], [0, 0, 0, -1]]


def test_sizes_follow_the_model_and_the_limits() -> None:
    """A large model is captured for one short step; nothing is captured that no step reaches."""
    small = sizes(1 << 30, 8192, 256)
    assert small == [*(PrefillGraph(n, 1) for n in SINGLE), *(PrefillGraph(n, MAX_CHUNKS) for n in TOGETHER)]
    assert max(sizes(16 << 30, 8192, 256)) == PrefillGraph(512, MAX_CHUNKS)
    assert max(sizes(1 << 30, 1100, 3)) == PrefillGraph(1536, 3)
    assert len(set(sizes(1 << 30, 8192, 1))) == len(sizes(1 << 30, 8192, 1))


@pytest.fixture
def graphs(monkeypatch: pytest.MonkeyPatch) -> PrefillGraphs:
    """Capturing is noted only; those of one chunk are there."""
    monkeypatch.setattr(PrefillGraphs, "_capture", lambda self, size: self._captured.setdefault(size, Mock()))
    monkeypatch.setattr(prefill_graphs, "FIRST", SIZES[:2])
    made = PrefillGraphs(Mock(), Mock(), Mock(), SIZES, Mock())
    made.capture_first()
    return made


def test_a_size_without_memory_is_not_tried_again(graphs: PrefillGraphs, monkeypatch: pytest.MonkeyPatch) -> None:
    """Captured under load, that is no failure of the step; idle time leaves it out, too."""

    def capture(self: PrefillGraphs, size: PrefillGraph) -> None:
        raise torch.OutOfMemoryError("CUDA out of memory")

    monkeypatch.setattr(PrefillGraphs, "_capture", capture)
    graphs.capture(SIZES[2])
    assert (SIZES[2] in graphs.keys, graphs.num_left) == (False, 1)


def test_idle_time_completes_the_sizes(graphs: PrefillGraphs) -> None:
    """One at a time, in order."""
    assert graphs.num_left == 2
    assert graphs.captured == SIZES[:2]
    graphs.run_next()
    assert graphs.captured == SIZES[:3]
    graphs.run_next()
    assert graphs.num_left == 0


@pytest.fixture
def core(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[bool], EngineCore]:
    """Makes engines on CPU with the Triton backend in its interpreter, with or without prefill graphs."""
    pytest.importorskip("triton.runtime.interpreter")
    monkeypatch.setattr(TritonBackend, "caps", replace(TritonBackend.caps, devices=frozenset({"cpu"})))
    monkeypatch.setattr("dovetail.plugins.plan._why_not", lambda record, device: None)
    make_model(tmp_path, "Qwen3ForCausalLM", num_hidden_layers=1)
    small = {"attention_backend": "triton", "chunked_prefill_size": 40, "max_running_requests": 7, "page_size": 4}

    def make(has_graphs: bool) -> EngineCore:
        settings, plan = make_plans(tmp_path, max_total_tokens=600, **small)
        plugins = load(plan, "engine")
        executor = LocalExecutor(settings, plugins)
        if has_graphs:
            add_graphs(executor, sizes=SIZES, decode=False)
        return EngineCore(settings, plugins, executor, eos_ids=end_ids(TokenizerFiles.read(tmp_path, tmp_path)))

    return make


def serve(core: EngineCore) -> dict[str, list[int]]:
    """Prompts that come alone, together and while others decode, some cut into chunks, some behind a cached prefix."""
    rng = random.Random(2)
    shared = [rng.randrange(190) for _ in range(13)]
    tokens: dict[int, list[int]] = {}
    for turn, lengths in enumerate(([5], [3, 2, 1], [16], [70, 2], [7, 7, 7, 7, 7], [1] * 6)):
        for i, length in enumerate(lengths):
            own = [rng.randrange(190) for _ in range(length)]
            params = SamplerParams(max_tokens=2, temperature=0.9 * (turn % 2), seed=turn, ignore_eos=True)
            prompt = shared[: 13 * (i % 2)] + own
            core.handle(Submit(rid="", handle=100 * turn + i, prompt_ids=prompt, params=params))
        while core.has_work:
            for delta in core.step().deltas:
                tokens.setdefault(delta.handle, []).extend(delta.ids)
    return tokens


def test_padded_steps_give_what_eager_steps_give(core: Callable[[bool], EngineCore]) -> None:
    """Every request gets the same tokens, greedy and drawn; graphs served most steps."""
    with_graphs = core(True)
    prefill = with_graphs.executor.stepper._graphs.prefill  # type: ignore[union-attr]
    assert prefill is not None
    used: list[tuple[PrefillGraph, int]] = []
    run = prefill.run
    prefill.run = lambda tokens, rows, size: used.append((size, len(rows))) or run(tokens, rows, size)  # type: ignore
    assert serve(with_graphs) == serve(core(False))
    assert {size for size, _ in used} == set(SIZES)
    assert {num for _, num in used} >= {1, 3, 5}


def test_padding_writes_nothing(core: Callable[[bool], EngineCore]) -> None:
    """Keys, values and device rows of others are as before a step that pads."""
    engine = core(True)
    pool, state = engine.executor.runner.pool, engine.executor.runner.state
    before = pool.layer(0).clone(), state.next_ids.clone(), state.seq_lens.clone()
    assert engine.executor.stepper._graphs is not None
    prefill = engine.executor.stepper._graphs.prefill
    assert prefill is not None
    with torch.inference_mode():
        prefill.run(NO_TOKENS, no_ints(), SIZES[3])
    after = pool.layer(0), state.next_ids, state.seq_lens
    for old, new in zip(before, after, strict=True):
        assert np.array_equal(old.numpy(), new.numpy())


@pytest.mark.parametrize(
    "at",
    [pytest.param(3, marks=pytest.mark.full), 39, pytest.param(41, marks=pytest.mark.full), 60],
    ids=["first chunk", "its end", "second chunk", "last token"],
)
def test_a_token_that_is_not_finite_ends_its_request_under_graphs(core: Callable[[bool], EngineCore], at: int) -> None:
    """Of a chunk that samples or not, beside another prompt: that request alone ends."""
    engine = core(True)
    model, once = engine.executor.runner.model, [True]
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
    params = SamplerParams(max_tokens=3, temperature=0, ignore_eos=True)
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
