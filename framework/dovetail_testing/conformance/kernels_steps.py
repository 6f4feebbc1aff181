"""Operands of the operations that stand around a model in a step: rows of a device, each with what it asks for."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor

from dovetail.sdk.rows import FLOATS, MAX_BIAS, MAX_STOPS, MAX_TOP, NOTHING, NUMBERS

PAGE_SIZE, MAX_PAGES, NUM_MASKS = 16, 4, 3


class Draws(NamedTuple):
    """What operands are made by.

    Attributes:
        dims: Widths by letter.
        rows: T.
        device: Where they are.
        generator: Of their numbers.
        by_row: Makes `[T, width]` in the dtype asked for.
    """

    dims: Mapping[str, int]
    rows: int
    device: torch.device
    generator: torch.Generator
    by_row: Callable[..., Tensor]

    @property
    def spare(self) -> int:
        """The row of padding, behind two that no row of the batch has."""
        return self.rows + 2

    def ints(self, low: int, high: int, *shape: int, dtype: torch.dtype = torch.int64) -> Tensor:
        """Return numbers from `low` to below `high`."""
        return torch.randint(low, high, shape, generator=self.generator).to(self.device, dtype)

    def floats(self, *choices: float) -> Tensor:
        """Return one of some numbers for each device row."""
        at = torch.randint(0, len(choices), (self.spare + 1,), generator=self.generator)
        return torch.tensor(choices)[at].to(self.device)

    def device_rows(self) -> Tensor:
        """Return which device row each row of the batch has, the last one of several that of padding."""
        order = torch.randperm(self.spare, generator=self.generator)[: self.rows]
        if self.rows > 1:
            order[-1] = self.spare
        return order.to(self.device)

    def table(self) -> list[Tensor]:
        """Return `floats` and `numbers` of every device row."""
        vocab, every = self.dims.get("V", 63), self.spare + 1
        by_name = {
            "temperature": self.floats(0.0, 0.7, 1.3),
            "top_p": self.floats(1.0, 0.8),
            "min_p": self.floats(0.0, 0.05),
            "frequency_penalty": self.floats(0.0, 0.7, -0.4),
            "presence_penalty": self.floats(0.0, 0.6),
            "repetition_penalty": self.floats(1.0, 1.3, 0.8),
            "top_k": self.ints(-1, 7, every),
            "seed": self.ints(-(2**62), 2**62, every),
            "num_prompt": self.ints(1, 5, every),
            "min_tokens": self.ints(0, 9, every),
            "slot": torch.where(self.ints(0, 3, every) > 0, torch.arange(every, device=self.device), NOTHING),
            "num_top": self.ints(-1, min(vocab, MAX_TOP), every),
            "num_bias": self.ints(0, 4, every),
        }
        return [torch.stack([by_name[name] for name in FLOATS]), torch.stack([by_name[name] for name in NUMBERS])]

    def state(self) -> list[Tensor]:
        """Return `next_ids` and `seq_lens` of every device row; padding has none."""
        ids, lens = self.ints(0, 63, self.spare + 1), self.ints(5, 9, self.spare + 1)
        ids[self.spare], lens[self.spare] = 0, 0
        return [ids, lens]

    def masks(self) -> Tensor:
        """Return masks that allow some tokens, the first one among them."""
        words = self.ints(-(2**31), 2**31, NUM_MASKS, -(-self.dims["V"] // 32), dtype=torch.int32)
        words[:, 0] |= 1
        return words

    def logits(self) -> Tensor:
        """Return `[T, V]`: in other dtypes than float32 some are equal."""
        return 3 * self.by_row(self.dims["V"])


def _mask_logits(of: Draws) -> list[Any]:
    rows = torch.arange(0, of.rows, 2, device=of.device)
    words = of.ints(-(2**31), 2**31, len(rows), -(-of.dims["V"] // 32), dtype=torch.int32)
    return [of.logits().float(), words, rows]


def _draw(of: Draws) -> list[Any]:
    logits, [floats, numbers] = of.logits(), of.table()
    params = (*floats[:3, : of.rows].unbind(), *numbers[:2, : of.rows].unbind())
    return [logits, logits.max(-1).indices, *params, of.ints(0, 99, of.rows)]


def _draw_plainly(of: Draws) -> list[Any]:
    logits = of.logits()
    return [logits, logits.max(-1).indices, of.device_rows(), *of.state(), *of.table()]


def _draw_adjusted(of: Draws) -> list[Any]:
    vocab, every = of.dims["V"], of.spare + 1
    lines = of.ints(NOTHING - NUM_MASKS, NUM_MASKS, of.rows, dtype=torch.int32)
    stops = of.ints(-1, vocab, every, MAX_STOPS)
    biased = torch.arange(MAX_BIAS, device=of.device).expand(every, MAX_BIAS).remainder(vocab).int().contiguous()
    bias = torch.randn(every, MAX_BIAS, generator=of.generator).to(of.device)
    said = of.ints(0, 3, every, vocab, dtype=torch.int32)
    counts = [said, of.ints(0, 2, every, vocab, dtype=torch.bool)]
    given = [of.logits(), of.device_rows(), lines, of.masks(), *of.state(), *of.table()]
    return [*given, stops, biased, bias, *counts, of.spare]


def _begin_step(of: Draws) -> list[Any]:
    pages = of.ints(0, 99, of.spare + 1, MAX_PAGES, dtype=torch.int32)
    return [of.device_rows(), *of.state(), pages, PAGE_SIZE, of.spare]


def _finish_step(of: Draws) -> list[Any]:
    return [of.logits(), of.device_rows(), of.ints(1, 99, of.rows), *of.state(), of.spare]


def _check_finite(of: Draws) -> list[Any]:
    hidden = of.by_row(of.dims["H"]).clone()
    hidden[of.rows // 2 :: 5, -1] = float("inf")
    ends = sorted({0, of.rows // 3, of.rows // 2, of.rows})
    starts = torch.tensor(ends, dtype=torch.int32, device=of.device)
    return [hidden, starts, torch.zeros(len(ends) - 1, dtype=torch.bool, device=of.device)]


def _write_changes(of: Draws) -> list[Any]:
    every, num = of.spare + 1, max(1, of.rows)  # a step that changes nothing sends nothing
    tables = of.ints(0, 99, 2, every, MAX_PAGES, dtype=torch.int32)
    places = torch.randperm(tables.numel(), generator=of.generator)[:num].to(of.device)
    rows = torch.randperm(every, generator=of.generator).to(of.device)
    cleared, taken = rows[: num // 3], rows[num // 3 : 2 * num // 3]
    floats, numbers = of.table()
    bits = (floats[:, taken] + 1.0).view(torch.int32).flatten()
    sent = [places, of.ints(0, 99, num), cleared, taken, bits, (numbers[:, taken] + 1).flatten()]
    sizes = num, len(cleared), len(taken)
    return [torch.cat([one.long() for one in sent]), tables, *of.state(), floats, numbers, *sizes]


STEP_OPERANDS: Mapping[str, Callable[[Draws], list[Any]]] = {
    "mask_logits": _mask_logits,
    "draw": _draw,
    "draw_plainly": _draw_plainly,
    "draw_adjusted": _draw_adjusted,
    "begin_step": _begin_step,
    "finish_step": _finish_step,
    "check_finite": _check_finite,
    "write_changes": _write_changes,
}


def read_back(found: Tensor, rows: Tensor, numbers: Tensor) -> Tensor:
    """Return what `draw_adjusted` says of rows `[T, PACKED]` as numbers, 0 where it means nothing."""
    num = numbers[NUMBERS.index("num_top")][rows][:, None]
    place = torch.arange(MAX_TOP, device=found.device)
    values = found[:, 1 : 2 + MAX_TOP].contiguous().view(torch.float32)
    is_read_back = torch.cat((num >= 0, num >= 0, place < num, place < num), dim=1)
    whole = torch.cat((found[:, :1].float(), values, found[:, 2 + MAX_TOP :].float()), dim=1)
    return torch.where(is_read_back, whole, 0.0)
