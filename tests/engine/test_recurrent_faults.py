"""Recurrent states where steps go wrong, are thrown away, or begun again: nobody goes on from what does not hold."""

from __future__ import annotations

import math
import random
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from example_models import Example, prompt, run
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from dovetail.contracts.attention import ForwardBatch
from dovetail.contracts.cache import CacheTensor, Recurrent
from dovetail.engine.core import EngineCore
from dovetail.engine.request import EngineRequest
from dovetail.messages import Finish, SamplerParams, Submit
from dovetail.runtime.memory.estimates import PIECE_BYTES, STATE_COPIES, fold_bytes

EXAMPLE = Example("recurrent", "RecurrentForCausalLM")
LONG = prompt(200, 3)
MARK = 195
BOTH = pytest.mark.parametrize("overlap", [False, True], ids=["in turn", "overlapped"])
OVERLAPPED = pytest.mark.parametrize(
    "overlap", [pytest.param(False, marks=pytest.mark.full), True], ids=["in turn", "overlapped"]
)
"""Both in `make test-all`."""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny random model."""
    made: Path = EXAMPLE.reference().write_checkpoint(tmp_path_factory.mktemp("recurrent"))
    return made


def start(folder: Path, overlap: bool, **changes: Any) -> EngineCore:
    """An engine whose steps are read after the next one is launched, or not."""
    return EXAMPLE.make_engine(folder, overlap_on_cpu=overlap, disable_overlap_schedule=not overlap, **changes)


class Faulty:
    """A model that goes wrong once, in the step that has the token `MARK`."""

    def __init__(self, core: EngineCore, *, raises: bool) -> None:
        runner: Any = core.executor.runner  # type: ignore[attr-defined]
        self.model, self.states, self.raises, self.left = runner.model, runner.pool.states[1], raises, 1
        self.lm_head = self.model.lm_head
        core.executor.stepper._model = self  # type: ignore[attr-defined]

    def forward(self, ids: Tensor, batch: ForwardBatch) -> Tensor:
        """Compute; then spoil the request's state and its copies, or fail with all states moved on."""
        hidden: Tensor = self.model.forward(ids, batch)
        found = (ids == MARK).nonzero()
        if not (self.left and len(found)):
            return hidden
        self.left -= 1
        token = int(found[0])
        hidden[token] = math.nan
        request = int((batch.q_starts[1:] <= token).sum())
        for layer in (0, 2):
            for name, own in self.states.rows(layer).items():
                own[batch.rows[request]] = math.nan
                for save in (save for save in batch.saves if save.request == request):
                    self.states._copies[name][self.states._slot[layer], save.copy] = math.nan
        if self.raises:
            raise RuntimeError("seeded")
        return hidden


def drive(core: EngineCore, prompts: list[list[int]], num_new: int) -> tuple[list[list[int]], list[Finish | None]]:
    """Send the prompts one a step; the tokens and the end of each."""
    tokens: dict[int, list[int]] = {n: [] for n in range(1, len(prompts) + 1)}
    ends: dict[int, Finish | None] = {}
    waiting = list(enumerate(prompts, 1))
    for _ in range(500):
        if not (waiting or core.has_work):
            break
        if waiting:
            handle, given = waiting.pop(0)
            params = SamplerParams(max_tokens=num_new, temperature=0.0, ignore_eos=True)
            core.handle(Submit(rid="", handle=handle, prompt_ids=given, params=params))
        for delta in core.step().deltas:
            tokens[delta.handle] += delta.ids
            ends[delta.handle] = delta.finish or ends.get(delta.handle)
        assert core.pages.check_counts(core.scheduler.running)
        assert core.pages.check_ownership(core.scheduler.running)
    assert not core.has_work
    assert core.pages.check_ownership([])
    return list(tokens.values()), [ends[n] for n in tokens]


def copies_are_finite(core: EngineCore) -> bool:
    """Whether no copy in the tree, nor a free one that the next step does not zero, is spoilt."""
    pool: Any = core.executor.runner.pool.states[1]  # type: ignore[attr-defined]
    zeroed = {page for group, page in core.rows.to_zero if group == 1}
    kept = [n for n in range(core.pages.allocators[1].num_pages + 1) if n not in zeroed]
    return all(bool(own[:, kept].isfinite().all()) for own in pool._copies.values())


@BOTH
def test_a_spoilt_state_ends_one_request(folder: Path, overlap: bool) -> None:
    """Followers that began with its copy, while nobody knew, give what they give without it."""
    marked = [*LONG[:40], MARK, *LONG[41:70]]
    prompts = [prompt(30, 9), marked, [*marked, 1, 2], [*marked[:66], 5]]
    clean = start(folder, overlap, chunked_prefill_size=256)
    want, _ = drive(clean, prompts, 12)
    core = start(folder, overlap, chunked_prefill_size=256)
    fault = Faulty(core, raises=False)
    found, ends = drive(core, prompts, 12)
    assert fault.left == 0
    assert ends[1] is not None
    assert "not finite" in (ends[1].message or "")
    assert found[1] == []
    assert [found[0], *found[2:]] == [want[0], *want[2:]]
    assert copies_are_finite(core)


@BOTH
def test_a_step_that_fails_is_computed_again_from_what_held(folder: Path, overlap: bool) -> None:
    """States had moved on when it failed: everybody in it begins with a copy, or with nothing."""
    prompts = [LONG[:50], prompt(30, 9), [*LONG[:41], MARK, *LONG[42:60]]]
    want, _ = drive(start(folder, overlap), prompts, 16)
    core = start(folder, overlap)
    fault = Faulty(core, raises=True)
    found, ends = drive(core, prompts, 16)
    assert fault.left == 0
    assert found == want
    assert {end.reason for end in ends if end} == {"length"}
    assert copies_are_finite(core)


@OVERLAPPED
def test_requests_that_lose_their_rows_go_on(folder: Path, overlap: bool) -> None:
    """Retracted at any place, several times: their tokens are what they would have been."""
    core, rng = start(folder, overlap, chunked_prefill_size=16), random.Random(5)
    prompts = [prompt(30 + n, n) for n in range(6)]
    step, retracted = core.step, [0]

    def jostled() -> Any:
        if core.scheduler.running and rng.random() < 0.2:
            core.scheduler.put_back(rng.choice(core.scheduler.running))
            retracted[0] += 1
        return step()

    core.step = jostled  # type: ignore[method-assign]
    found = run(core, prompts, 60)
    assert found == [EXAMPLE.right(folder, *pair) for pair in zip(prompts, found, strict=True)]
    assert retracted[0] > 10


@pytest.mark.parametrize("num", [8, 25, *(pytest.param(num, marks=pytest.mark.full) for num in (1, 7, 9))])
def test_a_request_goes_on_in_another_engine(num: int, folder: Path) -> None:
    """With the tokens that it has: as it would have."""
    [want] = run(EXAMPLE.make_engine(folder), [LONG[:33]], 40)
    core = EXAMPLE.make_engine(folder)
    params = SamplerParams(max_tokens=40, temperature=0.0, ignore_eos=True)
    core.handle(Submit(rid="", handle=1, prompt_ids=LONG[:33], params=params, output_ids=want[:num]))
    found = [token for _ in range(60) for delta in core.step().deltas for token in delta.ids]
    assert found == want[num:]


@OVERLAPPED
def test_forced_tokens_are_folded_in_once(folder: Path, overlap: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Tokens that a grammar forces come as a chunk behind what a step in flight has computed."""
    given = [LONG[:33], prompt(20, 7)]
    want = run(start(folder, overlap), given, 40)

    def forced(request: EngineRequest, num_running: int) -> list[int]:
        known = want[request.handle - 1]
        return known[request.num_output : request.num_output + 5] if request.num_output in (3, 14, 20) else []

    monkeypatch.setattr("dovetail.engine.replies.forced_tokens", forced)
    assert run(start(folder, overlap), given, 40) == want


@OVERLAPPED
def test_what_waits_for_its_grammar_is_folded_in_once(folder: Path, overlap: bool) -> None:
    """The last token of such a prompt waits: a state that has taken it in could not take it in again."""
    [want] = run(start(folder, overlap), [LONG[:41]], 10)
    core = start(folder, overlap)
    params = SamplerParams(max_tokens=10, temperature=0.0, ignore_eos=True)
    core.handle(Submit(rid="", handle=1, prompt_ids=LONG[:41], params=params))
    request = core.scheduler.find(1)
    assert request is not None
    request.waiting_for_grammar = True
    for _ in range(5):
        assert not [delta for delta in core.step().deltas if delta.ids]
    assert request.computed_len == 40
    request.waiting_for_grammar = False
    assert [token for _ in range(20) for delta in core.step().deltas for token in delta.ids] == want


def test_a_clean_row_is_begun_with(folder: Path) -> None:
    """Whatever the row's owner before left in it."""
    core = EXAMPLE.make_engine(folder, max_running_requests=1)
    states: Any = core.executor.runner.pool.states[1]  # type: ignore[attr-defined]
    run(core, [prompt(30, 1)], 4)
    for layer in (0, 2):
        for own in states.rows(layer).values():
            assert torch.any(own[0] != 0)
            own[0] = math.nan
    [found] = run(core, [prompt(20, 2)], 10)
    assert found == EXAMPLE.right(folder, prompt(20, 2), found)


@OVERLAPPED
def test_states_that_do_not_fit_at_once_are_loaded_by_smaller_steps(folder: Path, overlap: bool) -> None:
    """A load that fails is not tried again by every step after it, with theirs: all are served, as undisturbed."""
    prompts = [prompt(9, n) for n in range(4)]
    want, _ = drive(start(folder, overlap), prompts, 6)
    core = start(folder, overlap)
    runner: Any = core.executor.runner  # type: ignore[attr-defined]
    states, most = runner.pool.states[1], []
    inner = states.load

    def load(copies: list[int], rows: list[int]) -> None:
        most.append(len(rows))
        if len(rows) > 2:
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.95 GiB.")
        inner(copies, rows)

    states.load = load
    for handle, given in enumerate(prompts, 1):  # all at once
        params = SamplerParams(max_tokens=6, temperature=0.0, ignore_eos=True)
        core.handle(Submit(rid="", handle=handle, prompt_ids=given, params=params))
    tokens: dict[int, list[int]] = {n: [] for n in range(1, 5)}
    for _ in range(200):
        if not core.has_work:
            break
        for delta in core.step().deltas:
            tokens[delta.handle] += delta.ids
            assert delta.finish is None or delta.finish.reason == "length", delta.finish
    assert max(most) == 4
    assert list(tokens.values()) == want


class Allocated(TorchDispatchMode):
    """The largest tensor that was made inside, in numbers."""

    def __init__(self) -> None:
        super().__init__()
        self.largest = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        given = {one.untyped_storage().data_ptr() for one in args if isinstance(one, Tensor)}
        if isinstance(out, Tensor) and out.untyped_storage().data_ptr() not in given:
            self.largest = max(self.largest, out.numel())
        return out


def test_loading_states_takes_no_memory(folder: Path) -> None:
    """Those of 63 requests of a large model would take 3 GiB, which nobody has planned."""
    core = start(folder, False)
    runner: Any = core.executor.runner  # type: ignore[attr-defined]
    states = runner.pool.states[1]
    for name, copies in states._copies.items():
        copies.copy_(torch.randn(copies.shape))
        copies[:, 0] = 0
        states._rows[name].fill_(5.0)
    with Allocated() as made:
        states.load([0, 2, 0, 1], [3, 1, 0, 2])
    assert made.largest <= 4
    for name, rows in states._rows.items():
        assert torch.equal(rows[:, [3, 1, 0, 2]], states._copies[name][:, [0, 2, 0, 1]])


def test_the_plan_counts_what_folding_takes(folder: Path) -> None:
    """A layer without kernels gathers the states of rows that decode; one with kernels has pieces of prompts alone."""
    config = start(folder, False).executor.runner.config  # type: ignore[attr-defined]
    numbers = sum(math.prod(tensor.shape) for tensor in next(spec.state for spec in config.layers if spec.state))
    assert fold_bytes(config, 4, 64, 7) == 64 * STATE_COPIES * 4 * numbers
    heads = (CacheTensor("state", (6, 8, 8), "float32"), CacheTensor("conv", (4, 96)))
    specs = [
        replace(spec, state=heads, reach=Recurrent(64, in_place=True)) if spec.state else spec for spec in config.layers
    ]
    assert fold_bytes(replace(config, layers=tuple(specs)), 4, 64, 7) == 7 * 2 * PIECE_BYTES * 6
