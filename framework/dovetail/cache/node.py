"""A node of the radix tree."""

from __future__ import annotations

from array import array
from collections.abc import Iterator, Sequence, Set
from dataclasses import dataclass, field

Pages = list[list[int]]
"""Of each cache group."""


@dataclass(slots=True, eq=False)
class Node:
    """One edge of the tree: `key` holds the token ids of its pages.

    Attributes:
        pages: Of each group, a page for each place of the key, 0 where it is not cached. Of a `Recurrent` group, the
            copy of the state as it is where that page ends.
        end: Pages from the root to its end.
        is_queued: Has its entry in the queue of leaves.
    """

    key: array[int]
    pages: Pages
    parent: Node | None
    end: int = 0
    children: dict[tuple[int, ...], Node] = field(default_factory=dict)
    num_locks: int = 0
    last_use: int = 0
    is_queued: bool = False

    def upward(self) -> Iterator[Node]:
        """Yield this node and those above it; no root."""
        at = self
        while at.parent is not None:
            above = at.parent
            yield at
            at = above


def has_any(pages: Pages, wanted: Sequence[Set[int]]) -> bool:
    """Whether some of `pages` are among those `wanted` of each group."""
    return any(not bad.isdisjoint(own) for own, bad in zip(pages, wanted, strict=True))
