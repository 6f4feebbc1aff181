"""Copies of recurrent states, as the KV-cache manager sees them: where they are taken.

A copy is the page at whose end it stands, so the tree finds, keeps and evicts it like the pages of a window. It belongs
to the request from the step that takes it until its pages go to the tree, and is nobody's need: where there is no room
for one, a step does without.

Some copies are sure to be of use: where a prompt ends, since a conversation goes on there, and where it left what
others had. Where a first prompt will be left by others is not known: it may be left by a short question, so it has
copies ever farther before its end, and whoever shares all but n tokens of it computes 2 n of its own. Such copies,
those at the ends of chunks, and those that a later one of the same conversation stands behind give way to others first
(`is_spare`).
"""

from __future__ import annotations

from collections.abc import Sequence
from math import lcm
from typing import NamedTuple

from dovetail.contracts.cache import Reach, Recurrent
from dovetail.messages.step import MAX_SAVES

ZEROS = 0
"""The copy that a request without a cached prefix begins with."""
NEVER = 1 << 30
"""In place of the first page that is seen: a running request sees no copy, but the one that it begins with."""
BACK = tuple(1 << k for k in range(MAX_SAVES - 3))
"""Grid steps before the last copy of a prompt, at which there are spare ones."""


class StatePlace(NamedTuple):
    """Where a copy is taken: behind so many tokens, and whether it is spare."""

    length: int
    is_spare: bool


class StateGrid:
    """Where copies stand.

    Attributes:
        groups: The recurrent groups.
        interval: Tokens that are folded into their states at once.
    """

    def __init__(self, reaches: Sequence[Reach], page_size: int) -> None:
        own = {g: reach for g, reach in enumerate(reaches) if isinstance(reach, Recurrent)}
        self.groups = tuple(own)
        self.interval = lcm(*(reach.interval for reach in own.values()))
        self.grid = lcm(page_size, self.interval)
        self._back = BACK if all(reach.in_place for reach in own.values()) else ()

    def aligned(self, start: int, num: int, most: int) -> int:
        """Return how many of `num` tokens a chunk takes that does not end its prompt.

        Chunks end where what is folded at once does, so that every schedule folds alike; where a step has not even room
        for that (`most`), they end anywhere.
        """
        if not self.groups or most < self.interval:
            return num
        return max(0, (start + num) // self.interval * self.interval - start)

    def places(self, start: int, end: int, num_known: int, branch: int) -> list[StatePlace]:
        """Return behind how many tokens to copy the states in a chunk from `start` to `end`, what is not spare first.

        That is where the prompt is left, so that whoever has the same one can go on; where it left what others had
        before it (`branch`), for whoever begins like them; before its end; and at the end of the chunk.
        """
        last, parted = ((num // self.grid) * self.grid for num in (num_known - 1, branch))
        spare = [last - steps * self.grid for steps in self._back] + ([end] if end % self.grid == 0 else [])
        each = dict.fromkeys([last, parted, *spare])
        return [StatePlace(at, at not in (last, parted)) for at in each if start < at <= end]
