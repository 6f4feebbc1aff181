"""Penalties for what was said already, for all rows of a step at once.

N slots, one per request with penalties; K rows of the step that have one; V vocabulary size.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from dovetail.messages import SamplerParams
from dovetail.runtime.device.upload import upload


class TokenCounts:
    """What requests with penalties have read and said, on the device.

    `said` `[N, V]` int32 is how often each token was generated, `read` `[N, V]` bool which tokens the prompt has. Both
    grow with the number of requests that need a slot at the same time, unless there are `num_slots`: graphs read them
    where they stand.
    """

    def __init__(self, vocab_size: int, device: torch.device, num_slots: int = 0) -> None:
        """As many slots as given; without them, none yet."""
        self.said = torch.zeros(num_slots, vocab_size, dtype=torch.int32, device=device)
        self.read = torch.zeros(num_slots, vocab_size, dtype=torch.bool, device=device)
        self._is_fixed = num_slots > 0
        self._free = list(range(num_slots - 1, -1, -1))

    def take(self, prompt_ids: Sequence[int], said_ids: Sequence[int] = ()) -> History:
        """Return a fresh slot that knows the prompt, and what was generated before."""
        if not self._free:
            if self._is_fixed:
                raise ValueError(f"all {len(self.said)} slots are taken: one for each row was expected to suffice")
            self._grow()
        slot = self._free[-1]  # taken when it is written: if that fails, the step does, and the slot stays free
        self.said[slot].zero_()
        self.read[slot].zero_()
        if prompt_ids:
            self.read[slot].index_fill_(0, upload(prompt_ids, torch.int64, self.read.device), True)
        if said_ids:
            self.add([slot] * len(said_ids), upload(said_ids, torch.int64, self.said.device))
        return History(self, self._free.pop())

    def release(self, slot: int) -> None:
        """Take a slot back."""
        self._free.append(slot)

    def add(self, slots: Sequence[int], ids: Tensor) -> None:
        """Count one more token `ids[k]` `[K]` for each slot."""
        where = upload(slots, torch.int64, ids.device)
        self.said.index_put_((where, ids), torch.ones_like(ids, dtype=torch.int32), accumulate=True)

    def _grow(self) -> None:
        old, num = self.said.shape[0], max(4, 2 * self.said.shape[0])
        said, read = self.said, self.read
        self.said, self.read = said.new_zeros(num, said.shape[1]), read.new_zeros(num, read.shape[1])
        self.said[:old], self.read[:old] = said, read
        self._free = list(range(num - 1, old - 1, -1))


@dataclass(frozen=True, slots=True)
class History:
    """One request's slot of a table."""

    table: TokenCounts
    slot: int

    def release(self) -> None:
        """Give the slot back; it must not be used again."""
        self.table.release(self.slot)


def penalize(logits: Tensor, histories: Sequence[History], params: Sequence[SamplerParams]) -> Tensor:
    """Frequency and presence over the output; repetition (arXiv:1909.05858) over prompt and output.

    Args:
        logits: `[K, V]` float32; not changed.
        histories: One per row, all of one table.
        params: One per row.
    """
    table, device = histories[0].table, logits.device
    slots = upload([history.slot for history in histories], torch.int64, device)
    numbers = [[p.frequency_penalty, p.presence_penalty, p.repetition_penalty] for p in params]
    frequency, presence, repetition = upload(
        [x for row in zip(*numbers, strict=True) for x in row], torch.float32, device
    ).view(3, -1, 1)
    said = table.said[slots]
    has_said = said > 0
    scaled = torch.where(logits > 0, logits / repetition, logits * repetition)
    out: Tensor = torch.where(table.read[slots] | has_said, scaled, logits)
    out -= frequency * said + presence * has_said
    return out
