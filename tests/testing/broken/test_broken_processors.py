"""Logits processors with one fault each: the kit names every fault."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from pydantic import BaseModel, Field
from torch import Tensor

from dovetail.contracts.logits import LogitsProcessor, LogitsRows
from dovetail_testing import check_class, conformance_class

ATTRS: dict[str, Any] = {"params": [{"by": 1.5}, {"by": 0.5}], "wrong_params": [{"by": -1}, {"by": "1"}, {}]}


class RightParams(BaseModel):
    by: float = Field(gt=0, le=10)


class Right(LogitsProcessor):
    """Lowers the token that was said last by so much more each time."""

    Params = RightParams
    capturable = True

    def __init__(self, vocab_size: int, num_rows: int, device: torch.device) -> None:
        self.by = torch.zeros(num_rows, device=device)
        self.last = torch.zeros(num_rows, dtype=torch.int64, device=device)

    def admit(self, row: int, params: Any, ids: Sequence[int], num_prompt: int) -> None:
        self.by[row], self.last[row] = params.by, ids[-1]

    def apply(self, logits: Tensor, batch: LogitsRows) -> None:
        last = self.last[batch.rows][:, None]
        logits.scatter_add_(1, last, -self.by[batch.rows][:, None])

    def drawn(self, batch: LogitsRows, ids: Tensor) -> None:
        self.last.index_copy_(0, batch.rows, ids)


class TakesAnything(Right):
    class Params(BaseModel):
        by: float = 1.0


class Normalises(Right):
    """Takes the mean of the whole batch out."""

    def apply(self, logits: Tensor, batch: LogitsRows) -> None:
        super().apply(logits, batch)
        logits -= logits.mean()


class ByPlace(Right):
    """Keeps what was said by the row's place in the batch."""

    def drawn(self, batch: LogitsRows, ids: Tensor) -> None:
        self.last[: len(ids)] = ids


class UpTo64(Right):
    def apply(self, logits: Tensor, batch: LogitsRows) -> None:
        super().apply(logits[:64], LogitsRows(batch.rows[:64], batch.positions[:64]))


class ForgetsWhatWasSaid(Right):
    """Begins with the prompt's last token, also where a reply has begun."""

    def admit(self, row: int, params: Any, ids: Sequence[int], num_prompt: int) -> None:
        super().admit(row, params, ids[:num_prompt], num_prompt)


class Remembers(Right):
    """Adds to what the row had."""

    def admit(self, row: int, params: Any, ids: Sequence[int], num_prompt: int) -> None:
        self.by[row], self.last[row] = self.by[row] + params.by, ids[-1]


class Divides(Right):
    def apply(self, logits: Tensor, batch: LogitsRows) -> None:
        super().apply(logits, batch)
        logits /= (batch.positions[:, None] != 9).float()


class Reads(Right):
    def apply(self, logits: Tensor, batch: LogitsRows) -> None:
        for i, row in enumerate(batch.rows.tolist()):
            logits[i, self.last[row]] -= self.by[row]


class Returns(Right):
    def apply(self, logits: Tensor, batch: LogitsRows) -> Any:
        return logits - 1


class Hoards(Right):
    def __init__(self, vocab_size: int, num_rows: int, device: torch.device) -> None:
        super().__init__(vocab_size, num_rows, device)
        self.seen: list[Any] = []

    def admit(self, row: int, params: Any, ids: Sequence[int], num_prompt: int) -> None:
        super().admit(row, params, ids, num_prompt)
        self.seen.append([[params]])


FAULTS = {
    "no bounds": (TakesAnything, "test_declares_what_requests_say", "is not refused"),
    "rows mix": (Normalises, "test_rows_do_not_depend_on_each_other", "is not what it is alone"),
    "by place, not by row": (ByPlace, "test_rows_do_not_depend_on_each_other", "is not what it is alone"),
    "wrong beyond 64 rows": (UpTo64, "test_rows_do_not_depend_on_each_other", "a row among 256 is not"),
    "returns a copy": (Returns, "test_rows_do_not_depend_on_each_other", "logits are changed in place"),
    "forgets what was said": (ForgetsWhatWasSaid, "test_history_is_all_that_there_is", "does not go on as it would"),
    "remembers": (Remembers, "test_rows_are_new_with_each_request", "remembers the request that had it before"),
    "divides by nothing": (Divides, "test_gives_no_nan", "gave NaN or +inf"),
    "reads rows": (Reads, "test_what_is_capturable_reads_nothing_on_the_host", "and reads a tensor: tolist()"),
    "keeps everything": (Hoards, "test_keeps_nothing_of_requests_that_left", "forget in release what admit has noted"),
}


def test_a_right_processor_passes() -> None:
    """The processor that the faults are made from has none."""
    report = check_class(conformance_class("logits_processor", plugin_class=Right, **ATTRS))
    assert report.passed, report.text()


@pytest.mark.first(5)
@pytest.mark.parametrize("fault", FAULTS)
def test_the_kit_names_a_processors_fault(fault: str, caught: Callable[..., None]) -> None:
    """A processor with one fault fails the test for it, with a message that names it."""
    plugin, test, message = FAULTS[fault]
    caught("logits_processor", plugin, test, message, select=test, **ATTRS)
