"""Top-a sampling: a token takes part if its probability is at least `a` times the square of the best one's.

The model's own probabilities count, before temperature.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from pydantic import BaseModel, Field

from dovetail.contracts import LogitsProcessor, LogitsRows

if TYPE_CHECKING:
    import torch


class TopAParams(BaseModel):
    """What a request says."""

    a: float = Field(0.2, ge=0, le=1)


class TopA(LogitsProcessor):
    """Needs nothing but each row's `a`, and reads nothing on the host."""

    Params = TopAParams
    capturable = True

    def __init__(self, vocab_size: int, num_rows: int, device: torch.device) -> None:
        """Make room for every row's number."""
        import torch

        self._a = torch.zeros(num_rows, device=device)

    def admit(self, row: int, params: TopAParams, ids: Sequence[int], num_prompt: int) -> None:
        """Keep it."""
        self._a[row] = params.a

    def apply(self, logits: torch.Tensor, batch: LogitsRows) -> None:
        """Forbid what is too unlikely; the best token never is."""
        probs = logits.softmax(dim=-1)
        least = self._a[batch.rows][:, None] * probs.amax(dim=-1, keepdim=True).square()
        logits.masked_fill_(probs < least, float("-inf"))
