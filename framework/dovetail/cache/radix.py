"""The prefix cache: a radix tree over token ids whose edges are whole pages.

A node owns the pages of its key. A request locks the path to the node it matched, so that nothing on it can be
evicted; unlocked leaves are evicted least recently used first. Only full pages are ever shared, so a shared page is
never written again.

Idea: SGLang's RadixAttention, arXiv:2312.07104.
"""

from __future__ import annotations

import heapq
import itertools
from array import array
from collections.abc import Iterable, Iterator, Sequence, Set
from dataclasses import dataclass, field


@dataclass(slots=True, eq=False)
class Node:
    """One edge of the tree. `key` holds `len(pages) * page_size` token ids."""

    key: array[int]
    pages: list[int]
    parent: Node | None
    children: dict[tuple[int, ...], Node] = field(default_factory=dict)
    num_locks: int = 0
    last_use: int = 0


class RadixTree:
    """Maps prefixes of token ids to pages. One root per salt: different salts never share.

    Counters are in pages: `num_evictable` can be evicted now, `num_locked` is held by running requests.
    """

    def __init__(self, page_size: int) -> None:
        self.page_size = page_size
        self.num_evictable = 0
        self.num_locked = 0
        self._roots: dict[str, Node] = {}
        self._clock = itertools.count(1)
        self._leaves: list[tuple[int, int, Node]] = []  # lazy heap of (last_use, tie-break, node)
        self._tie = itertools.count()

    @property
    def num_pages(self) -> int:
        """All pages that the tree owns."""
        return self.num_evictable + self.num_locked

    def match(self, ids: Sequence[int], salt: str = "") -> tuple[list[int], Node]:
        """Find the longest cached prefix of `ids`.

        Returns:
            The pages of the prefix, and the node where it ends (the root for none), to be locked by the caller
            before anything else touches the tree.
        """
        node, pages = self._root(salt), []
        now, pos, size = next(self._clock), 0, self.page_size
        while pos + size <= len(ids):
            child = node.children.get(tuple(ids[pos : pos + size]))
            if child is None:
                break
            shared = self._shared_pages(child, ids, pos)
            if shared < len(child.pages):
                child = self._split(child, shared)
            child.last_use = now
            pages += child.pages
            pos += shared * size
            node = child
        return pages, node

    def insert(self, ids: Sequence[int], pages: Sequence[int], salt: str = "") -> tuple[list[int], Node]:
        """Add a prefix of `len(pages)` full pages; the tree becomes the owner of those it did not have.

        Args:
            ids: At least `len(pages) * page_size` token ids.
            pages: Page ids holding their keys and values.
            salt: Which root.

        Returns:
            The tree's own pages for the whole prefix, and its last node. Where the tree's page differs from the
            caller's, the caller still owns its own and should free it.
        """
        end = len(pages) * self.page_size
        have, node = self.match(ids[:end], salt)
        if len(have) < len(pages):
            key = array("i", ids[len(have) * self.page_size : end])
            fresh = Node(key, list(pages[len(have) :]), node, last_use=next(self._clock))
            node.children[tuple(key[: self.page_size])] = fresh
            self.num_evictable += len(fresh.pages)
            self._push(fresh)
            have = have + fresh.pages
            node = fresh
        return have, node

    def lock(self, node: Node) -> None:
        """Protect the path from `node` to the root from eviction."""
        at: Node | None = node
        while at is not None and at.parent is not None:
            if at.num_locks == 0:
                self.num_evictable -= len(at.pages)
                self.num_locked += len(at.pages)
            at.num_locks += 1
            at = at.parent

    def unlock(self, node: Node) -> None:
        """Undo one `lock` of the same node."""
        at: Node | None = node
        while at is not None and at.parent is not None:
            at.num_locks -= 1
            if at.num_locks == 0:
                self.num_evictable += len(at.pages)
                self.num_locked -= len(at.pages)
                self._push(at)
            at = at.parent

    def evict(self, num_pages: int) -> list[int]:
        """Remove unlocked leaves, least recently used first, until `num_pages` pages are gone or none is left.

        Returns:
            The pages, now the caller's. May be a few more or fewer than asked for.
        """
        gone: list[int] = []
        while len(gone) < num_pages and self._leaves:
            stamp, _, node = heapq.heappop(self._leaves)
            parent = node.parent
            if parent is None or node.num_locks or node.children:
                continue  # stale entry: evicted, locked or grown since; unlock or a child's eviction pushes it again
            if stamp != node.last_use:
                self._push(node)
                continue
            gone += node.pages
            self.num_evictable -= len(node.pages)
            del parent.children[tuple(node.key[: self.page_size])]
            node.parent = None
            self._push(parent)
        return gone

    def clear(self) -> list[int]:
        """Evict everything that is not locked."""
        return self.evict(self.num_evictable)

    def nodes(self) -> Iterator[Node]:
        """Yield every node but the roots, parents first."""
        stack = [child for root in self._roots.values() for child in root.children.values()]
        while stack:
            node = stack.pop()
            yield node
            stack += node.children.values()

    def path(self, node: Node) -> list[int]:
        """Return the pages from the root to the end of `node`; empty if it is not in the tree any more."""
        pages: list[list[int]] = []
        at: Node | None = node
        while at is not None and at.parent is not None:
            pages.append(at.pages)
            at = at.parent
        return [page for part in reversed(pages) for page in part]

    def drop(self, pages: Set[int]) -> None:
        """Forget every node that holds one of `pages`, with all below it, locked or not: for repairs."""
        doomed = [node for node in self.nodes() if not pages.isdisjoint(node.pages)]
        for node in doomed:
            if node.parent is not None:
                node.parent.children.pop(tuple(node.key[: self.page_size]), None)

    def relock(self, ends: Iterable[Node]) -> None:
        """Count locks and pages anew, with one lock on the path to each of `ends`: for repairs."""
        self._leaves = []
        self.num_evictable = self.num_locked = 0
        for node in self.nodes():
            node.num_locks = 0
            self.num_evictable += len(node.pages)
            self._push(node)
        for node in ends:
            self.lock(node)

    def _root(self, salt: str) -> Node:
        root = self._roots.get(salt)
        if root is None:
            if len(self._roots) > 4096:
                self._roots = {key: node for key, node in self._roots.items() if node.children}
            root = self._roots[salt] = Node(array("i"), [], None)
        return root

    def _push(self, node: Node) -> None:
        if node.parent is not None and not node.children and node.num_locks == 0:
            heapq.heappush(self._leaves, (node.last_use, next(self._tie), node))

    def _shared_pages(self, child: Node, ids: Sequence[int], pos: int) -> int:
        """Count how many leading pages of `child.key` equal `ids[pos:]`; at least the first does."""
        size, shared = self.page_size, 1
        limit = min(len(child.pages), (len(ids) - pos) // size)
        while shared < limit:
            at = shared * size
            if array("i", ids[pos + at : pos + at + size]) != child.key[at : at + size]:
                break
            shared += 1
        return shared

    def _split(self, node: Node, num_pages: int) -> Node:
        """Cut `node` after `num_pages` pages; return the new upper part. Locks stay with both."""
        at = num_pages * self.page_size
        parent = node.parent
        if parent is None:
            raise ValueError("the root cannot be split")
        upper = Node(node.key[:at], node.pages[:num_pages], parent, num_locks=node.num_locks, last_use=node.last_use)
        upper.children[tuple(node.key[at : at + self.page_size])] = node
        parent.children[tuple(node.key[: self.page_size])] = upper
        node.key, node.pages, node.parent = node.key[at:], node.pages[num_pages:], upper
        return upper
