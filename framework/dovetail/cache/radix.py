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
    is_queued: bool = False
    """Has its entry in the queue of leaves."""


class RadixTree:
    """Maps prefixes of token ids to pages. One root per salt: different salts never share.

    Counters are in pages: `num_evictable` can be evicted now, `num_locked` is held by running requests. `version` rises
    whenever pages come or go.
    """

    def __init__(self, page_size: int) -> None:
        self.page_size = page_size
        self.num_evictable = 0
        self.num_locked = 0
        self.version = 0
        self._roots: dict[str, Node] = {}  # those that have children
        self._salts: dict[Node, str] = {}  # of these roots
        self._clock = itertools.count(1)
        self._leaves: list[tuple[int, int, Node]] = []  # lazy heap of (last_use, tie-break, node), one entry a node
        self._tie = itertools.count()

    @property
    def num_pages(self) -> int:
        """All pages that the tree owns."""
        return self.num_evictable + self.num_locked

    def match(self, ids: Sequence[int], salt: str = "") -> tuple[list[int], Node]:
        """Find the longest cached prefix of `ids`.

        Returns:
            The pages of the prefix, and the node where it ends (a root for none), to be locked by the caller
            before anything else touches the tree.
        """
        node, pages = self._roots.get(salt) or Node(array("i"), [], None), []
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

    def count(self, ids: Sequence[int], salt: str = "") -> int:
        """Return how many pages `match` would find; nothing is changed, not even what was used last."""
        node, num, size = self._roots.get(salt), 0, self.page_size
        while node is not None and (num + 1) * size <= len(ids):
            pos = num * size
            node = node.children.get(tuple(ids[pos : pos + size]))
            if node is not None:
                shared = self._shared_pages(node, ids, pos)
                num += shared
                if shared < len(node.pages):
                    break
        return num

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
            if not have:
                self._roots[salt], self._salts[node] = node, salt
            key = array("i", ids[len(have) * self.page_size : end])
            fresh = Node(key, list(pages[len(have) :]), node, last_use=next(self._clock))
            node.children[tuple(key[: self.page_size])] = fresh
            self.num_evictable += len(fresh.pages)
            self.version += 1
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
            node.is_queued = False
            parent = node.parent
            if parent is None or node.num_locks or node.children:
                continue  # locked or grown since; unlock or a child's eviction pushes it again
            if stamp != node.last_use:
                self._push(node)
                continue
            gone += node.pages
            self._detach(node)
            self._push(parent)
        return gone

    def cut(self, pages: Set[int]) -> list[int]:
        """Remove every node that holds one of `pages`, with all below it, locked or not.

        Returns:
            Their pages, now the caller's.
        """
        gone: list[int] = []
        for node in [node for node in self.nodes() if not pages.isdisjoint(node.pages)]:
            stack = [node] if node.parent is not None else []  # else it went with one above
            while stack:
                at = stack.pop()
                stack += at.children.values()
                gone += at.pages
                self._detach(at)
                at.children = {}
        if gone:
            self._queue_leaves()
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

    def relock(self, ends: Iterable[Node]) -> None:
        """Count locks and pages anew, with one lock on the path to each of `ends`: for repairs."""
        self.num_evictable = self.num_locked = 0
        for node in self.nodes():
            node.num_locks = 0
            self.num_evictable += len(node.pages)
        self._queue_leaves()
        for node in ends:
            self.lock(node)

    def _detach(self, node: Node) -> None:
        """Take a node out, and its root with the last child; `node` has a parent."""
        if node.num_locks:
            self.num_locked -= len(node.pages)
        else:
            self.num_evictable -= len(node.pages)
        self.version += 1
        parent, node.parent = node.parent, None
        if parent is not None:
            parent.children.pop(tuple(node.key[: self.page_size]), None)
            if not parent.children and parent in self._salts:
                del self._roots[self._salts.pop(parent)]

    def _queue_leaves(self) -> None:
        """Make the queue of leaves anew: entries of nodes that are gone would stay in it."""
        self._leaves = []
        for node in self.nodes():
            node.is_queued = False
            self._push(node)

    def _push(self, node: Node) -> None:
        if not node.is_queued and node.parent is not None and not node.children and node.num_locks == 0:
            node.is_queued = True
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
