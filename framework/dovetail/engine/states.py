"""Copies of recurrent states, as the KV-cache manager sees them: where they are taken.

A copy is the page at whose end it stands, so the tree finds, keeps and evicts it like the pages of a window. It belongs
to the request from the step that takes it until its pages go to the tree, and is nobody's need: where there is no room
for one, a step does without.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from math import lcm

from dovetail.contracts.cache import Reach, Recurrent

ZEROS = 0
"""The copy that a request without a cached prefix begins with."""
NEVER = 1 << 30
"""In place of the first page that is seen: a running request sees no copy, but the one that it begins with."""


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

    def aligned(self, start: int, num: int, most: int) -> int:
        """Return how many of `num` tokens a chunk takes that does not end its prompt.

        Chunks end where what is folded at once does, so that every schedule folds alike; where a step has not even room
        for that (`most`), they end anywhere.
        """
        if not self.groups or most < self.interval:
            return num
        return max(0, (start + num) // self.interval * self.interval - start)

    def places(self, start: int, end: int, num_known: int, branch: int) -> Iterator[int]:
        """Yield behind how many tokens to copy the states in a chunk from `start` to `end`.

        That is at its own end; where the prompt is left, so that whoever has the same one can go on; and where it left
        what others had before it (`branch`), for whoever begins like them.
        """
        last, parted = ((num // self.grid) * self.grid for num in (num_known - 1, branch))
        wanted = {last, parted} | ({end} if end % self.grid == 0 else set())
        yield from sorted(place for place in wanted if start < place <= end)
