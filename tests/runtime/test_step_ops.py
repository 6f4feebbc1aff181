"""The kernels around the model in a graph equal their torch versions; they run in Triton's interpreter here."""

from __future__ import annotations

import math

import pytest
import torch

from dovetail.runtime.device.device_state import DeviceState
from dovetail.sdk import step as plain
from dovetail_backends.kernels.triton import step as kernels

CPU = torch.device("cpu")


def loaded(num_rows: int, max_pages: int, page_size: int) -> DeviceState:
    """Rows of random lengths with pages up to them."""
    state = DeviceState(num_rows, max_pages, CPU)
    generator = torch.Generator().manual_seed(num_rows)
    state.seq_lens[:num_rows] = torch.randint(0, max_pages * page_size, (num_rows,), generator=generator)
    state.next_ids[:num_rows] = torch.randint(0, 1000, (num_rows,), generator=generator)
    state.page_table[:num_rows] = torch.randint(1, 10_000, (num_rows, max_pages), generator=generator)
    return state


@pytest.mark.parametrize(("num", "page_size"), [(1, 16), (5, 1), (130, 64)])
def test_a_steps_inputs_are_gathered(num: int, page_size: int) -> None:
    """Ids, places, slots and lengths are those of the rows, in any order; the spare row has no slot."""
    state = loaded(num + 3, 7, page_size)
    rows = torch.randperm(num + 3, generator=torch.Generator().manual_seed(1))[:num]
    rows = torch.cat((rows, torch.full((2,), state.padding_row)))
    state.page_table[rows[0]] = 0
    operands = rows, state.next_ids, state.seq_lens, state.page_table, page_size, state.padding_row
    want, found = plain.begin_step(*operands), kernels.begin_step(*operands)
    for name, mine, theirs in zip(("ids", "positions", "slots", "lens"), found, want, strict=True):
        assert torch.equal(mine, theirs), name
    assert found[2][-2:].tolist() == [-1, -1]
    assert found[2][0] == -1


@pytest.mark.sampled
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
@pytest.mark.parametrize("vocab", [7, 4096, 10_001])
def test_the_best_tokens_go_back_to_the_state(vocab: int, dtype: torch.dtype) -> None:
    """Tokens, lengths and rows not finite equal torch's; ties take the lowest id, the padding row nothing."""
    generator = torch.Generator().manual_seed(vocab)
    logits = torch.randn(6, vocab, generator=generator).to(dtype)
    logits[1, vocab - 1] = logits[1, 3] = 50.0
    logits[2, vocab // 2] = float("nan")
    logits[3, 2] = float("inf")
    logits[4] = float("-inf")
    states = [loaded(6, 4, 16) for _ in range(2)]
    rows = torch.tensor([4, 0, 2, 5, 1, states[0].padding_row])
    lens = torch.arange(10, 16)
    want, found = (
        finish(logits, rows, lens, state.next_ids, state.seq_lens, state.padding_row)
        for finish, state in zip((plain.finish_step, kernels.finish_step), states, strict=True)
    )
    assert torch.equal(found[1], want[1])
    assert found[1].tolist() == [False, False, True, True, True, False]
    good = ~want[1]
    assert torch.equal(found[0][good], want[0][good])
    assert found[0][1] == 3
    assert ((found[0] >= 0) & (found[0] < vocab)).all()
    assert torch.equal(states[1].seq_lens, states[0].seq_lens)
    live = rows[good & (rows != states[0].padding_row)]
    assert torch.equal(states[1].next_ids[live], states[0].next_ids[live])
    assert states[1].next_ids[-1] == 0


@pytest.mark.sampled
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("hidden_size", [5, 1024, 2500])
def test_a_token_that_is_not_finite_breaks_its_request(hidden_size: int, dtype: torch.dtype) -> None:
    """The kernel finds what the torch version finds: any token, empty chunks, padding that belongs to nobody."""
    starts = torch.tensor([0, 1, 5, 5, 9, 12], dtype=torch.int32)
    for token, value, request in ((0, math.nan, 0), (4, math.inf, 1), (5, -math.inf, 3), (11, math.nan, 4)):
        hidden = torch.randn(14, hidden_size, generator=torch.Generator().manual_seed(token)).to(dtype)
        hidden[0, 0] = torch.finfo(dtype).max
        hidden[token, hidden_size - 1] = value
        hidden[13] = math.nan
        for check in (plain.check_finite, kernels.check_finite):
            non_finite = torch.zeros(5, dtype=torch.bool)
            non_finite[2] = True  # by its logits
            check(hidden, starts, non_finite)
            assert non_finite.nonzero()[:, 0].tolist() == sorted((2, request)), (token, check)


def test_finite_tokens_break_nobody() -> None:
    """One request of one token, and the largest numbers that there are."""
    hidden = torch.full((1, 70), torch.finfo(torch.bfloat16).max, dtype=torch.bfloat16)
    for check in (plain.check_finite, kernels.check_finite):
        non_finite = torch.zeros(1, dtype=torch.bool)
        check(hidden, torch.tensor([0, 1], dtype=torch.int32), non_finite)
        assert not non_finite.any()
