"""A node of the radix tree."""

from __future__ import annotations

from array import array
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
