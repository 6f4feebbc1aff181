"""An executor that is a script: no model, no tensors. A token is a function of its row's tokens so far.

It keeps what a device would know (page tables, lengths, next tokens, who is in a row) from the messages alone, and
fails the test where they leave something unsaid: a page that is missing, a row that nobody was admitted to, a step out
of order.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from typing import Any

import numpy as np
import numpy.typing as npt

from dovetail.contracts.cache import FULL
from dovetail.messages.executor import StepError
from dovetail.messages.step import (
    AT_DEVICE,
    POOL,
    SAMPLE,
    ExecutorInfo,
    GraphKey,
    PrepareResult,
    StepInput,
    StepLate,
    StepOutput,
)

VOCAB = 97
HIDDEN = 4
ENDS = (VOCAB - 1,)
"""The token that ends a reply."""


def next_token(seed: int, tokens: tuple[int, ...]) -> int:
    """The token that follows others."""
    return (sum((i + 1) * token for i, token in enumerate(tokens)) * 31 + seed * 7 + len(tokens)) % (VOCAB - 1)


def state_of(tokens: tuple[int, ...]) -> int:
    """The final hidden state of the last of some tokens, the same number in all its places."""
    return next_token(0, tokens)


def num_drafts(step: StepInput, at: int) -> int:
    """Of a row of a step."""
    return 0 if step.num_drafts is None else int(step.num_drafts[at])


def drafted_rows(step: StepInput) -> set[int]:
    """Device rows of which a step verifies drafts."""
    return {int(row) for at, row in enumerate(step.rows) if num_drafts(step, at)}


class ScriptExecutor:
    """Computes every step at once; what came of it waits to be read.

    Attributes:
        steps: All that were launched.
        late: What came late.
        finite: Says of a step and a row's place in it whether its numbers are finite.
        fails: Says of a step whether it cannot be launched.
        contents: Of each page, by offset, the token whose keys and values stand there.
    """

    def __init__(self, *, num_pages: int, page_size: int, context_len: int = 200) -> None:
        self.steps: list[StepInput] = []
        self.late: list[StepLate] = []
        self.finite: Callable[[StepInput, int], bool] = lambda step, at: True
        self.fails: Callable[[StepInput], bool] = lambda step: False
        self.contents: dict[int, dict[int, int]] = {}
        self.tables: dict[int, dict[int, int]] = {}
        self.admits: dict[int, Any] = {}
        self.lens: dict[int, int] = {}
        self.nexts: dict[int, int] = {}
        self.gathered: dict[int, list[int]] = {}
        self._page_size = page_size
        self._flying: deque[tuple[StepInput, StepOutput]] = deque()
        self._open: StepInput | None = None
        self._masks = np.zeros((64, (VOCAB + 31) // 32), dtype=np.int32)
        self.info = ExecutorInfo(
            architecture="None", dtype="float32", device="cpu", vocab_size=VOCAB, hidden_size=HIDDEN,
            context_len=context_len, page_size=page_size, num_pages=(num_pages,), reaches=(FULL,),
            chunk_size=24,
            attention_backend="none", prefix_group=0, weight_bytes=0, kv_bytes=0, load_s=0.0, graphs=(),
            prepared=PrepareResult(),
        )  # fmt: skip

    def launch(self, step: StepInput) -> None:
        """Take what the step says of rows; then fail, or compute."""
        assert self._open is None, "a step is launched before the last one was chosen"
        assert not any(set(step.rows.tolist()) & drafted_rows(before) for before, _ in self._flying)
        assert len(self._flying) < 2
        self._apply(step)
        if self.fails(step):
            raise StepError("as the script has it", is_memory=False)
        self.steps.append(step)
        self._write(step)
        if step.waits.any():
            self._open = step
        else:
            self._finish(step, np.zeros(step.num_sampled, dtype=np.bool_))

    def masks(self, num: int) -> npt.NDArray[np.int32]:
        """Memory that is written over."""
        self._masks[:] = -1
        return self._masks[:num]

    def choose(self, late: StepLate) -> None:
        """Draw."""
        step, self._open = self._open, None
        assert step is not None
        assert step.step == late.step
        assert len(late.mask_of) == len(late.ends_only) == len(step.places)
        assert len(late.skip) == step.num_sampled
        self.late.append(late)
        self._finish(step, late.skip)

    def is_computing(self) -> bool:
        """Never."""
        return False

    def device_memory(self) -> tuple[int, int]:
        """No device."""
        return 0, 0

    def check(self) -> None:
        """There is nothing to look after."""

    def read(self) -> StepOutput:
        """The oldest."""
        return self._flying.popleft()[1]

    def close(self) -> None:
        """Nothing runs beside it."""

    def prepare(self, key: GraphKey | None = None) -> PrepareResult:
        """Nothing is captured here."""
        raise AssertionError("there is nothing to prepare")

    def _apply(self, step: StepInput) -> None:
        for page in step.zeroed[1].tolist():
            self.contents.pop(page, None)
        for row in step.cleared.tolist():
            self.tables[row], self.lens[row] = {}, 0
            self.admits.pop(row, None)
        for admit in step.admit:
            self.admits[admit.row] = admit
        for group, row, column, page in step.tables.T.tolist():
            assert group == 0
            self.tables.setdefault(row, {})[column] = page

    def _write(self, step: StepInput) -> None:
        """Put the new tokens into their pages."""
        at = 0
        for row, start, num in zip(step.rows.tolist(), step.start.tolist(), step.num_new.tolist(), strict=True):
            assert row in self.admits, "a row that nobody was admitted to"
            if start == AT_DEVICE:
                assert num == 1
                start, ids = self.lens[row], [self.nexts[row]]
            else:
                ids = step.ids[at : at + num].tolist()
                at += num
            for place, token in enumerate(ids, start):
                page = self.tables[row][place // self._page_size]
                assert page, "a token without a page"
                self.contents.setdefault(page, {})[place % self._page_size] = token
            self.lens[row] = start + num
            self._gather(row, start, num)
        assert at == len(step.ids)
        for at in range(len(step.rows)):
            if num_drafts(step, at):
                assert step.start[at] != AT_DEVICE
                assert step.task[at] == SAMPLE
                self.lens[int(step.rows[at])] -= num_drafts(step, at)

    def _gather(self, row: int, start: int, num: int) -> None:
        """Take the hidden states of a chunk, where all count: none may be missing before it."""
        if self.admits[row].pool == "mean":
            found = self.gathered[row] = self.gathered[row] if start else []
            assert len(found) == start, "a mean with a hole"
            tokens = self._tokens(row)
            found += [state_of(tokens[: place + 1]) for place in range(start, start + num)]

    def _pooled(self, row: int) -> npt.NDArray[np.float32]:
        tokens = self._tokens(row)
        states = self.gathered[row] if self.admits[row].pool == "mean" else [state_of(tokens)]
        return np.full(HIDDEN, np.mean(states), dtype=np.float32)

    def _tokens(self, row: int) -> tuple[int, ...]:
        """What stands in a row's pages."""
        size, table = self._page_size, self.tables[row]
        return tuple(self.contents[table[place // size]][place % size] for place in range(self.lens[row]))

    def _draw(self, step: StepInput, at: int, row: int) -> list[int]:
        """The row's token, and one more behind each of its drafts that is what was drawn."""
        stop = int(step.num_new[: at + 1][step.start[: at + 1] != AT_DEVICE].sum())
        drafts = step.ids[stop - num_drafts(step, at) : stop].tolist()
        drawn = []
        while True:
            drawn.append(next_token(self.admits[row].seed, self._tokens(row)))
            if len(drawn) > len(drafts) or drawn[-1] != drafts[len(drawn) - 1]:
                break
            self.lens[row] += 1
        self.nexts[row] = drawn[-1]
        return drawn

    def _finish(self, step: StepInput, skip: npt.NDArray[np.bool_]) -> None:
        """Draw the tokens of the rows that are sampled and not skipped."""
        tokens: list[int] = []
        num = np.zeros(len(step.rows), dtype=np.int32)
        finite = np.array([self.finite(step, at) for at in range(len(step.rows))], dtype=np.bool_)
        for at in range(step.num_sampled):
            row = int(step.rows[at])
            if not skip[at]:
                drawn = self._draw(step, at, row)
                if finite[at]:
                    tokens += drawn
                    num[at] = len(drawn)
        pooled = tuple(
            (at, self._pooled(int(step.rows[at])))
            for at in range(len(step.rows))
            if step.task[at] == POOL and finite[at]
        )
        output = StepOutput(
            step=step.step, num=num, tokens=np.array(tokens, dtype=np.int64), finite=finite, pooled=pooled,
        )  # fmt: skip
        self._flying.append((step, output))
