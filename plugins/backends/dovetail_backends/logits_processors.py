"""The logits processors that Dovetail brings.

`no-repeat-ngram` forbids what would say any n tokens in a row a second time, as `no_repeat_ngram_size` of transformers
does (Paulus et al. 2017, arXiv:1705.04304, section 2.5). Nothing is read on the host, so a graph can record it.

K rows of a step, S device rows, V vocabulary size, W last tokens that are looked at.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from pydantic import BaseModel, Field

from dovetail.contracts.errors import ConfigError
from dovetail.contracts.logits import LogitsProcessor, LogitsRows

if TYPE_CHECKING:
    import torch
    from torch import Tensor

MAX_SIZE = 16
NOTHING = -1
"""In place of a token before a request's first."""


class NoRepeatParams(BaseModel):
    """What a request says: `"logits_processors": {"no-repeat-ngram": {"size": 3}}`."""

    size: int = Field(ge=1, le=MAX_SIZE, description="Tokens in a row that are not said twice; 1: no token is.")
    prompt: bool = Field(True, description="What stands in the prompt is not said again, either.")


@dataclass
class NoRepeatOptions:
    """Settings: `--no-repeat-ngram.window 4096`."""

    window: int = field(default=4096, metadata={"help": "Last tokens of a request in which a repetition is found."})


class NoRepeatNgram(LogitsProcessor):
    """Keeps the last W tokens of each row on the device, the token at place p in column p modulo W."""

    Params = NoRepeatParams
    Options = NoRepeatOptions
    capturable = True

    def __init__(self, vocab_size: int, num_rows: int, device: torch.device) -> None:
        """Make room for every row.

        Raises:
            ConfigError: The window holds less than the largest n-gram.
        """
        import torch

        width = self.options.window
        if width < MAX_SIZE:
            raise ConfigError(f"no-repeat-ngram: window {width} is less than {MAX_SIZE} tokens")
        self._width = width
        self._tokens = torch.full((num_rows, width), NOTHING, dtype=torch.int64, device=device)
        self._lens = torch.zeros(num_rows, dtype=torch.int64, device=device)
        self._sizes = torch.ones(num_rows, dtype=torch.int64, device=device)
        self._columns = torch.arange(width, device=device)

    def admit(self, row: int, params: NoRepeatParams, ids: Sequence[int], num_prompt: int) -> None:
        """Put what counts of its tokens into the row."""
        import torch

        known = ids if params.prompt else ids[num_prompt:]
        line = torch.full((self._width,), NOTHING, dtype=torch.int64)
        first = max(0, len(known) - self._width)
        if len(known):
            last = torch.tensor(list(known[first:]), dtype=torch.int64)
            line[torch.arange(first, len(known)) % self._width] = last
        self._tokens[row] = line.to(self._tokens.device)
        self._lens[row], self._sizes[row] = len(known), params.size

    def apply(self, logits: Tensor, batch: LogitsRows) -> None:
        """Forbid each token that followed the last `size - 1` tokens before."""
        import torch

        lens, sizes = self._lens[batch.rows][:, None], self._sizes[batch.rows][:, None]
        # In the order of their places, the last one at the end; what is before the first is NOTHING.
        known = self._tokens[batch.rows].gather(1, (lens + self._columns) % self._width)
        repeats = known != NOTHING
        for back in range(1, MAX_SIZE):
            before = torch.nn.functional.pad(known, (back, 0), value=NOTHING)[:, : self._width]
            same = (before == known[:, -back, None]) & (before != NOTHING)
            repeats &= same | (back >= sizes)
        logits.scatter_add_(1, known.clamp(min=0), torch.where(repeats, float("-inf"), 0.0))

    def drawn(self, batch: LogitsRows, ids: Tensor) -> None:
        """Append the tokens."""
        lens = self._lens[batch.rows]
        self._tokens.index_put_((batch.rows, lens % self._width), ids)
        self._lens.index_add_(0, batch.rows, lens.new_ones(()).expand_as(lens))
