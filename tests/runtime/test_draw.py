"""The draw kernel against draws from a full sort; on CPU it runs in Triton's interpreter."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from dovetail.contracts.kernels import PLAIN_KERNELS
from dovetail.messages import SamplerParams
from dovetail.messages.step import Admit
from dovetail.runtime.device.device_state import DeviceState
from dovetail.runtime.step_kernels import PLAIN_STEP
from dovetail.sdk import draws as draw
from dovetail.sdk.rows import DrawParams
from dovetail_backends.kernels.triton import draw as draw_triton

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")


def sampling(**chosen: Any) -> SamplerParams:
    """Parameters of a request."""
    return SamplerParams(max_tokens=1, **chosen)


FILTERS = [
    sampling(temperature=1.0),
    sampling(temperature=0.0, top_p=0.3),
    sampling(temperature=0.7, top_k=1),
    sampling(temperature=1.1, top_k=7),
    sampling(temperature=2.5, top_k=10_000),
    sampling(temperature=1.0, top_p=0.7331),
    sampling(temperature=3.0, top_p=0.99877),
    sampling(temperature=0.9, top_p=1e-6),
    sampling(temperature=1.3, min_p=0.0717),
    sampling(temperature=1.7, top_k=40, top_p=0.8113, min_p=0.0211),
    sampling(temperature=1.7, top_k=40, top_p=0.3113),
    sampling(temperature=1.2, top_k=64, top_p=0.9),
    sampling(temperature=1.2, top_k=65, top_p=0.9),
    sampling(temperature=0.6, top_k=20, top_p=0.9337, min_p=0.05),
    sampling(temperature=1.9, top_k=64),
    sampling(temperature=1.9, top_k=65),
]


def drawn_by(rows: list[SamplerParams], seeds: list[int], positions: list[int], device: torch.device) -> DrawParams:
    """As in an engine: admitted to device rows, and gathered from there."""
    state = DeviceState(len(rows), 1, device)
    for i, (row, seed) in enumerate(zip(rows, seeds, strict=True)):
        state.params.admit(Admit(i, seed, 0, row))
    state.flush()
    return state.params.draw_params(torch.arange(len(rows), device=device), torch.tensor(positions, device=device))


def params(rows: list[SamplerParams], seed: int) -> DrawParams:
    """Parameters of rows, each with a seed of its own."""
    return drawn_by(rows, [seed + i for i in range(len(rows))], [3] * len(rows), DEVICE)


def by_sorting(logits: Tensor, p: DrawParams) -> Tensor:
    """What the kernel must draw: by a stable sort of the whole vocabulary."""
    scores = draw.scaled(logits.float(), p.temperature)
    ids, enough = draw.draw_filtered(scores, p, logits.shape[-1])
    assert enough.all()
    return torch.where(p.temperature > 0, ids, logits.argmax(dim=-1))


def rounded(logits: Tensor) -> Tensor:
    """Many equal values, as a model in bfloat16 gives them."""
    return (logits * 2).round() / 2


SHAPES = {
    "smooth": lambda x: x,
    "bfloat16": lambda x: x.bfloat16(),
    "ties": rounded,
    "flat": torch.zeros_like,
    "masked": lambda x: torch.where(torch.arange(x.shape[-1], device=x.device) % 3 == 1, x, float("-inf")),
    "steep": lambda x: x * 40,
}


@pytest.mark.sampled
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("vocab", [63, 200])
def test_the_kernel_draws_as_a_sort_would(shape: str, vocab: int) -> None:
    """For every filter, the kernel keeps the tokens of a stable sort, ties by id, and draws the same."""
    rows = FILTERS * (1 if DEVICE.type == "cpu" else 40)
    generator = torch.Generator().manual_seed(vocab)
    logits = SHAPES[shape](torch.randn(len(rows), vocab, generator=generator).to(DEVICE) * 2)
    p = params(rows, seed=vocab)
    assert draw_triton.draw(logits, p, sample_block=64, block=128).tolist() == by_sorting(logits, p).tolist()


def test_many_rows_draw_as_few_do(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where rows fill the device by themselves, one program settles each: it draws the same tokens."""
    logits = torch.randn(len(FILTERS), 200, generator=torch.Generator().manual_seed(4)).to(DEVICE) * 2
    p = params(FILTERS, seed=5)
    want = draw_triton.draw(logits, p, sample_block=64, block=128)
    monkeypatch.setattr(draw_triton, "FEW_ROWS", 0)
    assert draw_triton.draw(logits, p, sample_block=64, block=128).tolist() == want.tolist()


def test_more_candidates_than_there_is_room_for_are_sought_by_bisection(monkeypatch: pytest.MonkeyPatch) -> None:
    """Rows of many equals, where far more than top-k tokens may be among the best: the same tokens."""
    rows = [row for row in FILTERS if 0 < row.top_k <= draw_triton.LISTED]
    logits = rounded(torch.randn(len(rows), 900, generator=torch.Generator().manual_seed(6)).to(DEVICE) / 3)
    p = params(rows, seed=7)
    want = by_sorting(logits, p).tolist()
    for most in (512, 64):
        monkeypatch.setattr(draw_triton, "CANDIDATES", most)
        assert draw_triton.draw(logits, p, sample_block=64, block=128).tolist() == want


@pytest.mark.gpu
@pytest.mark.parametrize("row", [FILTERS[i] for i in (4, 5, 8, 9, 13)], ids=str)
def test_the_kernel_draws_by_the_probabilities(row: SamplerParams) -> None:
    """20,000 draws from 12 tokens: nothing outside the filters, and a chi-square below its 0.01% quantile."""
    num = 20_000
    logits = (torch.randn(12, generator=torch.Generator().manual_seed(1)) * 1.5).to(DEVICE).expand(num, 12)
    p = params([row] * num, seed=0)
    counts = torch.bincount(draw_triton.draw(logits, p, sample_block=16, block=16), minlength=12).double().cpu()
    probs = (logits[:1].double() / row.temperature).softmax(-1)
    best, order = probs.float().sort(descending=True, stable=True)
    kept = torch.zeros(12, dtype=torch.bool).to(DEVICE)
    kept[order[0]] = draw.keep_mask(best, p.rows(torch.tensor([0], device=DEVICE)))[0]
    want = torch.where(kept, probs[0], 0.0)
    want = (want / want.sum() * num).cpu()
    assert counts[want == 0].sum() == 0
    chi = ((counts - want)[want > 0] ** 2 / want[want > 0]).sum().item()
    freedom = int((want > 0).sum()) - 1
    assert chi < freedom + 3.8 * math.sqrt(2 * freedom) + 10


def test_rows_that_are_not_finite_end() -> None:
    """Rows of NaN and of infinities give some token of the vocabulary and leave their neighbours alone."""
    logits = torch.randn(4, 50, generator=torch.Generator().manual_seed(2)).to(DEVICE)
    p = params([sampling(temperature=1.0, top_p=0.7331, top_k=20)] * 4, seed=9)
    want = draw_triton.draw(logits, p, sample_block=32, block=64)[3]
    logits[0], logits[1], logits[2, 7] = float("nan"), float("-inf"), float("inf")
    with np.errstate(invalid="ignore"):  # the interpreter computes in numpy
        found = draw_triton.draw(logits, p, sample_block=32, block=64)
    assert ((found >= 0) & (found < 50)).all()
    assert found[3] == want


@pytest.mark.parametrize("filters", [{"top_k": 5}, {"top_p": 0.41}])
def test_equal_tokens_on_the_edge_are_kept_by_id(filters: dict[str, float]) -> None:
    """Where a short list of candidates ends among equals, the draw is the full sort's."""
    logits = torch.zeros(40, 30)
    logits[:, 20:] = 1.0
    rows = [sampling(temperature=1.0, **filters)] * 40
    p = drawn_by(rows, list(range(40)), [1] * 40, torch.device("cpu"))
    scores = draw.scaled(logits, p.temperature)
    want = draw.draw_filtered(scores, p, 30)[0]
    assert torch.equal(draw.draw_short(scores, p, 7), want)
    assert want.max() <= (24 if "top_k" in filters else 29)


class _Refuses:
    """A kernel that must not be launched."""

    def __getitem__(self, grid: object) -> object:
        raise AssertionError("a round was launched")


def test_draws_apart_are_made_one_way(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where the number of rows must not tell, plain torch draws them one by one, and the kernels make no rounds."""
    torch.manual_seed(0)
    logits, num = torch.randn(5, 300), 5
    half, zero = torch.full((num,), 0.5), torch.zeros(num)
    whole = torch.arange(num)
    params = DrawParams(torch.ones(num), half, zero, torch.zeros(num, dtype=torch.int64), whole, whole)
    seen: list[int] = []
    block = draw._draw_block
    monkeypatch.setattr(draw, "_draw_block", lambda x, p: seen.append(len(x)) or block(x, p))
    plain = PLAIN_KERNELS.bind(PLAIN_KERNELS.ask("draw", "float32", {"V": 300}, {}, invariant=True))
    greedy = logits.argmax(-1)
    drawn = plain(logits, greedy, *params.tensors())
    assert seen == [1] * num
    assert torch.equal(PLAIN_STEP.draw(logits, greedy, *params.tensors()), drawn)
    monkeypatch.setattr(draw_triton, "_round_kernel", _Refuses())
    with pytest.raises(AssertionError, match="a round was launched"):
        draw_triton.draw(logits, params)
    assert torch.equal(draw_triton.draw(logits, params, batch_invariant=True), drawn)
