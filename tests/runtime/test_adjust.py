"""Draws of a captured step with masks, penalties, biases and log probabilities against `sampler.sample`.

On CPU the kernels run in Triton's interpreter.
"""

from __future__ import annotations

import random
from typing import Any

import numpy as np
import pytest
import torch
from fake_graphs import triton_step, use_triton

from dovetail.messages import SamplerParams
from dovetail.messages.step import Admit
from dovetail.runtime.device.device_state import DeviceState
from dovetail.runtime.device.penalties import TokenCounts
from dovetail.runtime.sampling import sampler
from dovetail.runtime.sampling.draw_graphs import SampleTables, draw_adjusted, yield_to_min_tokens
from dovetail.runtime.sampling.masks import MaskBuffer
from dovetail.runtime.sampling.ranked import RankedLogprobs
from dovetail.runtime.sampling.sampler import Masked, SampleBatch
from dovetail.runtime.step_kernels import PLAIN_STEP, StepKernels
from dovetail.sdk.rows import MAX_BIAS, MAX_STOPS, MAX_TOP

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
SPARE = 1
"""Rows of padding behind those of requests."""


def asked(rng: random.Random, vocab: int) -> SamplerParams:
    """Anything that a graph draws by."""
    bias = rng.sample(range(vocab), min(vocab, rng.choice([0, 0, 3, MAX_BIAS])))
    return SamplerParams(
        max_tokens=9,
        temperature=rng.choice([0.0, 0.7, 1.3]),
        top_p=rng.choice([1.0, 0.8]),
        top_k=rng.choice([-1, 5]),
        min_p=rng.choice([0.0, 0.05]),
        frequency_penalty=rng.choice([0.0, 0.7, -0.4]),
        presence_penalty=rng.choice([0.0, 0.6]),
        repetition_penalty=rng.choice([1.0, 1.3, 0.8]),
        logit_bias={token: rng.uniform(-3, 3) for token in bias},
        logprobs=rng.choice([None, 0, 3, MAX_TOP]),
        min_tokens=rng.choice([0, 0, 3, 6]),
    )


class Batch:
    """Rows 0 … n-1 of a device, admitted; the draws of a graph or of the sampler, token after token."""

    def __init__(
        self, params: list[SamplerParams], vocab: int, masks: np.ndarray[Any, Any] | None, step: StepKernels
    ) -> None:
        """Every row has stop ids, most of the vocabulary's best ones; of the masked rows, some allow only ends."""
        num = len(params)
        self.vocab, self.num, self.step = vocab, num, step
        self.state = DeviceState(num, 1, DEVICE)
        self.counts = TokenCounts(vocab, DEVICE, num + SPARE)
        for i, each in enumerate(params):
            ids = tuple((7 * i + at) % vocab for at in range(5)) if each.is_penalized else ()
            stops = tuple((3 * i + at) % vocab for at in range(min(vocab - 1, (i % 3) * 8)))
            self.state.params.admit(Admit(i, i, 5, each, stops, ids))
        self.state.flush()
        self.state.seq_lens[:num] = 4
        self.buffer = MaskBuffer((vocab + 31) // 32, DEVICE, num + SPARE)
        self.lines = np.full(num, -1, dtype=np.int32)
        if masks is not None:
            self.buffer.lend(len(masks))[:] = masks
            self.lines[: 2 * len(masks) : 2] = np.arange(len(masks))
        self.ends_only = (self.lines >= 0) & (np.arange(num) % 4 == 2)

    def by_sampler(self, logits: torch.Tensor) -> tuple[list[int], Any]:
        """One token each, and what is asked for beside it."""
        state, at = self.state, torch.arange(self.num, device=DEVICE)
        state.seq_lens[: self.num] += 1
        rows = state.params.rows[: self.num]
        batch = SampleBatch(rows=rows, params=state.params, at=at, positions=state.positions(at), is_banning=True)
        tokens = self.buffer.mask_of(self.lines)
        masked = Masked(tokens, torch.from_numpy(self.ends_only).to(DEVICE)) if tokens else None
        found = sampler.sample(logits[: self.num], batch, self.counts, masked)
        return found.ids.tolist(), found.logprobs.read() if found.logprobs else []

    def by_graph(self, logits: torch.Tensor) -> tuple[list[int], Any]:
        """The same, with a row of padding."""
        state, at = self.state, torch.arange(self.num, device=DEVICE)
        state.seq_lens[: self.num] += 1
        rows = torch.cat((at, at.new_full((SPARE,), state.padding_row)))
        sampler.remember(state.params.rows[: self.num], at, state.params, self.counts)
        self.buffer.send(int((self.lines >= 0).sum()))
        said = np.where(self.ends_only, yield_to_min_tokens(self.lines), self.lines)
        lines = torch.tensor([*said, *[-1] * SPARE], dtype=torch.int32, device=DEVICE)
        ids, told = draw_adjusted(logits, rows, lines, state, SampleTables(self.buffer, self.counts), self.step)
        assert state.next_ids[: self.num].tolist() == ids[: self.num].tolist()
        params = [row.params for row in state.params.rows[: self.num]]
        wanted = [i for i, each in enumerate(params) if each.logprobs is not None]
        nums = [min(params[i].logprobs or 0, self.vocab) for i in wanted]
        ranked = RankedLogprobs(told, wanted, wanted, nums, MAX_TOP, [()] * len(wanted)) if wanted else None
        chosen = ids[: self.num].tolist()  # waits for the device
        return chosen, [] if ranked is None else ranked.read()


@pytest.mark.first(8)
@pytest.mark.parametrize("is_plain", [False, True])
@pytest.mark.parametrize(
    ("vocab", "num", "is_masked"),
    [(7, 3, True), (199, 9, True), (1030, 2, False), (4097, 2, True)]
    + [pytest.param(v, n, m, marks=pytest.mark.gpu) for v, n in ((152_064, 64), (8193, 5)) for m in (True, False)],
)
def test_it_draws_what_the_sampler_draws(
    vocab: int, num: int, is_masked: bool, is_plain: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A few tokens each, by kernels and in plain torch: the same, counted alike, with the same log probabilities."""
    if DEVICE.type == "cpu":
        use_triton(monkeypatch)
    rng = random.Random(vocab)
    params = [asked(rng, vocab) for _ in range(num)]
    masks = None
    if is_masked:
        flags = np.random.default_rng(1).random(((num + 1) // 2, 32 * ((vocab + 31) // 32))) < 0.4
        flags[:, 0] = True
        masks = np.packbits(flags, axis=1, bitorder="little").view(np.int32)
    step = PLAIN_STEP if is_plain else triton_step()
    graph, plain = Batch(params, vocab, masks, step), Batch(params, vocab, masks, PLAIN_STEP)
    generator = torch.Generator().manual_seed(vocab)
    for _ in range(2):
        logits = (3 * torch.randn(num + SPARE, vocab, generator=generator)).to(DEVICE)
        got, want = graph.by_graph(logits), plain.by_sampler(logits)
        assert got[0] == want[0]
        assert [(row.token_id, len(row.top)) for row in got[1]] == [(row.token_id, len(row.top)) for row in want[1]]
        for mine, theirs in zip(got[1], want[1], strict=True):
            assert mine.logprob == pytest.approx(theirs.logprob, abs=1e-4)
            assert [t.token_id for t in mine.top] == [t.token_id for t in theirs.top]
            assert [t.logprob for t in mine.top] == pytest.approx([t.logprob for t in theirs.top], abs=1e-4)
    assert torch.equal(graph.counts.said[graph.state.params.slots[:num].clamp(min=0)],
                       plain.counts.said[plain.state.params.slots[:num].clamp(min=0)])  # fmt: skip
    assert any(each.is_penalized for each in params)


def test_what_a_graph_cannot_do_is_told_apart() -> None:
    """One bias too many, one rival too many, a named token, a processor: such rows are drawn outside."""
    state = DeviceState(1, 1, torch.device("cpu"))

    def fits(**chosen: Any) -> bool:
        state.params.admit(Admit(0, 0, 1, SamplerParams(max_tokens=1, **chosen)))
        return state.params.facts_of(np.array([0])).fits_graph

    assert fits(logit_bias=dict.fromkeys(range(MAX_BIAS), 1.0), logprobs=MAX_TOP, frequency_penalty=1.0)
    assert not fits(logit_bias=dict.fromkeys(range(MAX_BIAS + 1), 1.0))
    assert not fits(logprobs=MAX_TOP + 1)
    assert not fits(logprobs=1, logprob_token_ids=(3,))
    assert not fits(processors={"any": {}})


def test_stop_ids_too_many_for_a_graph_are_told_apart() -> None:
    """Before its minimum length, a row with more is drawn outside; the others' stop ids stay where graphs read them."""
    state = DeviceState(2, 1, torch.device("cpu"))
    stops = state.params.stops
    for row, num in ((0, MAX_STOPS), (1, MAX_STOPS + 1)):
        admit = Admit(row, 0, 1, SamplerParams(max_tokens=9, min_tokens=3), tuple(range(num)))
        state.params.admit(admit)
        state.flush()
        assert state.params.facts_of(np.array([row])).bans_in_graph == (num <= MAX_STOPS)
    assert state.params.stops is stops
    assert stops[:2].tolist() == [list(range(MAX_STOPS))] * 2
    assert state.params.stop_ids[:2].tolist() == [[*range(MAX_STOPS), -1], [*range(MAX_STOPS + 1)]]


def test_a_slot_too_many_is_an_error() -> None:
    """Graphs read counts where they stand: the table does not move."""
    counts = TokenCounts(8, torch.device("cpu"), 2)
    taken = [counts.take([1]), counts.take([2])]
    with pytest.raises(ValueError, match="all 2 slots"):
        counts.take([3])
    taken[0].release()
    assert counts.take([3]).slot == taken[0].slot
