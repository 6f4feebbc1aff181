"""A step's inputs, best tokens and check as kernels, launched in the ordinary way: see `pdl` on how a step begins."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

BLOCK = 4096
"""Logits that one program of the first pass looks at."""
HIDDEN_BLOCK = 1024
"""Numbers of a hidden state that a program looks at together."""


@triton.jit
def _begin_kernel(
    rows, next_ids, seq_lens, page_table, out, spare, stride, width, num, P: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = at < num
    row = tl.load(rows + at, mask=inside, other=0)
    place = tl.load(seq_lens + row, mask=inside, other=0)
    has_page = inside & (place // P < width)
    page = tl.load(page_table + row * stride + place // P, mask=has_page, other=0).to(tl.int64)
    slot = tl.where((row == spare) | (page == 0), -1, page * P + place % P)
    tl.store(out + at, tl.load(next_ids + row, mask=inside, other=0), mask=inside)
    tl.store(out + num + at, place, mask=inside)
    tl.store(out + 2 * num + at, slot, mask=inside)
    tl.store(out + 3 * num + at, place + 1, mask=inside)


def begin_step(
    rows: Tensor, next_ids: Tensor, seq_lens: Tensor, page_table: Tensor, page_size: int, spare: int
) -> tuple[Tensor, ...]:
    """See `dovetail.sdk.step.begin_step`."""
    num = rows.shape[0]
    out = torch.empty(4, num, dtype=torch.int64, device=rows.device)
    _begin_kernel[(triton.cdiv(num, 128),)](
        rows, next_ids, seq_lens, page_table, out, spare, page_table.stride(0), page_table.shape[1], num,
        P=page_size, BLOCK=128,
    )  # fmt: skip
    return out.unbind()


@triton.jit
def _best_kernel(logits, values, places, V, stride, num_blocks, BLOCK: tl.constexpr):
    """Largest logit of a block and its lowest id; NaN if there is one."""
    row, block = tl.program_id(0).to(tl.int64), tl.program_id(1)
    at = block * BLOCK + tl.arange(0, BLOCK)
    x = tl.load(logits + row * stride + at, mask=at < V, other=float("-inf")).to(tl.float32)
    is_nan = tl.max((x != x).to(tl.int32), 0)
    x = tl.where(x != x, float("-inf"), x)
    best = tl.max(x, 0)
    place = tl.min(tl.where(x == best, at, V - 1), 0)
    tl.store(values + row * num_blocks + block, tl.where(is_nan > 0, float("nan"), best))
    tl.store(places + row * num_blocks + block, place)


@triton.jit
def _finish_kernel(
    values, places, rows, lens, ids, non_finite, next_ids, seq_lens, spare, V, num_blocks, BLOCKS: tl.constexpr,
):  # fmt: skip
    i = tl.program_id(0)
    at = tl.arange(0, BLOCKS)
    inside = at < num_blocks
    x = tl.load(values + i * num_blocks + at, mask=inside, other=float("-inf"))
    place = tl.load(places + i * num_blocks + at, mask=inside, other=0)
    is_nan = tl.max((x != x).to(tl.int32), 0) > 0
    x = tl.where(x != x, float("-inf"), x)
    best = tl.max(x, 0)
    token = tl.min(tl.where((x == best) & inside, place, V - 1), 0).to(tl.int64)
    tl.store(ids + i, token)
    tl.store(non_finite + i, is_nan | (tl.abs(best) == float("inf")))
    row = tl.load(rows + i)
    if row != spare:
        tl.store(next_ids + row, token)
        tl.store(seq_lens + row, tl.load(lens + i))


def finish_step(
    logits: Tensor, rows: Tensor, lens: Tensor, next_ids: Tensor, seq_lens: Tensor, spare: int
) -> tuple[Tensor, Tensor]:
    """See `dovetail.sdk.step.finish_step`."""
    num, vocab = logits.shape
    num_blocks = triton.cdiv(vocab, BLOCK)
    values = torch.empty(num, num_blocks, dtype=torch.float32, device=logits.device)
    places = torch.empty(num, num_blocks, dtype=torch.int32, device=logits.device)
    ids = torch.empty(num, dtype=torch.int64, device=logits.device)
    non_finite = torch.empty(num, dtype=torch.bool, device=logits.device)
    _best_kernel[(num, num_blocks)](logits, values, places, vocab, logits.stride(0), num_blocks, BLOCK=BLOCK)
    _finish_kernel[(num,)](
        values, places, rows, lens, ids, non_finite, next_ids, seq_lens, spare, vocab, num_blocks,
        BLOCKS=triton.next_power_of_2(num_blocks),
    )  # fmt: skip
    return ids, non_finite


@triton.jit(do_not_specialize=["num"])
def _check_kernel(hidden, starts, non_finite, num, H, stride, CHUNKS: tl.constexpr, BLOCK: tl.constexpr):
    """One token: if a number of its hidden state is not finite, its request is non_finite."""
    token = tl.program_id(0)
    at = tl.arange(0, BLOCK)
    num_bad = 0
    for begin in range(0, H, BLOCK):
        x = tl.load(hidden + token.to(tl.int64) * stride + begin + at, mask=begin + at < H, other=0.0).to(tl.float32)
        num_bad += tl.sum(tl.where(tl.abs(x) < float("inf"), 0, 1), 0)
    request = tl.arange(0, CHUNKS)
    ends = tl.load(starts + 1 + request, mask=request < num, other=0)
    mine = tl.sum(((ends <= token) & (request < num)).to(tl.int32), 0)
    tl.store(non_finite + mine, True, mask=(num_bad > 0) & (mine < num))


def check_finite(hidden: Tensor, starts: Tensor, non_finite: Tensor) -> None:
    """See `dovetail.sdk.step.check_finite`."""
    num = non_finite.shape[0]
    _check_kernel[(hidden.shape[0],)](
        hidden, starts, non_finite, num, hidden.shape[1], hidden.stride(0),
        CHUNKS=triton.next_power_of_2(max(num, 1)), BLOCK=HIDDEN_BLOCK,
    )  # fmt: skip
