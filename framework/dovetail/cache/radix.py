"""The prefix cache: a radix tree over token ids whose edges are whole pages, of every cache group.

A node owns the pages of its key, of each group those that are cached: a group whose layers see everything has all of
them, the others have holes (`cache/partial.py`). A request locks the path to the node it matched, so that nothing on it
can be removed; unlocked leaves are evicted least recently used first. Only full pages are ever shared, so a shared page
is never written again.

Idea: SGLang's RadixAttention, arXiv:2312.07104.
"""

from __future__ import annotations

import heapq
import itertools
from array import array
from collections.abc import Iterable, Iterator, Sequence, Set

from dovetail.cache.node import Node, Pages, has_any
from dovetail.cache.partial import PartialGroup
from dovetail.contracts.cache import FULL, Full, Reach
from dovetail.contracts.observers import CacheEvent


class RadixTree:
    """Maps prefixes of token ids to pages. One root per salt: different salts never share.

    Pages of a prefix are a list for each group, as long as the prefix has pages; 0 stands for one that is not cached.

    Attributes:
        num_evictable: Pages of a key, and so of each `Full` group, that can be evicted now.
        num_locked: Those on the paths of running requests.
        version: Rises whenever pages come or go.
        partial: What is kept of the groups that are not `Full`, by group.
        journal: Where the first group's pages are written down as they come and go; None for nowhere, as where that
            group is not `Full`.
    """

    def __init__(
        self, page_size: int, reaches: Sequence[Reach] = (FULL,), journal: list[CacheEvent] | None = None
    ) -> None:
        self.page_size = page_size
        self.num_groups = len(reaches)
        self.journal = journal if reaches and isinstance(reaches[0], Full) else None
        self.num_evictable = 0
        self.num_locked = 0
        self.version = 0
        self.partial = {
            g: PartialGroup(g, reach, page_size) for g, reach in enumerate(reaches) if not isinstance(reach, Full)
        }
        self._full = [g for g, reach in enumerate(reaches) if isinstance(reach, Full)]
        self._roots: dict[str, Node] = {}  # those that have children
        self._salts: dict[Node, str] = {}  # of these roots
        self._clock = itertools.count(1)
        self._leaves: list[tuple[int, int, Node]] = []  # lazy heap of (last_use, tie-break, node), one entry a node
        self._tie = itertools.count()

    def num_pages(self, group: int = 0) -> int:
        """All pages of a group that the tree owns."""
        partial = self.partial.get(group)
        return self.num_evictable + self.num_locked if partial is None else partial.num_pages

    def num_free_to_go(self, group: int = 0) -> int:
        """Pages of a group that can be evicted now."""
        partial = self.partial.get(group)
        return self.num_evictable if partial is None else partial.num_pages - partial.num_pinned

    def match(self, ids: Sequence[int], salt: str = "") -> tuple[Pages, Node]:
        """Find the longest cached prefix of `ids` that a request can go on from.

        Returns:
            The pages of the prefix that it will see, and the node where it ends (a root for none), to be locked by the
            caller before anything else touches the tree.
        """
        path, num = self._walk(ids, salt)
        if self.partial:
            num = self._reachable(path, num)
        node = self._ending_at(path, num, salt)
        now = next(self._clock)
        pages = self._used(path, now)
        for g, partial in self.partial.items():
            first = partial.first(num)
            pages[g] = [0] * first + partial.pages(node, first)
            partial.claim(node)
        return pages, node

    def count(self, ids: Sequence[int], salt: str = "") -> int:
        """Return how many pages `match` would find; nothing is changed, not even what was used last."""
        path, num = self._walk(ids, salt)
        return self._reachable(path, num) if self.partial else num

    def num_known(self, ids: Sequence[int], salt: str = "") -> int:
        """Return how many pages of `ids` stand in the tree, whether one can go on from their end or not."""
        return self._walk(ids, salt)[1]

    def insert(self, ids: Sequence[int], pages: Sequence[Sequence[int]], salt: str = "") -> tuple[Pages, Node]:
        """Add a prefix of full pages; the tree becomes the owner of those it did not have.

        Args:
            ids: At least as many token ids as the pages hold.
            pages: Of each group the pages with what it keeps of them, as many for each; 0 where the caller has none.
            salt: Which root.

        Returns:
            The tree's own pages where the caller has one, and the node of the prefix. Where the tree's page differs
            from the caller's, the caller still owns its own and should free it.
        """
        num, size = len(pages[0]), self.page_size
        path, have = self._walk(ids[: num * size], salt)
        node = self._ending_at(path, have, salt)
        now = next(self._clock)
        if have < num:
            if not path:
                self._roots[salt], self._salts[node] = node, salt
            key = array("i", ids[have * size : num * size])
            node = Node(key, [list(own[have:]) for own in pages], node, end=num, last_use=now)
            if node.parent is not None:
                node.parent.children[tuple(key[:size])] = node
            path.append(node)
            self.num_evictable += num - have
            self.version += 1
            if self.journal is not None:
                parent = path[-2].pages[0][-1] if len(path) > 1 else None
                self.journal.append(
                    CacheEvent(pages=list(node.pages[0]), token_ids=key.tolist(), parent=parent, cache_salt=salt)
                )
            self._push(node)
        found = self._used(path, now)
        for g, partial in self.partial.items():
            found[g], is_changed = partial.take(path, have, pages[g])
            self.version += is_changed
        return found, node

    def lock(self, node: Node, firsts: Sequence[int] = ()) -> None:
        """Protect the path from `node` to the root, and of each group in `partial` its pages from `firsts` on.

        These are cached, for who locks them has matched or inserted them.
        """
        for at in node.upward():
            if at.num_locks == 0:
                self.num_evictable -= len(at.pages[0])
                self.num_locked += len(at.pages[0])
            at.num_locks += 1
        for partial, first in zip(self.partial.values(), firsts, strict=bool(firsts)):
            partial.pin(node, first, node.end)

    def unlock(self, node: Node, firsts: Sequence[int] = ()) -> None:
        """Undo one `lock` of the same node, whose pages are pinned from `firsts` on by now."""
        for partial, first in zip(self.partial.values(), firsts, strict=bool(firsts)):
            partial.unpin(node, first, node.end)
        for at in node.upward():
            at.num_locks -= 1
            if at.num_locks == 0:
                self.num_evictable += len(at.pages[0])
                self.num_locked -= len(at.pages[0])
                self._push(at)
        if not self._full:
            self._prune(node)

    def evict(self, need: Sequence[int]) -> Pages:
        """Remove unused pages until `need` pages of each group are free, or no more can be freed.

        Of `Full` groups unlocked leaves go, least recently used first, with what other groups have for them.

        Returns:
            The pages of each group, now the caller's. May be a few more or fewer than asked for.
        """
        gone: Pages = [[] for _ in range(self.num_groups)]
        most = max((need[g] for g in self._full), default=0)
        num = 0
        while num < most and self._leaves:
            stamp, _, node = heapq.heappop(self._leaves)
            node.is_queued = False
            parent = node.parent
            if parent is None or node.num_locks or node.children:
                continue  # locked or grown since; unlock or a child's eviction pushes it again
            if stamp != node.last_use:
                self._push(node)
                continue
            num += len(node.pages[0])
            self._remove(node, gone)
            self._push(parent)
        for g, partial in self.partial.items():
            if len(gone[g]) < need[g]:
                pages, emptied = partial.evict(need[g] - len(gone[g]))
                gone[g] += pages
                self.version += bool(pages)
                for node in () if self._full else emptied:
                    self._prune(node)
        return gone

    def discard_nodes(self, pages: Sequence[Set[int]]) -> Pages:
        """Remove every node that holds one of `pages` of each group, with all below it, locked or not.

        Returns:
            Their pages, now the caller's.
        """
        gone: Pages = [[] for _ in range(self.num_groups)]
        held = [node for node in self.nodes() if has_any(node.pages, pages)]
        for top in held:
            above = top.parent
            if above is None:
                continue  # it went with one above
            for node in reversed(list(self._subtree(top))):
                self._remove(node, gone)
            if not self._full:
                self._prune(above)
        if held:
            self._queue_leaves()
        return gone

    def discard(self, pages: Sequence[Set[int]]) -> Pages:
        """As `discard_nodes`, but nodes that only lack pages of groups in `partial` then stay, with holes.

        That is enough where the readers of such a page are known: other pages of the node are valid.
        """
        gone = self.discard_nodes([set() if g in self.partial else own for g, own in enumerate(pages)])
        for g, partial in self.partial.items():
            found, emptied = partial.discard(list(self.nodes()), pages[g]) if pages[g] else ([], [])
            gone[g] += found
            self.version += bool(found)
            for node in () if self._full else emptied:
                self._prune(node)
        return gone

    def clear(self) -> Pages:
        """Evict everything that is not locked."""
        return self.evict([self.num_free_to_go(g) for g in range(self.num_groups)])

    def nodes(self) -> Iterator[Node]:
        """Yield every node but the roots, parents first."""
        for root in list(self._roots.values()):
            for child in root.children.values():
                yield from self._subtree(child)

    def path(self, node: Node) -> list[Node]:
        """Return the nodes from below the root to `node`; none if it is not in the tree any more."""
        return list(node.upward())[::-1]

    def relock(self, ends: Iterable[tuple[Node, Sequence[int]]]) -> None:
        """Recount locks, pins and pages, with one lock for each of `ends` (node, firsts): for repairs."""
        self.num_evictable = self.num_locked = 0
        nodes = list(self.nodes())
        for node in nodes:
            node.num_locks = 0
            self.num_evictable += len(node.pages[0])
        self._queue_leaves()
        for partial in self.partial.values():
            partial.recount(nodes)
        for node, firsts in ends:
            self.lock(node, firsts)

    def _used(self, path: Sequence[Node], now: int) -> Pages:
        """Note that nodes are used; returns their pages of `Full` groups."""
        pages: Pages = [[] for _ in range(self.num_groups)]
        for at in path:
            at.last_use = now
            for g in self._full:
                pages[g] += at.pages[g]
        return pages

    def _walk(self, ids: Sequence[int], salt: str) -> tuple[list[Node], int]:
        """Follow `ids` from the root: the nodes that agree, the last one perhaps in part, and how many pages do."""
        node, path, num, size = self._roots.get(salt), [], 0, self.page_size
        while node is not None and (num + 1) * size <= len(ids):
            pos = num * size
            node = node.children.get(tuple(ids[pos : pos + size]))
            if node is not None:
                path.append(node)
                num += self._shared_pages(node, ids, pos)
                if num < node.end:
                    break
        return path, num

    def _reachable(self, path: list[Node], num: int) -> int:
        """Return the largest number of pages, at most `num`, behind which every group has what is seen from there."""
        while num:
            while path and path[-1].end - len(path[-1].pages[0]) >= num:
                path.pop()
            hole = max(partial.last_hole(path[-1], num) for partial in self.partial.values())
            if hole < 0:
                break
            num = hole
        return num

    def _ending_at(self, path: list[Node], num: int, salt: str) -> Node:
        """Shorten `path` to `num` pages, splitting its last node if they end inside it; return that node."""
        while path and path[-1].end - len(path[-1].pages[0]) >= num:
            path.pop()
        if not path:
            return self._roots.get(salt) or Node(array("i"), [[] for _ in range(self.num_groups)], None)
        if num < path[-1].end:
            path[-1] = self._split(path[-1], num)
        return path[-1]

    def _subtree(self, top: Node) -> Iterator[Node]:
        """Yield a node and all below it, parents first."""
        stack = [top]
        while stack:
            node = stack.pop()
            yield node
            stack += node.children.values()

    def _remove(self, node: Node, gone: Pages) -> None:
        """Take a leaf out, and its root with the last child; add its pages to `gone`."""
        for g, own in enumerate(node.pages):
            partial = self.partial.get(g)
            gone[g] += own if partial is None else partial.forget(node)
        if node.num_locks:
            self.num_locked -= len(node.pages[0])
        else:
            self.num_evictable -= len(node.pages[0])
        self.version += 1
        if self.journal is not None:
            self.journal.append(CacheEvent(pages=list(node.pages[0])))
        parent, node.parent = node.parent, None
        if parent is not None:
            parent.children.pop(tuple(node.key[: self.page_size]), None)
            if not parent.children and parent in self._salts:
                del self._roots[self._salts.pop(parent)]

    def _prune(self, node: Node) -> None:
        """Remove a leaf without cached pages, then its parents likewise; nothing else does without `Full` groups."""
        for at in node.upward():
            if at.children or at.num_locks or any(map(any, at.pages)):
                return
            self._remove(at, [[] for _ in at.pages])

    def _queue_leaves(self) -> None:
        """Rebuild the queue of leaves, which would keep entries of removed nodes."""
        self._leaves = []
        for node in self.nodes():
            node.is_queued = False
            self._push(node)

    def _push(self, node: Node) -> None:
        is_leaf = node.parent is not None and not node.children and node.num_locks == 0
        if is_leaf and self._full and not node.is_queued:
            node.is_queued = True
            heapq.heappush(self._leaves, (node.last_use, next(self._tie), node))

    def _shared_pages(self, child: Node, ids: Sequence[int], pos: int) -> int:
        """Count how many leading pages of `child.key` equal `ids[pos:]`; at least the first does."""
        size = self.page_size
        limit = min(len(child.pages[0]), (len(ids) - pos) // size)
        theirs = array("i", ids[pos : pos + limit * size])
        if theirs == child.key:
            return limit
        low, high = 1, limit
        while low < high:
            middle = (low + high + 1) // 2
            if theirs[low * size : middle * size] == child.key[low * size : middle * size]:
                low = middle
            else:
                high = middle - 1
        return low

    def _split(self, node: Node, end: int) -> Node:
        """Cut `node` where `end` pages end; return the new upper part. Locks stay with both."""
        num = end - (node.end - len(node.pages[0]))
        at, parent = num * self.page_size, node.parent
        if parent is None:
            raise ValueError("the root cannot be split")
        upper = Node(
            node.key[:at],
            [own[:num] for own in node.pages],
            parent,
            end=end,
            num_locks=node.num_locks,
            last_use=node.last_use,
        )
        upper.children[tuple(node.key[at : at + self.page_size])] = node
        parent.children[tuple(node.key[: self.page_size])] = upper
        node.key, node.pages, node.parent = node.key[at:], [own[num:] for own in node.pages], upper
        for partial in self.partial.values():
            partial.split(node, upper)
        return upper
