"""The warm-up covers what real eager steps need, and leaves nothing behind. On a GPU: `tests/gpu/test_warm_up.py`."""

from __future__ import annotations

import inspect
import logging
import random
import sys
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock

import pytest
import torch

from dovetail.checkpoint.tokenizer_files import TokenizerFiles
from dovetail.engine.core import EngineCore
from dovetail.executor.local import LocalExecutor
from dovetail.messages import SamplerParams, Submit
from dovetail.messages.step import DecodeGraph, StepInput
from dovetail.plugins import load
from dovetail.runtime import warm_up
from dovetail.runtime.device_memory import DeviceMemory
from dovetail.runtime.graphs.capture_queue import CaptureQueue
from dovetail.runtime.graphs.decode import DecodeGraphs
from dovetail.runtime.kernels.repeats import Repeats
from dovetail.runtime.sampling.masks import MaskBuffer
from dovetail.runtime.start import load as load_phase
from dovetail.runtime.start.capture import limits_of
from dovetail.runtime.step import InFlightStep
from dovetail.runtime.warm_up import EagerWarmUp, StepShape, WarmUpLimits, shapes
from dovetail.text.tokenizer.ends import end_ids
from dovetail_backends.kernels.triton import draw, products, skinny, step
from dovetail_backends.triton import TritonBackend
from dovetail_backends.triton.extend import extend
from dovetail_testing.engine import make_core, make_plans
from dovetail_testing.models import make_model

SETTINGS: dict[str, Any] = {"chunked_prefill_size": 96, "max_running_requests": 7, "random_seed": 3}
LIMITS = WarmUpLimits(max_requests=7, max_prefill_tokens=96, context_len=512, graph_rows=0)
PARAMS = [
    SamplerParams(max_tokens=12, temperature=0.0, ignore_eos=True, logprobs=2),
    SamplerParams(max_tokens=12, temperature=1.2, top_p=0.9, ignore_eos=True, frequency_penalty=0.5),
    SamplerParams(max_tokens=12, temperature=0.9, top_k=30, ignore_eos=True, seed=5),
]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny random model."""
    return make_model(tmp_path_factory.mktemp("model"), "Qwen3ForCausalLM")


def make_warm_up(core: EngineCore, limits: WarmUpLimits = LIMITS) -> EagerWarmUp:
    """The warm-up of a CPU engine, which makes none by itself."""
    runner = core.executor.runner
    return EagerWarmUp(core.executor.stepper, runner.state, runner.pool, runner.config.vocab_size, limits)


def idle_engine(folder: Path) -> EngineCore:
    """An engine whose executor has the warm-up for its only chore, as on CUDA."""
    settings, plan = make_plans(folder, **SETTINGS)
    plugins = load(plan, "engine")
    executor = LocalExecutor(settings, plugins)
    runner = executor.runner
    runner._trials = EagerWarmUp(runner.stepper, runner.state, runner.pool, runner.config.vocab_size, LIMITS)
    runner.capture_queue = CaptureQueue([runner._trials])
    return EngineCore(settings, plugins, executor, eos_ids=end_ids(TokenizerFiles.read(folder, folder)))


def submit(core: EngineCore, num: int = 6) -> None:
    """Prompts of several lengths, some of more than one chunk."""
    for i in range(num):
        ids = [(13 * i + 7 * j) % 190 for j in range(5 + 31 * i)]
        core.handle(Submit(rid="", handle=i, prompt_ids=ids, params=PARAMS[i % 3]))


def finish(core: EngineCore) -> dict[int, list[Any]]:
    """Step until nothing is left; tokens and log probabilities by request."""
    found: dict[int, list[Any]] = defaultdict(list)
    while core.has_work:
        for delta in core.step().deltas:
            found[delta.handle] += [delta.ids, delta.logprobs]
    return found


def snapshot(core: EngineCore) -> list[torch.Tensor]:
    """All that the device knows of requests: the pool, the rows, and the counts of tokens."""
    runner, counts = core.executor.runner, core.executor.stepper._counts
    layers = [runner.pool.layer(i).clone() for i in range(runner.config.num_layers)]
    rows = [t.clone() for t in (runner.state.page_table, runner.state.next_ids, runner.state.seq_lens)]
    return [*layers, *rows, counts.said.clone(), counts.read.clone()]


@pytest.mark.parametrize(
    "limits",
    [
        LIMITS,
        WarmUpLimits(max_requests=1, max_prefill_tokens=3, context_len=2, graph_rows=0),
        WarmUpLimits(max_requests=256, max_prefill_tokens=8192, context_len=32768, graph_rows=256),
        WarmUpLimits(max_requests=1000, max_prefill_tokens=300, context_len=100, graph_rows=256),
    ],
    ids=str,
)
def test_no_step_is_larger_than_a_real_one(limits: WarmUpLimits) -> None:
    """Rows, tokens and context stay within the limits; no step is empty or there twice."""
    found = shapes(limits)
    assert len(set(found)) == len(found)
    for shape in found:
        assert shape.num_decode + shape.num_chunks <= limits.max_requests
        assert shape.num_chunks * shape.num_new <= limits.max_prefill_tokens
        assert shape.prefix_len + shape.num_new <= limits.context_len
        assert shape.num_tokens > 0
        assert (shape.num_chunks == 0) == (shape.num_new == 0)
    most = min(warm_up.LONG, limits.max_prefill_tokens, limits.context_len)
    assert any(shape.num_new == most for shape in found)
    assert any(shape.num_decode == limits.max_requests for shape in found) == (limits.max_requests > limits.graph_rows)


@pytest.mark.parametrize("most", [1, 900, 8192])
def test_no_class_of_token_counts_is_left_out(most: int) -> None:
    """Whatever the bounds of a kernel's classes are: each of them, up to twice the one before, has a step."""
    limits = WarmUpLimits(max_requests=8, max_prefill_tokens=most, context_len=40_000, graph_rows=8)
    totals = {shape.num_chunks * shape.num_new for shape in shapes(limits)}
    for bound in range(1, most // 2 + 1):
        assert any(bound < total <= 2 * bound for total in totals)


def test_the_engines_own_limits_bound_the_list(folder: Path) -> None:
    """On CUDA the runner takes rows, chunk and context from the memory plan, without counting the rows' own tokens."""
    core = make_core(folder, **SETTINGS)
    runner = core.executor.runner
    plan = DeviceMemory(core.settings, runner.config, runner.device, runner.dtype).plan
    checked: Any = SimpleNamespace(config=runner.config, quantization=runner.quantization)
    assert limits_of(checked, plan, 0) == replace(LIMITS, tiles_by_tokens=False)  # no experts, and plain weights
    assert limits_of(checked, plan, 4).graph_rows == 4
    assert runner._trials is None  # on a CPU


def test_all_but_the_first_steps_leave_out_what_repeats(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Layers like earlier ones are gone through in the first steps only; the others in all."""
    core = make_core(make_model(tmp_path, "Qwen3ForCausalLM", num_hidden_layers=5), **SETTINGS)
    runner = core.executor.runner
    layers: Any = runner.model.layers  # type: ignore[attr-defined]
    calls = [0] * len(layers)

    def count(i: int, forward: Any) -> Any:
        def counted(*args: Any, **kwargs: Any) -> Any:
            calls[i] += 1
            return forward(*args, **kwargs)

        return counted

    repeats = Repeats(runner.model)
    for i, layer in enumerate(layers):
        monkeypatch.setattr(layer, "forward", count(i, layer.forward))
    made = EagerWarmUp(core.executor.stepper, runner.state, runner.pool, runner.config.vocab_size, LIMITS, repeats)
    num = made.num_left
    while made.num_left:
        made.run_next()
    assert calls == [num, num, *[warm_up.NUM_WHOLE] * 3]


def test_every_step_runs_once_and_chores_end(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As chores of an idle engine, each shape of the list is computed exactly once, as planned."""
    assert not make_core(folder, **SETTINGS).has_idle_tasks
    core = idle_engine(folder)
    seen: list[StepShape] = []
    run = core.executor.stepper.run_eagerly

    def noting(step: StepInput) -> InFlightStep:
        starts, lengths = step.start[step.num_decode :].tolist(), step.num_new[step.num_decode :].tolist()
        assert len({*zip(starts, lengths, strict=True)}) <= 1
        prefix, length = (starts[0], lengths[0]) if starts else (0, 0)
        seen.append(StepShape(step.num_decode, len(starts), length, prefix))
        return run(step)

    monkeypatch.setattr(core.executor.stepper, "run_eagerly", noting)
    for _ in shapes(LIMITS):
        assert core.has_idle_tasks
        core.run_idle_task()
    assert not core.has_idle_tasks
    assert seen == shapes(LIMITS)


def test_a_start_runs_steps_while_that_is_quick(folder: Path) -> None:
    """Without time nothing is run before the engine is ready, with time everything."""
    core = make_core(folder, **SETTINGS)
    chores = CaptureQueue([make_warm_up(core)])
    chores.do_some(-1.0)
    assert chores.num_left == len(shapes(LIMITS))
    chores.do_some(1e9)
    assert chores.is_complete


def test_what_follows_is_the_same_as_without(folder: Path) -> None:
    """Tokens and log probabilities of requests after a whole warm-up equal those of an engine without one."""
    cold, warm = make_core(folder, **SETTINGS), make_core(folder, **SETTINGS)
    made = make_warm_up(warm)
    while made.num_left:
        made.run_next()
    for core in (cold, warm):
        submit(core)
    found = finish(warm)
    assert len(found) == 6
    assert found == finish(cold)


def test_requests_under_way_are_not_touched(folder: Path) -> None:
    """Between two steps of running requests, nothing of theirs changes in pool, rows or counts, nor what they say."""
    cold, warm = make_core(folder, **SETTINGS), make_core(folder, **SETTINGS)
    for core in (cold, warm):
        submit(core)
        for _ in range(6):
            core.step()
    assert warm.scheduler.running
    assert warm.executor.runner.pool.layer(0)[1:].count_nonzero()
    before = snapshot(warm)
    made = make_warm_up(warm)
    while made.num_left:
        made.run_next()
    assert all(torch.equal(a, b) for a, b in zip(before, snapshot(warm), strict=True))
    assert finish(warm) == finish(cold)
    assert warm.pages.num_used == cold.pages.num_used


def test_a_lack_of_memory_is_told_and_survived(
    folder: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """A step without memory is left out with the larger ones; half as many tokens are the bound, and tried at once."""
    core = make_core(folder, **SETTINGS)
    made, run, most = make_warm_up(core), core.executor.stepper.run_eagerly, 60
    sizes: list[int] = []

    def failing(step: StepInput) -> InFlightStep:
        launched = run(step)
        sizes.append(int(step.num_new.sum()))
        if sizes[-1] > most:
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 1 GiB.\nDetails")
        return launched

    monkeypatch.setattr(core.executor.stepper, "run_eagerly", failing)
    with caplog.at_level(logging.WARNING, "dovetail"):
        while made.num_left:
            made.run_next()
    failed = [size for size in sizes if size > most]
    warnings = [record for record in caplog.records if record.levelno == logging.WARNING]
    assert failed == sorted(failed, reverse=True)
    assert len(failed) == len(warnings) < len([s for s in shapes(LIMITS) if s.num_tokens > most])
    assert "--chunked-prefill-size" in caplog.text
    assert made.max_prefill_tokens <= most
    bounded = replace(LIMITS, max_prefill_tokens=made.max_prefill_tokens)
    assert sizes[sizes.index(failed[-1]) + 1] == min(failed[-1] // 2, made.max_prefill_tokens)
    small = {shape.num_tokens for shape in shapes(LIMITS) if shape == shape.within(bounded)}
    assert small <= set(sizes)
    assert not core.executor.runner.pool.layer(0)[0].count_nonzero()
    assert core.executor.runner.state.seq_lens[-1] == core.executor.runner.state.next_ids[-1] == 0


def test_an_engine_keeps_to_the_chunk_that_fitted(
    folder: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Real steps have at most as many prompt tokens as a trial step did, for good, and the start says so."""
    core = idle_engine(folder)
    run = core.executor.stepper.run_eagerly

    def failing(step: StepInput) -> InFlightStep:
        if step.ids.size > 40:
            raise torch.OutOfMemoryError("CUDA out of memory")
        return run(step)

    monkeypatch.setattr(core.executor.stepper, "run_eagerly", failing)
    while core.has_idle_tasks:
        core.run_idle_task()
    assert 16 < core.scheduler.limits.max_prefill_tokens <= 40
    submit(core)
    assert len(finish(core)) == 6
    assert core.scheduler.limits.max_prefill_tokens == core.executor.runner.max_prefill_tokens
    memory = DeviceMemory(
        core.settings, core.executor.runner.config, core.executor.runner.device, core.executor.runner.dtype
    )
    with caplog.at_level(logging.WARNING, "dovetail"):
        memory.started(40)
    assert "Steps have at most 40 prompt tokens, not 96" in caplog.text


def test_a_chore_without_memory_is_given_up(caplog: pytest.LogCaptureFixture) -> None:
    """An engine whose idle moment has no memory for a graph goes on without it; other chores are done."""
    poor, other = Mock(num_left=3), Mock(num_left=1)
    poor.run_next.side_effect = torch.OutOfMemoryError("CUDA out of memory\nDetails")
    other.run_next.side_effect = lambda: setattr(other, "num_left", 0)
    chores = CaptureQueue([poor, other])
    for _ in range(3):
        chores.do_next()
    assert chores.is_complete
    assert (poor.run_next.call_count, other.run_next.call_count) == (1, 1)
    assert "Out of memory while preparing" in caplog.text


def test_any_other_failure_is_passed_on(
    folder: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """What a backend raises is raised, with the step named, and nothing is left in the null page or the spare row."""
    core = make_core(folder, **SETTINGS)

    def raising(*arguments: Any) -> None:
        raise RuntimeError("a kernel is broken")

    monkeypatch.setattr(core.executor.runner.attention, "forward_extend", raising)
    with pytest.raises(RuntimeError, match="a kernel is broken"):
        make_warm_up(core).run_next()
    assert str(shapes(LIMITS)[0]) in caplog.text
    assert not core.executor.runner.pool.layer(0)[0].count_nonzero()
    assert core.executor.runner.state.seq_lens[-1] == 0


def test_masks_are_warmed_up_like_a_grammars() -> None:
    """One call as for one constrained row; the buffer is as before."""
    calls: list[tuple[torch.Tensor, ...]] = []
    masks = MaskBuffer(7, torch.device("cpu"), kernel=lambda *tensors: calls.append(tensors))
    masks.warm_up(199)
    [(logits, words, rows)] = calls
    assert (logits.shape, logits.dtype) == ((1, 199), torch.float32)
    assert (words.shape, words.dtype) == ((1, 7), torch.int32)
    assert rows.tolist() == [0]
    assert not masks._words.any()


def test_graphs_and_steps_take_turns(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """While both are left, a chore is a step, the next one a capture; then what is left."""
    core = make_core(folder, **SETTINGS)
    made = make_warm_up(core)
    graphs: Any = DecodeGraphs(None, Mock(prefix_group=0), None, 16, 7, None, None)  # type: ignore[arg-type]
    graphs._captured, done = {DecodeGraph(1): None}, []
    monkeypatch.setattr(graphs, "_capture", lambda key: graphs._captured.setdefault(key, done.append(key.rows)))
    monkeypatch.setattr(
        core.executor.stepper, "run_eagerly", lambda step: done.append("step") or InFlightStep(step, [])
    )
    chores = CaptureQueue([made, graphs])
    while not chores.is_complete:
        chores.do_next()
    assert done[:5] == ["step", 2, "step", 4, "step"]
    assert done[5:] == ["step"] * (len(shapes(LIMITS)) - 3)
    assert CaptureQueue([]).is_complete


Key = tuple[Any, ...]


class Launches:
    """Notes which variants of kernels are launched, as Triton tells them apart, and runs none of them."""

    def __init__(self) -> None:
        self.keys: set[Key] = set()

    def run(self, kernel: Any, *args: Any, grid: Any, warmup: bool, **kwargs: Any) -> None:
        """In place of `InterpretedFunction.run`; what the kernel would write is zero."""
        parameters = list(inspect.signature(kernel.fn).parameters.values())
        given = {p.name: value for p, value in zip(parameters, args, strict=False)}
        options = tuple(sorted(item for item in kwargs.items() if item[0] not in kernel.arg_names))
        values = {**given, **{name: value for name, value in kwargs.items() if name in kernel.arg_names}}
        parts = [_part(kernel, p, values[p.name]) for p in parameters]
        self.keys.add((kernel.fn.__name__, *parts, options))
        for name in ("out", "total", "cos", "sin"):
            if isinstance(values.get(name), torch.Tensor) and f"{name}s" not in values:
                values[name].zero_()

    def names(self) -> set[str]:
        """Kernels that were launched."""
        return {key[0] for key in self.keys}


def _part(kernel: Any, parameter: inspect.Parameter, value: Any) -> Any:
    """What of an argument decides on the variant: constants, dtypes, and of integers and addresses two facts."""
    if "constexpr" in str(parameter.annotation):
        return value
    if isinstance(value, torch.Tensor):
        loose = kernel.kwargs["do_not_specialize_on_alignment"] or ()
        return value.dtype, parameter.name in loose or value.data_ptr() % 16 == 0
    if isinstance(value, int):
        loose = kernel.kwargs["do_not_specialize"] or ()
        return None if parameter.name in loose else (value == 1, value % 16 == 0)
    return type(value)


@pytest.fixture
def launches(monkeypatch: pytest.MonkeyPatch) -> Iterator[Launches]:
    """The kernels of a CUDA engine on CPU: chosen and prepared as there, noted, not run."""
    interpreter = pytest.importorskip("triton.runtime.interpreter")
    noted = Launches()

    def run(kernel: Any, *args: Any, **kwargs: Any) -> None:
        noted.run(kernel, *args, **kwargs)

    def drawn(*operands: torch.Tensor) -> torch.Tensor:
        return draw.draw_rows(*operands, batch_invariant=False).zero_()

    caps = replace(TritonBackend.caps, devices=frozenset({"cpu"}))
    monkeypatch.setattr(TritonBackend, "caps", caps)
    monkeypatch.setattr("dovetail.plugins.plan._why_not", lambda record, device: None)
    monkeypatch.setattr(interpreter.InterpretedFunction, "run", run)
    monkeypatch.setattr(sys.modules[extend.__module__], "shared_bytes", lambda device: 227 << 10)
    for module in ("plain.linear", "embedding"):
        monkeypatch.setattr(f"dovetail.sdk.layers.{module}.is_repacked", lambda *place: False)
    plain = load_phase.bind_step
    monkeypatch.setattr(
        load_phase, "bind_step", lambda *a, **k: plain(*a, **k)._replace(draw=drawn, check_finite=step.check_finite)
    )
    every = dict.fromkeys(skinny.ROWS, (16, 64, 4, 3, 1))
    monkeypatch.setattr(products, "_tile", lambda x, w, tiles: skinny.tile_for(x.shape[0], w, {tuple(w.shape): every}))
    return noted


@pytest.mark.skipif(torch.cuda.is_available(), reason="kernels are compiled here; tests/gpu counts that")
@pytest.mark.parametrize(
    ("heads", "kv_heads", "dim"),
    [(14, 2, 64), *(pytest.param(*x, marks=pytest.mark.full) for x in ((4, 4, 16), (8, 8, 128), (16, 1, 96)))],
)
def test_real_steps_find_their_kernels_compiled(
    heads: int, kv_heads: int, dim: int, tmp_path: Path, launches: Launches
) -> None:
    """After the list, mixes of prompts and decode rows, random and chosen, launch no new variant of any kernel."""
    changes = {"num_hidden_layers": 1, "num_attention_heads": heads, "num_key_value_heads": kv_heads, "head_dim": dim}
    make_model(tmp_path, "Qwen3ForCausalLM", max_position_embeddings=4096, **changes)
    settings = {"chunked_prefill_size": 2500, "max_running_requests": 70, "max_total_tokens": 30_000}
    core = make_core(tmp_path, attention_backend="triton", kernels=["triton"], dtype="bfloat16", **settings)
    made = make_warm_up(core, WarmUpLimits(max_requests=70, max_prefill_tokens=2500, context_len=4096, graph_rows=0))
    while made.num_left:
        made.run_next()
    warmed, launches.keys = launches.keys, set()
    rng = random.Random(heads)
    for i in range(130):
        length = rng.choice([1, 2, 15, 16, 17, 60, 130, 500, 1100, 3000]) if i % 3 else rng.randrange(1, 64)
        params = SamplerParams(max_tokens=rng.randrange(1, 60), temperature=i % 2, top_k=i % 5, ignore_eos=True)
        core.handle(Submit(rid="", handle=i, prompt_ids=[rng.randrange(190) for _ in range(length)], params=params))
        for _ in range(rng.choice([0, 0, 0, 1, 4])):
            core.step()
    finish(core)
    for num_decode in (1, 16):
        lengths = [*[30] * num_decode, 2500, *[1] * 9]
        for i, length in enumerate(lengths):
            params = SamplerParams(max_tokens=40, temperature=0.0, ignore_eos=True)
            core.handle(Submit(rid="", handle=i, prompt_ids=[num_decode, *[i] * (length - 1)], params=params))
            core.step()
        finish(core)
    assert launches.keys <= warmed
    assert {
        "_extend_kernel",
        "_decode_kernel",
        "_gemv_kernel",
        "_skinny_kernel",
        "_add_rms_norm_kernel",
        "_rotations_kernel",
        "_sample_kernel",
        "_check_kernel",
    } <= launches.names()
