"""Numbers that are not finite, once: one request ends, nobody else notices, and nothing of them stays in the cache.

A model is made to write NaN for one token, at one moment: to its keys and values and to its final hidden state. Whoever
hits such a page in the step after is computed again, as if that had never been.
"""

from __future__ import annotations

import math
import os
import random
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from dovetail.contracts.attention import ForwardBatch
from dovetail.demo import MODEL_DIR
from dovetail.engine.core import EngineCore
from dovetail.messages import Abort, Finish, GrammarOption, SamplerParams, Submit
from dovetail_testing.engine import make_core
from dovetail_testing.models import make_model

NUM_SEEDS = int(os.environ.get("DOVETAIL_POISON", "3"))
MARK = 177
"""A token whose first computing goes wrong."""
GREEDY = SamplerParams(max_tokens=6, temperature=0, ignore_eos=True)
BOTH = pytest.mark.parametrize("overlap", [False, True], ids=["in turn", "overlapped"])
OVERLAPPED = pytest.mark.parametrize(
    "overlap", [pytest.param(False, marks=pytest.mark.full), True], ids=["in turn", "overlapped"]
)
"""Both in `make test-all`."""


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny model."""
    return make_model(tmp_path_factory.mktemp("model"), "Qwen3ForCausalLM", num_hidden_layers=2, head_dim=16)


class Poisoned:
    """A model that goes wrong for tokens that `picks` says, the last time for one of them.

    Attributes:
        left: How often it is still to go wrong.
    """

    def __init__(self, core: EngineCore, picks: Callable[[Tensor, ForwardBatch], Tensor], times: int = 1) -> None:
        runner = core.executor.runner
        self.model, self.pool, self.picks, self.left = runner.model, runner.pool, picks, times
        self.layers = core.executor.runner.config.num_layers
        core.executor.stepper._model = self
        self.lm_head = self.model.lm_head

    def forward(self, ids: Tensor, batch: ForwardBatch) -> Tensor:
        """Compute, and then spoil a token."""
        hidden = self.model.forward(ids, batch)
        found = self.picks(ids, batch).nonzero()
        if self.left and len(found):
            self.left -= 1
            for token in found[:, 0].tolist() if self.left else [int(found[0])]:
                slot, size = int(batch.kv_slots[token]), self.pool.page_size
                hidden[token] = math.nan
                for layer in range(self.layers):
                    self.pool.layer(layer)[slot // size, :, slot % size] = math.nan
        return hidden


def marked(ids: Tensor, batch: ForwardBatch) -> Tensor:
    """The token `MARK`."""
    return ids == MARK


class Run:
    """Steps an engine; requests come before given steps.

    Attributes:
        tokens: Of each request.
        finishes: Of each that has ended.
    """

    def __init__(self, core: EngineCore) -> None:
        self.core = core
        self.tokens: dict[int, list[int]] = {}
        self.finishes: dict[int, Finish] = {}
        self.extras: dict[int, Any] = {}
        self.cached: dict[int, int] = {}

    def submit(self, handle: int, prompt: Sequence[int], params: SamplerParams = GREEDY, **more: Any) -> None:
        """Send a request."""
        self.tokens[handle] = []
        self.core.handle(Submit(rid="", handle=handle, prompt_ids=list(prompt), params=params, **more))

    def step(self) -> None:
        """Make a step; the book of pages is right after it."""
        for delta in self.core.step().deltas:
            assert delta.handle not in self.finishes, "a delta after the last one"
            self.tokens[delta.handle] += delta.ids
            self.cached[delta.handle] = delta.cached_tokens
            if delta.prompt_logprobs is not None:
                self.extras[delta.handle] = [(p.token_id, p.logprob) for p in delta.prompt_logprobs]
            if delta.finish is not None:
                self.finishes[delta.handle] = delta.finish
        assert self.core.pages.check_counts(self.core.scheduler.running)
        assert self.core.pages.check_ownership(self.core.scheduler.running)

    def drain(self) -> None:
        """Step until all have ended; no page is held or spoilt then."""
        for _ in range(2000):
            if not self.core.has_work:
                break
            self.step()
        assert not self.core.has_work
        assert self.core.pages.num_used == 0
        assert self.core.pages.check_ownership([])
        runner = self.core.executor.runner
        runner.pool.zero_pages(
            0, [page for _, page in self.core.rows.to_zero]
        )  # as the next step would, before all else
        for layer in range(runner.config.num_layers):
            assert torch.isfinite(runner.pool.layer(layer)).all(), "a page holds what is not finite"

    @property
    def ended(self) -> list[int]:
        """Requests that ended for their numbers."""
        return [handle for handle, finish in self.finishes.items() if "not finite" in (finish.message or "")]


STARTED: list[EngineCore] = []


@pytest.fixture(autouse=True)
def closed() -> Iterator[None]:
    """End what compiles grammars of the engines that a test has started."""
    yield
    while STARTED:
        STARTED.pop().close()


def start(model: Path, overlap: bool, **changes: Any) -> Run:
    """An engine with small chunks and pages."""
    small = {"page_size": 4, "chunked_prefill_size": 24, "max_total_tokens": 1200, "max_running_requests": 12}
    core = make_core(model, overlap_on_cpu=overlap, disable_overlap_schedule=not overlap, **{**small, **changes})
    STARTED.append(core)
    return Run(core)


def assert_close(found: list[tuple[int, float | None]] | None, want: list[tuple[int, float | None]] | None) -> None:
    """Log probabilities of the same tokens, but for their last bits."""
    assert [token for token, _ in found or ()] == [token for token, _ in want or ()]
    assert [p for _, p in found or ()] == pytest.approx([p for _, p in want or ()], abs=0.02)


def prompt_of(seed: int, length: int) -> list[int]:
    """Tokens without `MARK`."""
    rng = random.Random(seed)
    return [rng.randrange(170) for _ in range(length)]


LONG = [*prompt_of(0, 30), MARK, *prompt_of(1, 40)]
"""A prompt whose mark is in the second of three chunks of 24 tokens."""


@pytest.mark.sampled
@BOTH
@pytest.mark.parametrize("at", [30, 47, 24, 70], ids=["middle", "end of a chunk", "begin of one", "last token"])
def test_a_fault_in_a_prompts_chunk_ends_that_request_alone(model: Path, overlap: bool, at: int) -> None:
    """Whatever token of whatever chunk: rows that decode beside it go on, and a later request with it is served."""
    prompt = [token for token in LONG if token != MARK]
    prompt.insert(at, MARK)
    clean, run = start(model, overlap), start(model, overlap)
    poison = Poisoned(run.core, marked)
    for each in (clean, run):
        each.submit(1, prompt_of(2, 9), SamplerParams(max_tokens=20, temperature=0, ignore_eos=True))
        each.step()
        each.submit(2, prompt)
        for _ in range(6):
            each.step()
        each.submit(3, prompt)
        each.drain()
    assert (run.ended, poison.left) == ([2], 0)
    assert run.tokens[2] == []
    assert run.tokens[1] == clean.tokens[1]
    assert run.tokens[3] == clean.tokens[3]
    assert run.cached[3] == at // 24 * 24
    run.submit(4, prompt)
    run.drain()
    assert run.tokens[4] == clean.tokens[3]
    assert run.cached[4] == 68


@OVERLAPPED
def test_who_hit_the_pages_in_the_next_step_is_computed_again(model: Path, overlap: bool) -> None:
    """Followers of a poisoned prefix, admitted while nobody knew, give what they give without it."""
    clean, run = start(model, overlap, chunked_prefill_size=400), start(model, overlap, chunked_prefill_size=400)
    poison = Poisoned(run.core, marked)
    penalized = SamplerParams(max_tokens=6, temperature=0, frequency_penalty=0.9, ignore_eos=True)
    seeded = SamplerParams(max_tokens=6, temperature=1.0, seed=5, ignore_eos=True)
    logprobs = SamplerParams(
        max_tokens=6, temperature=0, ignore_eos=True, prompt_logprobs=1, prompt_logprobs_start=len(LONG) - 3
    )
    for each in (clean, run):
        each.submit(1, LONG)
        for handle, params in enumerate((GREEDY, penalized, seeded, logprobs), 2):
            each.submit(handle, [*LONG, handle], params)
        each.drain()
    assert (run.ended, poison.left) == ([1], 0)
    assert {h: run.tokens[h] for h in (2, 3, 4, 5)} == {h: clean.tokens[h] for h in (2, 3, 4, 5)}
    assert_close(run.extras[5], clean.extras[5])
    assert min(run.cached[h] for h in (3, 4, 5)) >= 64 - 8


@BOTH
def test_a_fault_while_decoding_ends_that_request_alone(model: Path, overlap: bool) -> None:
    """Keys and values of a generated token: its neighbours, and who continues its text later, are served."""
    ends = SamplerParams(max_tokens=30, temperature=0, ignore_eos=True)
    clean, run = start(model, overlap), start(model, overlap)
    Poisoned(run.core, lambda ids, batch: (batch.positions == 26) & (torch.arange(len(ids)) < batch.num_decode))
    for each in (clean, run):
        each.submit(1, prompt_of(3, 15), ends)
        each.step()
        each.submit(2, prompt_of(4, 11), ends)
        each.drain()
    assert run.ended == [1]
    assert run.tokens[1] == clean.tokens[1][: len(run.tokens[1])]
    assert len(run.tokens[1]) == 26 - 15 + 1
    assert run.tokens[2] == clean.tokens[2]
    for each in (clean, run):
        each.submit(3, prompt_of(3, 15) + clean.tokens[1][:20])
        each.drain()
    assert run.tokens[3] == clean.tokens[3]


@OVERLAPPED
def test_a_request_that_left_in_the_step_of_its_fault_leaves_nothing_behind(model: Path, overlap: bool) -> None:
    """It is aborted before anybody knows; the pages that it gave back are clean, for whoever has them by now."""
    clean, run = (start(model, overlap, max_total_tokens=160) for _ in range(2))
    Poisoned(run.core, marked)
    for each in (clean, run):
        each.submit(1, LONG)
        each.step()
        each.step()
        if each is run:
            run.core.handle(Abort(1))
        for handle in (2, 3, 4):
            each.submit(handle, [*LONG[: 8 * handle], handle])
        each.drain()
    assert {h: run.tokens[h] for h in (2, 3, 4)} == {h: clean.tokens[h] for h in (2, 3, 4)}


@OVERLAPPED
def test_forced_tokens_go_on_behind_a_poisoned_prefix(model: Path, overlap: bool) -> None:
    """Requests with a grammar that jumps, some of them followers, end as they do without the fault."""
    grammar = (GrammarOption(backend="llguidance", kind="regex", source="The answer is [0-9]{2}, and no other number"),)
    plain = SamplerParams(max_tokens=30, temperature=0)
    settings = {"grammar_backend": "llguidance", "dtype": "float32", "chunked_prefill_size": 400}
    clean, run = (start(MODEL_DIR, overlap, **settings) for _ in range(2))
    Poisoned(run.core, marked)
    for each in (clean, run):
        each.submit(9, prompt_of(8, 5), plain, grammar=grammar)
        for _ in range(200):
            each.step()  # compiled by now
        each.submit(1, LONG)
        for handle in (2, 3):
            each.submit(handle, [*LONG, handle], plain, grammar=grammar)
        each.drain()
        each.core.close()
    assert run.ended == [1]
    assert {h: run.tokens[h] for h in (2, 3)} == {h: clean.tokens[h] for h in (2, 3)}


@pytest.mark.sampled
@BOTH
@pytest.mark.parametrize("seed", range(NUM_SEEDS))
def test_random_loads_lose_one_request_to_a_fault(model: Path, overlap: bool, seed: int) -> None:
    """Prefix groups, retractions, chunks, rows that decode: at most one request ends, the others as in a clean run."""
    rng = random.Random(seed)
    prefixes = [prompt_of(100 + i, 40) for i in range(2)]
    prefixes[0][rng.randrange(40)] = MARK
    changes = {
        "page_size": rng.choice([1, 4, 16]),
        "chunked_prefill_size": rng.choice([16, 40, 300]),
        "max_total_tokens": rng.choice([192, 320, 1200]),
        "schedule_policy": rng.choice(["fcfs", "lof", "lpm", "priority"]),
    }
    loads = []
    for handle in range(1, 16):
        prompt = rng.choice(prefixes)[: rng.choice([13, 40, 40])] + prompt_of(handle, rng.randrange(1, 20))
        temperature, presence = rng.choice([0.0, 0.0, 1.0]), rng.choice([0.0, 0.0, 0.7])
        params = SamplerParams(
            max_tokens=rng.randrange(1, 20), temperature=temperature, seed=handle, presence_penalty=presence,
            ignore_eos=True, prompt_logprobs=rng.choice([None, None, None, 1]),
        )  # fmt: skip
        loads.append((handle, prompt, params, rng.randrange(3)))
    clean, run = start(model, overlap, **changes), start(model, overlap, **changes)
    Poisoned(run.core, marked if seed % 3 else lambda ids, batch: batch.positions == 45)
    for each in (clean, run):
        for handle, prompt, params, pause in loads:
            each.submit(handle, prompt, params, priority=handle % 2)
            each.core.scheduler.ratio.value = 0.0  # reserve nothing: the pool overflows
            for _ in range(pause):
                each.step()
        each.drain()
    assert len(run.ended) <= 1
    for handle, *_ in loads:
        if handle in run.ended:
            assert run.tokens[handle] == clean.tokens[handle][: len(run.tokens[handle])]
        else:
            assert run.tokens[handle] == clean.tokens[handle], handle
            assert run.finishes[handle] == clean.finishes[handle]
            assert_close(run.extras.get(handle), clean.extras.get(handle))


def test_a_model_that_is_never_finite_ends_every_request_and_nothing_else(model: Path) -> None:
    """Each ends with its reason, one after another, and a good model serves the next."""
    run = start(model, True)
    poison = Poisoned(run.core, lambda ids, batch: torch.ones_like(ids, dtype=torch.bool), times=10_000)
    for handle in range(1, 30):
        run.submit(handle, LONG[:handle])
    run.drain()
    assert sorted(run.ended) == list(range(1, 30))
    poison.left = 0
    run.submit(99, LONG)
    run.drain()
    assert len(run.tokens[99]) == 6
