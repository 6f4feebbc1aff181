"""The sampler against a plain float64 reference, and its distributions by chi-square."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from rows import Row, batch_of, counts_of, sample

from dovetail.messages import SamplerParams
from dovetail.messages.step import Admit
from dovetail.runtime.device.device_state import DeviceState
from dovetail.runtime.sampling.masks import MaskBuffer
from dovetail.runtime.sampling.sampler import FloatScratch, Masked, adjust
from dovetail.sdk import draws

V = 50


def row(seed: int = 1, *, stop_ids: tuple[int, ...] = (), prompt: tuple[int, ...] = (), **params: Any) -> Row:
    """A row with the given parameters."""
    return Row(SamplerParams(max_tokens=100, **params), seed, stop_ids, list(prompt))


def logits(rows: int = 1, seed: int = 0) -> torch.Tensor:
    """Random logits."""
    return torch.randn(rows, V, generator=torch.Generator().manual_seed(seed)) * 2


def reference_probs(x: torch.Tensor, p: SamplerParams) -> torch.Tensor:
    """Temperature, top-k, top-p, min-p in float64, written as a person would."""
    probs = (x.double() / p.temperature).softmax(-1)
    order = sorted(range(len(probs)), key=lambda i: -probs[i])
    kept = order[: p.top_k] if p.top_k > 0 else order
    total = sum(probs[i] for i in kept)
    nucleus: list[int] = []
    mass = 0.0
    for i in kept:
        if nucleus and mass >= p.top_p * total:
            break
        nucleus.append(i)
        mass += probs[i].item()
    final = [i for i in nucleus if probs[i] >= p.min_p * probs[order[0]]]
    out = torch.zeros_like(probs)
    out[final] = probs[final] / probs[final].sum()
    return out


FILTERS: list[dict[str, Any]] = [
    {"temperature": 1.0},
    {"temperature": 0.5},
    {"temperature": 2.0},
    {"temperature": 1.0, "top_k": 3},
    {"temperature": 1.0, "top_p": 0.7},
    {"temperature": 1.3, "min_p": 0.15},
    {"temperature": 1.5, "top_k": 20, "top_p": 0.8, "min_p": 0.02},
    {"temperature": 0.8, "top_p": 0.01},
]


@pytest.mark.first(4)
@pytest.mark.sampled
@pytest.mark.parametrize("params", FILTERS, ids=str)
@pytest.mark.parametrize("candidates", [8, 1024])
def test_draws_follow_the_reference_distribution(
    params: dict[str, Any], candidates: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """20,000 draws: nothing outside the filters, and a chi-square below its 0.01% quantile, short list or not."""
    monkeypatch.setattr(draws, "CANDIDATES", candidates)
    n = 20_000
    x = logits()
    rows = [row(seed, **params) for seed in range(n)]
    ids = sample(x.expand(n, V), rows).ids
    counts = torch.bincount(ids, minlength=V).double()
    want = reference_probs(x[0], rows[0].params) * n
    assert counts[want == 0].sum() == 0
    big = want >= 5
    small_want, small_counts = want[~big].sum(), counts[~big].sum()
    chi = ((counts[big] - want[big]) ** 2 / want[big]).sum().item()
    freedom = int(big.sum()) - 1
    if small_want >= 5:
        chi += ((small_counts - small_want) ** 2 / small_want).item()
        freedom += 1
    limit = freedom + 3.8 * math.sqrt(2 * freedom) + 10  # above the 0.01% quantile for every number of freedoms
    assert chi < limit


def test_a_seeded_row_draws_the_same_whatever_its_neighbours() -> None:
    """Ten tokens of a seeded row are equal alone, first, last, and beside rows with other filters."""
    x = [logits(1, seed=i) for i in range(10)]

    def tokens(before: int, after: int, **others: Any) -> list[int]:
        mine = row(99, temperature=1.0, top_p=0.9)
        noise = [row(i, temperature=1.0, **others) for i in range(before + after)]
        rows = [*noise[:before], mine, *noise[before:]]
        return [int(sample(y.expand(len(rows), V), rows).ids[before]) for y in x]

    alone = tokens(0, 0)
    assert tokens(3, 0) == alone
    assert tokens(0, 5, top_k=2) == alone
    assert tokens(2, 2, frequency_penalty=1.0) == alone
    assert tokens(1, 1, top_p=0.9999) == alone


def test_temperature_zero_takes_the_best_token_beside_sampled_rows() -> None:
    """A greedy row is the argmax, whoever samples beside it."""
    x = logits(2)
    ids = sample(x, [row(temperature=0.0), row(temperature=1.0)]).ids
    assert ids[0] == x[0].argmax()


def test_a_tiny_temperature_does_not_overflow() -> None:
    """Temperature 1e-30 is greedy in effect, not NaN."""
    x = logits() * 1e4
    assert sample(x, [row(temperature=1e-30)]).ids[0] == x[0].argmax()


def test_penalties_and_bias_equal_the_reference() -> None:
    """Frequency, presence and repetition penalties and logit bias, as documented, in float64."""
    x = logits(3)
    rows = [
        row(frequency_penalty=0.5, presence_penalty=0.25, prompt=(1, 2), temperature=0),
        row(repetition_penalty=1.7, prompt=(1, 2, 2), temperature=0),
        row(logit_bias={4: 5.0, 7: -100.0}, temperature=0),
    ]
    outputs = [[], [], []]  # type: list[list[int]]
    for step in range(6):
        adjusted = adjust(x.clone(), batch_of(rows), counts_of(x))
        for i, r in enumerate(rows):
            want = x[i].double().clone()
            p = r.params
            for token in range(V):
                n = outputs[i].count(token)
                if p.repetition_penalty != 1 and (n or token in r.prompt_ids):
                    want[token] = want[token] / 1.7 if want[token] > 0 else want[token] * 1.7
                want[token] -= p.frequency_penalty * n + p.presence_penalty * (n > 0)
                want[token] += (p.logit_bias or {}).get(token, 0.0)
            torch.testing.assert_close(adjusted[i].double(), want, rtol=1e-5, atol=1e-5)
        ids = sample(x, rows).ids
        for i in range(3):
            assert ids[i] == adjusted[i].argmax(), step
            outputs[i].append(int(ids[i]))


def test_stop_tokens_are_banned_until_min_tokens() -> None:
    """A stop token that is the best choice is not taken before `min_tokens`, and is afterwards."""
    x = torch.zeros(1, V)
    x[0, 9], x[0, 5] = 10, 5
    r = row(stop_ids=(9,), min_tokens=2, temperature=0)
    assert [int(sample(x, [r]).ids[0]) for _ in range(3)] == [5, 5, 9]


def test_logprobs_are_those_of_the_model() -> None:
    """Log probabilities come from the raw logits, best first, untouched by temperature, filters and bias."""
    x = logits()
    r = row(temperature=0.1, top_k=1, logprobs=4, logit_bias={3: 100.0})
    ranked = sample(x, [r]).logprobs
    assert ranked is not None
    [found] = ranked.read()
    assert found is not None
    want = x[0].double().log_softmax(-1)
    assert found.token_id == 3
    assert found.logprob == pytest.approx(want[3].item(), abs=1e-5)
    best = want.sort(descending=True)
    assert [t.token_id for t in found.top] == best.indices[:4].tolist()
    assert [t.logprob for t in found.top] == pytest.approx(best.values[:4].tolist(), abs=1e-5)


def test_logits_that_are_not_finite_are_reported_and_harm_no_neighbour() -> None:
    """A NaN row is marked; the row beside it draws what it draws alone."""
    x = logits(2)
    alone = sample(x[1:], [row(5, temperature=1.0)]).ids[0]
    x[0, 3] = float("nan")
    outcome = sample(x, [row(4, temperature=1.0), row(5, temperature=1.0)])
    assert outcome.non_finite.tolist() == [True, False]
    assert outcome.ids[1] == alone


@pytest.mark.parametrize("others", [{}, {"top_p": 0.9}, {"top_k": 5, "min_p": 0.1}], ids=str)
def test_many_rows_draw_what_they_draw_in_small_blocks(others: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    """How many rows are worked on at once changes no token; greedy rows among them stay greedy."""
    x = logits(11)
    rows = [row(i, temperature=float(i % 4 > 0), **others) for i in range(11)]
    want = sample(x, rows).ids
    monkeypatch.setattr(draws, "BLOCK", 3 * V)
    again = [row(i, temperature=float(i % 4 > 0), **others) for i in range(11)]
    assert torch.equal(sample(x, again).ids, want)


def test_a_step_may_reuse_the_memory_of_the_last() -> None:
    """Logits are widened into memory that is kept: results of narrow, wide, small and large steps stay right."""
    scratch = FloatScratch()
    for num, dtype in ((3, torch.bfloat16), (1, torch.float16), (7, torch.bfloat16), (2, torch.float32)):
        x = logits(num, seed=num).to(dtype)
        rows = [row(temperature=0.0, logprobs=1) for _ in range(num)]
        outcome = sample(x, rows, scratch=scratch)
        assert torch.equal(outcome.ids, x.argmax(dim=-1))
        assert outcome.logprobs is not None
        want = x.float().log_softmax(-1).max(dim=-1).values.tolist()
        assert [item.logprob for item in outcome.logprobs.read()] == pytest.approx(want)


def test_a_short_candidate_list_is_used_only_where_it_is_exact() -> None:
    """With a flat distribution and top-p near one, the list is too short and the full vocabulary is used."""
    flat = torch.zeros(200, 3000)
    ids = sample(flat, [row(seed, temperature=1.0, top_p=0.999) for seed in range(200)]).ids
    assert (ids >= 1024).float().mean() > 0.5


def masked(rows: int, *lines: int) -> Masked:
    """Masks of the first rows, each of which allows one token."""
    buffer = MaskBuffer((V + 31) // 32, torch.device("cpu"))
    words = buffer.lend(len(lines))
    words[:] = 0
    for line, token in enumerate(lines):
        words[line, token // 32] = 1 << token % 32
    mask_of = np.full(rows, -1, dtype=np.int32)
    mask_of[: len(lines)] = np.arange(len(lines))
    mask = buffer.mask_of(mask_of)
    assert mask is not None
    return Masked(mask)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_logits_that_are_not_finite_are_found_behind_a_mask(dtype: torch.dtype, bad: float) -> None:
    """Also where the mask bans the token; a mask that bans everything finite is no fault of the model."""
    x = torch.zeros(3, V).to(dtype)
    x[0, 7] = bad
    x[1, 45] = float("-inf")
    sampled = sample(x, [row(temperature=0) for _ in range(3)], masked(3, 45, 45, 45))
    assert sampled.non_finite.tolist() == [True, False, False]
    assert sampled.ids[2] == 45


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("logprobs", [None, 2])
def test_sampling_leaves_the_logits_alone(dtype: torch.dtype, logprobs: int | None) -> None:
    """Masks are applied to a copy: the caller's logits stay, and log probabilities are those before the mask."""
    x = logits(2, seed=3).to(dtype)
    before = x.clone()
    sampled = sample(x, [row(temperature=0, logprobs=logprobs), row(temperature=0)], masked(2, 45))
    assert torch.equal(x, before)
    assert sampled.ids.tolist() == [45, int(before[1].float().argmax())]
    if logprobs is not None:
        assert sampled.logprobs is not None
        wanted = before[0].float().log_softmax(dim=-1)[45].item()
        assert sampled.logprobs.read()[0].logprob == pytest.approx(wanted)


def test_a_minimum_length_gives_way_to_a_mask_of_ends() -> None:
    """A stop id that is all that the mask allows is taken before the minimum length; else it is banned."""
    x = torch.zeros(2, V)
    rows = [row(stop_ids=(45,), min_tokens=9, temperature=0) for _ in range(2)]
    ends_only = torch.tensor([True, False])
    free = sample(x, rows, masked(2, 45)._replace(ends_only=ends_only)).ids
    assert free[0] == 45
    assert free[1] != 45


def test_a_row_forgets_the_stop_ids_of_whoever_had_it() -> None:
    """A request with a minimum length and no stop ids, in the row of one that had some."""
    state = DeviceState(1, 1, torch.device("cpu"))
    params = state.params
    for stop_ids in ((3, 4), ()):
        params.admit(Admit(0, 1, 0, SamplerParams(max_tokens=9, min_tokens=5, temperature=0.0), stop_ids))
        state.flush()
    batch = batch_of([row(temperature=0)])
    batch = replace(batch, rows=params.rows[:1], params=params, is_banning=True)
    x = torch.zeros(1, V)
    assert torch.equal(adjust(x, batch, counts_of(x)), x)
