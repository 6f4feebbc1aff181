"""Steps that fail: out of memory, or a plugin that raises. Nobody loses a token, and only who fails alone ends."""

from __future__ import annotations

import itertools
import logging
import math
import random
from collections.abc import Callable, Sequence
from functools import cache
from pathlib import Path
from pkgutil import resolve_name
from typing import Any

import msgspec
import numpy as np
import pytest
import torch
from torch import Tensor

from dovetail.demo import MODEL_DIR
from dovetail.engine.core import EngineCore
from dovetail.engine.request import StepPlan
from dovetail.executor.local import step_error
from dovetail.grammar.matching.constraint import Constraint
from dovetail.messages import OUT_OF_MEMORY, Finish, GrammarOption, SamplerParams, Submit
from dovetail.messages.step import StepInput
from dovetail_testing.engine import make_core
from dovetail_testing.models import make_model

BOTH = pytest.mark.parametrize("overlap", [False, True], ids=["in turn", "overlapped"])
OVERLAPPED = pytest.mark.parametrize(
    "overlap", [pytest.param(False, marks=pytest.mark.full), True], ids=["in turn", "overlapped"]
)
"""Both in `make test-all`."""
MARK = 177


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny model."""
    return make_model(tmp_path_factory.mktemp("model"), "Qwen3ForCausalLM", num_hidden_layers=2, head_dim=16)


def out_of_memory() -> Exception:
    """What CUDA's allocator raises."""
    return torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.\nmore lines")


def cpu_out_of_memory() -> Exception:
    """What the CPU's allocator raises."""
    return RuntimeError("[enforce fail at alloc_cpu.cpp:124] . DefaultCPUAllocator: can't allocate memory")


def a_bug() -> Exception:
    """What a plugin may raise."""
    return KeyError("a bug of a plugin")


class Failing:
    """Makes a call of an engine's step raise while `when` says so.

    Attributes:
        num: How often it has.
    """

    def __init__(self, owner: Any, name: str, error: Callable[[], Exception], when: Callable[..., bool]) -> None:
        self.num = 0
        call = getattr(owner, name)

        def failing(*args: Any, **kwargs: Any) -> Any:
            if when(*args, **kwargs):
                self.num += 1
                raise error()
            return call(*args, **kwargs)

        setattr(owner, name, failing)


def calls(*numbers: int) -> Callable[..., bool]:
    """True at these calls, from 1."""
    count = 0

    def when(*args: Any, **kwargs: Any) -> bool:
        nonlocal count
        count += 1
        return count in numbers

    return when


def start(model: Path, overlap: bool, **changes: Any) -> EngineCore:
    """A small engine."""
    small = {"page_size": 4, "chunked_prefill_size": 64, "max_total_tokens": 2000, "max_running_requests": 12}
    return make_core(model, overlap_on_cpu=overlap, disable_overlap_schedule=not overlap, **{**small, **changes})


def serve(core: EngineCore, loads: Sequence[tuple[list[int], SamplerParams]], **more: Any) -> Any:
    """Run all requests, some steps apart; returns tokens and ends."""
    tokens: dict[int, list[int]] = {i: [] for i in range(len(loads))}
    finishes: dict[int, Finish | None] = {}
    left = list(enumerate(loads))
    for step in itertools.count():  # a grammar takes its time: pytest-timeout ends what never ends
        if left and step % 2 == 0:
            handle, (prompt, params) = left.pop(0)
            core.handle(Submit(rid="", handle=handle, prompt_ids=prompt, params=params, **more))
        if not left and not core.has_work:
            break
        for delta in core.step().deltas:
            tokens[delta.handle] += delta.ids
            if delta.finish is not None:
                assert delta.handle not in finishes
                finishes[delta.handle] = delta.finish
        assert core.pages.check_counts(core.scheduler.running)
        assert core.pages.check_ownership(core.scheduler.running)
    assert not core.has_work
    assert core.pages.num_used == 0
    assert core.pages.check_ownership([])
    assert len(core.rows.free) == 12
    return tokens, finishes


def mixed(num: int = 9) -> list[tuple[list[int], SamplerParams]]:
    """Greedy, seeded and penalized requests, some behind one prefix."""
    rng = random.Random(3)
    shared = [rng.randrange(170) for _ in range(21)]
    found = []
    for i in range(num):
        prompt = shared * (i % 2) + [rng.randrange(170) for _ in range(rng.randrange(3, 90))]
        params = SamplerParams(
            max_tokens=14, temperature=(i % 3) / 2, seed=i, ignore_eos=True,
            frequency_penalty=0.8 * (i % 4 == 1), logprobs=1 if i % 5 == 0 else None,
        )  # fmt: skip
        found.append((prompt, params))
    return found


@cache
def undisturbed(model: Path) -> Any:
    """What `mixed` requests get where nothing fails."""
    return serve(start(model, False), mixed())


def places(core: EngineCore) -> dict[str, tuple[Any, str]]:
    """Where a step can fail."""
    model = core.executor.runner.model
    return {
        "launch": (core.executor.stepper, "launch"),
        "forward": (model, "forward"),
        "middle of forward": (core.executor.runner.attention, "forward_extend"),
        "lm_head": (model.lm_head, "forward"),
        "sampling": (core.executor.stepper, "_sample"),
        "read": (core.executor.stepper, "read"),
    }


@pytest.mark.first(4)
@pytest.mark.sampled
@BOTH
@pytest.mark.parametrize(
    ("place", "error"),
    [
        ("launch", out_of_memory),
        ("forward", a_bug),
        ("middle of forward", out_of_memory),
        ("lm_head", cpu_out_of_memory),
        ("sampling", out_of_memory),
        ("sampling", a_bug),
        ("read", out_of_memory),
    ],
)
def test_a_step_that_fails_now_and_then_costs_nobody_a_token(
    model: Path, overlap: bool, place: str, error: Callable[[], Exception]
) -> None:
    """Wherever it fails, every request gets the tokens of an undisturbed run."""
    want = undisturbed(model)
    core = start(model, overlap)
    owner, name = places(core)[place]
    failing = Failing(owner, name, error, calls(3, 9, 10, 14))
    found = serve(core, mixed())
    assert failing.num == 4
    assert found == want


@OVERLAPPED
def test_chunks_shrink_until_the_step_fits(model: Path, overlap: bool, caplog: pytest.LogCaptureFixture) -> None:
    """Steps of more than 10 tokens do not fit: prompts go on in smaller chunks, all are served, and it is said."""
    want = undisturbed(model)
    core = start(model, overlap)
    too_large = Failing(core.executor.runner.model, "forward", out_of_memory, lambda ids, batch: len(ids) > 10)
    with caplog.at_level(logging.WARNING, "dovetail"):
        found = serve(core, mixed())
    assert found == want
    assert 1 < too_large.num < 40
    assert "Out of memory in a step of" in caplog.text


@OVERLAPPED
def test_fewer_requests_take_part_where_small_chunks_do_not_help(model: Path, overlap: bool) -> None:
    """Steps of more than two requests do not fit: all are served, two at a time."""
    want = undisturbed(model)
    core = start(model, overlap)
    Failing(core.executor.runner.model, "forward", out_of_memory, lambda ids, batch: batch.num_requests > 2)
    assert serve(core, mixed()) == want


@OVERLAPPED
def test_larger_steps_come_back(model: Path, overlap: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """After a lack of memory that has passed, the limits grow to what was asked for."""
    monkeypatch.setattr("dovetail.engine.recovery.PATIENCE", 2)
    core = start(model, overlap)
    asked, seen = core.scheduler.limits, []
    schedule = core.scheduler.schedule
    monkeypatch.setattr(core.scheduler, "schedule", lambda: (seen.append(core.scheduler.limits), schedule())[1])
    Failing(core.executor.stepper, "launch", out_of_memory, calls(2, 3, 4))
    serve(core, mixed(20))
    assert min(limits.max_prefill_tokens for limits in seen) == asked.max_prefill_tokens // 4
    assert core.scheduler.limits == asked


@OVERLAPPED
def test_a_request_that_fits_in_no_step_ends_alone(model: Path, overlap: bool) -> None:
    """It gets the code of a lack of memory; everybody else gets all tokens."""
    loads = mixed()
    want, _ = undisturbed(model)
    loads[4] = ([*loads[4][0], MARK], loads[4][1])
    core = start(model, overlap)
    Failing(core.executor.runner.model, "forward", out_of_memory, lambda ids, batch: bool((ids == MARK).any()))
    tokens, finishes = serve(core, loads)
    assert (finishes[4].reason, finishes[4].code) == ("abort", OUT_OF_MEMORY)
    assert "again later" in finishes[4].message
    assert {i: t for i, t in tokens.items() if i != 4} == {i: t for i, t in want.items() if i != 4}


@pytest.mark.sampled
@BOTH
@pytest.mark.parametrize("culprits", [[4], [0, 1], [2, 7, 8]], ids=str)
def test_who_makes_a_plugin_raise_ends_alone(model: Path, overlap: bool, culprits: list[int]) -> None:
    """The requests that make every step fail are found and ended with the reason; the others get all tokens."""
    loads = mixed()
    want, _ = undisturbed(model)
    for i in culprits:
        loads[i] = ([*loads[i][0], MARK], loads[i][1])
    core = start(model, overlap)
    failing = Failing(core.executor.runner.model, "forward", a_bug, lambda ids, batch: bool((ids == MARK).any()))
    tokens, finishes = serve(core, loads)
    for i in range(len(loads)):
        if i in culprits:
            assert finishes[i].reason == "abort"
            assert "a bug of a plugin" in finishes[i].message
        else:
            assert tokens[i] == want[i]
    assert failing.num <= 8 * len(culprits)


def test_a_plugin_that_always_raises_ends_every_request_and_not_the_engine(model: Path) -> None:
    """Each ends once, in a bounded number of steps; then the engine serves again."""
    core = start(model, True)
    broken = True
    failing = Failing(core.executor.runner.model, "forward", a_bug, lambda ids, batch: broken)
    _, finishes = serve(core, mixed())
    assert {finish.reason for finish in finishes.values()} == {"abort"}
    assert failing.num <= 3 * 9
    broken = False
    assert serve(core, mixed()) == undisturbed(model)


@OVERLAPPED
def test_a_grammar_that_raises_when_it_fills_its_mask_ends_its_request(overlap: bool) -> None:
    """Sampling waits for masks in a step of its own right; the neighbours, constrained and not, go on."""
    steps = (GrammarOption(backend="llguidance", kind="regex", source="[a-z ]{20,40}"),)
    params = SamplerParams(max_tokens=12, temperature=0)
    loads = [([5 + i, 7, 9], params) for i in range(4)]
    core = start(MODEL_DIR, overlap, grammar_backend="llguidance", dtype="float32")
    bad: list[Constraint] = []
    fill = Constraint.fill

    def failing(self: Constraint, *args: Any, **kwargs: Any) -> Any:
        if not bad and core.step_count > 3:
            bad.append(self)
        if self in bad:
            raise RuntimeError("a bug of a grammar")
        return fill(self, *args, **kwargs)

    want, _ = serve(start(MODEL_DIR, overlap, grammar_backend="llguidance", dtype="float32"), loads, grammar=steps)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Constraint, "fill", failing)
        tokens, finishes = serve(core, loads, grammar=steps)
    ended = [i for i, finish in finishes.items() if finish.reason == "abort"]
    assert len(ended) == 1
    assert "a bug of a grammar" in finishes[ended[0]].message
    assert {i: t for i, t in tokens.items() if i not in ended} == {i: t for i, t in want.items() if i not in ended}


@pytest.mark.sampled
@BOTH
@pytest.mark.parametrize("method", ["accept", "forced"])
def test_a_grammar_that_raises_for_a_token_ends_its_request(
    overlap: bool, method: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """So does one that cannot follow what was sampled."""
    steps = (GrammarOption(backend="llguidance", kind="regex", source="The answer is [0-9]{9}[a-z ]{20,40}"),)
    params = SamplerParams(max_tokens=12, temperature=0)
    core = start(MODEL_DIR, overlap, grammar_backend="llguidance", dtype="float32")
    real, bad = getattr(Constraint, method), []

    def failing(self: Constraint, *args: Any) -> Any:
        if not bad and core.step_count > 0:
            bad.append(self)
        if self in bad:
            raise RuntimeError("a bug of a grammar")
        return real(self, *args)

    monkeypatch.setattr(Constraint, method, failing)
    _, finishes = serve(core, [([5 + i, 7, 9], params) for i in range(4)], grammar=steps)
    ended = [finish for finish in finishes.values() if finish.reason == "abort"]
    assert ["a bug of a grammar" in finish.message for finish in ended] == [True]


@pytest.mark.usefixtures("cuda_taken")
def test_a_lost_device_is_fatal(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where the device cannot even be waited for, the error is passed on: no step could be computed."""

    def lost(device: object) -> None:
        raise RuntimeError("CUDA error: an illegal memory access was encountered")

    monkeypatch.setattr(torch.cuda, "synchronize", lost)
    error = RuntimeError("CUDA error: an illegal memory access was encountered")
    with pytest.raises(RuntimeError, match="illegal memory access") as raised:
        step_error(error, torch.device("cuda"))
    assert raised.value is error


def test_only_what_allocators_raise_is_a_lack_of_memory() -> None:
    """Another error of torch has the same class; who is told of memory would make the batch smaller for nothing."""
    cpu = torch.device("cpu")
    assert [step_error(error, cpu).is_memory for error in (cpu_out_of_memory(), MemoryError())] == [True, True]
    assert [step_error(error, cpu).is_memory for error in (RuntimeError("shapes differ"), a_bug())] == [False, False]


def test_a_fault_and_a_lack_of_memory_at_once(model: Path) -> None:
    """A step goes wrong while the next one fails: one request ends, the others are as in a clean run."""
    loads = mixed()
    want, _ = undisturbed(model)
    core = start(model, True)
    forward, spoilt, failed = core.executor.runner.model.forward, 0, 0

    def both(ids: Tensor, batch: Any) -> Tensor:
        nonlocal spoilt, failed
        if spoilt == 1 and not failed:
            failed = 1
            raise out_of_memory()
        hidden: Tensor = forward(ids, batch)
        if not spoilt and batch.num_decode > 2:
            spoilt, hidden[0] = 1, float("nan")
        return hidden

    core.executor.runner.model.forward = both
    tokens, finishes = serve(core, loads)
    assert (spoilt, failed) == (1, 1)
    ended = [i for i, finish in finishes.items() if finish.reason == "abort"]
    assert len(ended) == 1
    assert {i: t for i, t in tokens.items() if i not in ended} == {i: t for i, t in want.items() if i not in ended}


def test_plans_say_what_they_write(model: Path) -> None:
    """A plan's writes are its requests, with the place from which each writes."""
    core = start(model, False)
    core.handle(Submit(rid="", handle=1, prompt_ids=[1] * 9, params=SamplerParams(max_tokens=3, ignore_eos=True)))
    plans: list[StepPlan] = []
    launched = core.scheduler.launched
    core.scheduler.launched = lambda plan: (plans.append(plan), launched(plan))[1]  # type: ignore[method-assign]
    while core.has_work:
        core.step()
    assert [(plan.number, [start for _, _, start in plan.writes]) for plan in plans] == [(1, [0]), (2, [9]), (3, [10])]


WRITES = {
    "row changes": ("", "_write_changes"),  # of the state, which has bound it
    "row changes on their way": ("dovetail.runtime.device.device_state", "to_device"),
    "stop ids": ("dovetail.runtime.device.device_state.RowParams", "_set_stop_ids"),
    "biases": ("dovetail.runtime.device.device_state.RowParams", "_set_bias"),
    "counts": ("dovetail.runtime.device.penalties", "upload"),
    "inputs": ("dovetail.runtime.graphs.batch", "to_device"),
    "next tokens": ("dovetail.runtime.device.device_state.DeviceState", "set_next"),
}
"""What a step writes to the device beside the model."""


def demanding() -> list[tuple[list[int], SamplerParams]]:
    """`mixed`, and among them requests with banned stop ids, and with biases."""
    more: list[dict[str, Any]] = [{}, {"min_tokens": 6, "stop_token_ids": (5, 9)}, {"logit_bias": {3: 2.0, 7: -1.5}}]
    return [(ids, msgspec.structs.replace(params, **more[i % 3])) for i, (ids, params) in enumerate(mixed())]


@cache
def served_whole(model: Path) -> Any:
    """What `demanding` requests get where nothing fails."""
    return serve(start(model, False), demanding())


@OVERLAPPED
@pytest.mark.parametrize("write", WRITES)
@pytest.mark.parametrize("number", [1, pytest.param(3, marks=pytest.mark.full)])
def test_a_write_that_fails_once_leaves_nothing_behind(
    model: Path, overlap: bool, write: str, number: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The step after it is as any other: everybody gets the tokens of an undisturbed run."""
    want = served_whole(model)
    core = start(model, overlap)
    where, name = WRITES[write]
    runner: Any = core.executor.runner  # type: ignore[attr-defined]
    path = where.replace(".RowParams", ":RowParams").replace(".DeviceState", ":DeviceState")
    owner = resolve_name(path) if path else runner.state
    inner, fails = getattr(owner, name), calls(number)
    seen: list[bool] = []

    def failing(*args: Any, **kwargs: Any) -> Any:
        seen.append(fails())
        if seen[-1]:
            raise out_of_memory()
        return inner(*args, **kwargs)

    monkeypatch.setattr(owner, name, failing)
    assert serve(core, demanding()) == want
    assert any(seen)
    counts = core.executor.stepper._counts  # type: ignore[attr-defined]
    assert sorted(counts._free) == list(range(len(counts.said)))


def test_pages_that_could_not_be_zeroed_are_with_the_next_step(model: Path) -> None:
    """Whoever reads them next reads zeros, although the step that was to zero them failed."""
    runner: Any = start(model, False).executor.runner  # type: ignore[attr-defined]
    stepper, pool = runner.stepper, runner.pool
    memory = pool.pools[0]._memory["kv"]
    memory[:, 3:5].fill_(math.nan)
    Failing(pool, "zero_pages", out_of_memory, calls(1))
    with pytest.raises(torch.OutOfMemoryError):
        stepper.take(StepInput(step=0, zeroed=np.array([[0, 0], [3, 4]], dtype=np.int32)))
    stepper.take(StepInput(step=0))
    assert not memory.any()
