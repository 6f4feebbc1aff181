"""Masks on the logits: every way of applying them does what the reference does."""

from __future__ import annotations

import math
import os
import subprocess
import sys

import numpy as np
import pytest
import torch
from warm_starts import CODE

from dovetail.contracts.grammar import Vocabulary
from dovetail.grammar.matching.bitmask import fill_masks
from dovetail.grammar.matching.constraint import Constraint, TokenSets
from dovetail.grammar.matching.reasoning_gate import make_gate
from dovetail.messages import MarkedThinking, Marker
from dovetail.runtime.sampling.masks import MaskBuffer
from dovetail.sdk.masks import full_row, has_bit, ids_of, new_row, set_bit
from dovetail.sdk.step import mask_logits as apply_mask_reference
from dovetail_backends.kernels.cpu import mask_logits_by_table

apply_mask_cpu = mask_logits_by_table()
SIZES = [1, 31, 32, 33, 63, 100, 2000, 4097]

KERNEL = """
import torch
from dovetail.sdk.step import mask_logits as apply_mask_reference
from dovetail_backends.kernels.triton.mask import mask_logits as apply_mask_triton
torch.manual_seed(0)
for size in (1, 33, 100, 4097, 9000):
    logits = torch.randn(5, size)
    mask = torch.randint(-2**31, 2**31, (3, (size + 31) // 32), dtype=torch.int64).to(torch.int32)
    rows = torch.tensor([0, 2, 4])
    logits[:, ::7], logits[:, 1::7] = float("nan"), float("inf")
    want, got = logits.clone(), logits.clone()
    apply_mask_reference(want, mask, rows)
    apply_mask_triton(got, mask, rows)
    if not torch.allclose(want, got, rtol=0, atol=0, equal_nan=True):
        raise SystemExit(f"size {size} differs")
"""


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("rows", [[0, 1, 2, 3], [1, 3], [2]])
def test_the_cpu_path_equals_the_reference(size: int, rows: list[int]) -> None:
    """All rows or some, vocabularies off multiples of 32: the same logits are -inf, the others untouched."""
    torch.manual_seed(size)
    logits = torch.randn(4, size)
    mask = torch.randint(-(2**31), 2**31, (len(rows), (size + 31) // 32), dtype=torch.int64).to(torch.int32)
    want, got = logits.clone(), logits.clone()
    apply_mask_reference(want, mask, torch.tensor(rows))
    apply_mask_cpu(got, mask, torch.tensor(rows))
    assert torch.equal(want, got)
    for place, row in enumerate(rows):
        allowed = {t for t in range(size) if has_bit(mask[place].numpy(), t)}
        assert {t for t in range(size) if got[row, t] > float("-inf")} == allowed


def test_numbers_that_are_not_finite_can_be_found_behind_a_mask() -> None:
    """NaN and infinity are NaN where they are banned, and themselves where they are allowed."""
    logits = torch.tensor([[math.nan, math.nan, math.inf, math.inf, 1.0, 1.0, -math.inf, -math.inf]])
    mask = torch.tensor([[0b10101010]], dtype=torch.int32)
    want = torch.tensor([[math.nan, math.nan, math.nan, math.inf, -math.inf, 1.0, -math.inf, -math.inf]])
    for apply in (apply_mask_reference, apply_mask_cpu):
        got = logits.clone()
        apply(got, mask, torch.tensor([0]))
        assert torch.allclose(got, want, rtol=0, atol=0, equal_nan=True)


def test_the_triton_kernel_equals_the_reference() -> None:
    """In Triton's interpreter, at sizes off powers of two."""
    environment = {**os.environ, "TRITON_INTERPRET": "1"}
    done = subprocess.run([sys.executable, CODE, KERNEL], env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


@pytest.mark.gpu
def test_the_triton_kernel_on_a_device() -> None:
    """As above, on CUDA, with a vocabulary of real size and many rows."""
    from dovetail_backends.kernels.triton.mask import mask_logits as apply_mask_triton

    logits = torch.randn(64, 151_937, device="cuda")
    mask = torch.randint(-(2**31), 2**31, (64, 4749), dtype=torch.int64, device="cuda").to(torch.int32)
    rows = torch.arange(64, device="cuda")
    want = logits.clone()
    apply_mask_reference(want, mask, rows)
    apply_mask_triton(logits, mask, rows)
    assert torch.equal(want, logits)


@pytest.mark.parametrize("size", SIZES)
def test_rows_of_bits(size: int) -> None:
    """Bits set are bits listed, and a full row has none behind the last token."""
    wanted = sorted({0, size - 1, size // 2})
    row = new_row(size, wanted)
    assert ids_of(row) == wanted
    set_bit(row, size - 1)
    assert ids_of(row) == wanted
    assert ids_of(full_row(size)) == list(range(size))


START, END = Marker("<think>", (364,)), Marker("</think>", (365,))


@pytest.fixture
def sets(small: Vocabulary) -> TokenSets:
    return TokenSets(small)


def row_of(constraint: Constraint, small: Vocabulary) -> set[int] | None:
    row = np.zeros(small.mask_words, dtype=np.int32)
    return set(ids_of(row)) if constraint.fill(row, False) else None


def test_a_gate_follows_a_marker_spelled_in_any_tokens(small: Vocabulary, sets: TokenSets) -> None:
    """Thinking that ends with a marker of text ends however tokens cut it, and rolls back."""
    end = Marker("[/T]", tuple(small.tokens.index(bytes([b])) for b in b"[/T]"))
    gate = make_gate(MarkedThinking(state="in", start=Marker("[T]", ()), end=end), small.tokens, constrained=False)
    ids = [small.tokens.index(bytes([b])) for b in b"a[/x[/T]"]
    assert all(gate.accept(token) for token in ids)
    assert gate.state == "out"
    gate.rollback(1)
    assert gate.state == "in"
    assert gate.accept(ids[-1])
    assert not gate.accept(ids[0])


def test_a_budget_forces_the_end_marker(small: Vocabulary, sets: TokenSets) -> None:
    """Past the budget the only token allowed is the end marker's next one; before it nothing is masked."""
    end = Marker("[/T]", tuple(small.tokens.index(bytes([b])) for b in b"[/T]"))
    gate = make_gate(MarkedThinking(state="in", start=START, end=end, budget=2), small.tokens, constrained=False)
    constraint = Constraint(sets, gate, None)
    a = small.tokens.index(b"a")
    for _ in range(2):
        assert row_of(constraint, small) is None
        assert constraint.accept(a) is None
    for token in end.ids:
        assert row_of(constraint, small) == {token}
        assert constraint.accept(token) is None
    assert gate.state == "out"
    assert gate.reasoning_tokens == 2


def test_masks_of_a_step_are_packed(small: Vocabulary, sets: TokenSets) -> None:
    """Rows without a constraint, and those that may say anything, take no place in the step's mask."""
    buffer = MaskBuffer(small.mask_words, torch.device("cpu"))
    thinking = MarkedThinking(state="in", start=START, end=END, budget=0)
    forced = Constraint(sets, make_gate(thinking, small.tokens, constrained=False), None)
    free = Constraint(
        sets, make_gate(MarkedThinking(state="in", start=START, end=END), small.tokens, constrained=False), None
    )
    mask_of, _ = fill_masks([None, free, forced, None], [False] * 4, buffer.lend)
    assert mask_of.tolist() == [-1, -1, 0, -1]
    mask = buffer.mask_of(mask_of)
    assert mask is not None
    assert mask.rows.tolist() == [2]
    assert ids_of(mask.words[0].numpy()) == [365]
    assert buffer.mask_of(fill_masks([None, free], [False, False], buffer.lend)[0]) is None
    many = buffer.mask_of(fill_masks([forced] * 40, [False] * 40, buffer.lend)[0])
    assert many is not None
    assert many.words.shape == (40, small.mask_words)


def test_masks_are_written_once(small: Vocabulary, sets: TokenSets) -> None:
    """256 rows: what grammars wrote is what is applied here, or sent to a device, with no second copy on the host."""
    buffer = MaskBuffer(small.mask_words, torch.device("cpu"), 256)
    thinking = MarkedThinking(state="in", start=START, end=END, budget=0)
    rows = [Constraint(sets, make_gate(thinking, small.tokens, constrained=False), None) for _ in range(256)]
    lent: list[np.ndarray] = []

    def lend(num: int) -> np.ndarray:
        lent.append(buffer.lend(num))
        return lent[-1]

    mask = buffer.mask_of(fill_masks(rows, [False] * 256, lend)[0])
    assert mask is not None
    assert len(lent) == 1
    assert mask.words.numpy().__array_interface__["data"] == lent[0].__array_interface__["data"]
    assert ids_of(mask.words[255].numpy()) == [365]
    buffer.send(256)
    assert torch.equal(buffer.sent, mask.words)
