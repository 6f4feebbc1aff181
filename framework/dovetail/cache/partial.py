"""What the prefix tree keeps of a group whose layers do not see everything: windows, chunks, states. Nodes have holes.

A request that continues a prefix needs only what its next token attends to: the pages of the last window or of the
open chunk, or one copy of the state. So a page is *pinned* while a running request sees it, by page and not by path. A
page is *claimed* by the nodes that a request can continue from with it. Pages with neither are evicted first. Then
whole claims are, of the least recently used node: half of a window is useless.
"""

from __future__ import annotations

import heapq
import itertools
from collections import OrderedDict
from collections.abc import Iterable, Iterator, Sequence, Set

from dovetail.cache.node import Node
from dovetail.contracts.cache import Reach, Recurrent


class PartialGroup:
    """The tree's pages of one group.

    Attributes:
        num_pages: All that the tree owns.
        num_pinned: Those that running requests see.
    """

    def __init__(self, group: int, reach: Reach, page_size: int) -> None:
        """Nothing is kept yet. `group` is its place in `Node.pages`."""
        self.num_pages = 0
        self.num_pinned = 0
        self._group, self._reach, self._page_size = group, reach, page_size
        self._pins: dict[int, int] = {}  # requests that see a page
        self._num_claims: dict[int, int] = {}  # nodes that claim a page
        self._claims: dict[Node, tuple[int, int]] = {}  # places from the root of what a node claims
        self._queue: list[tuple[int, int, int, Node]] = []  # lazy heap of (last_use, end, tie-break, node) by claims
        self._aside: list[Node] = []  # of which every page was pinned
        self._has_unpinned = False
        self._tie = itertools.count()
        self._loose: OrderedDict[Node, None] = OrderedDict()  # may have pages that are neither pinned nor claimed

    @property
    def num_spare(self) -> int:
        """Pages that nobody sees or claims, or so many less as are pinned."""
        return max(0, self.num_pages - self.num_pinned - len(self._num_claims))

    def first(self, num: int) -> int:
        """Return the first page that a request sees that continues behind `num` pages; the last one holds a state."""
        if isinstance(self._reach, Recurrent):
            return max(0, num - 1)
        return self._reach.start(num * self._page_size) // self._page_size

    def pages(self, node: Node, first: int) -> list[int]:
        """Return the pages from `first` on to the end of `node`."""
        return [page for _, _, page in self._places(node, first, node.end)][::-1]

    def last_hole(self, node: Node, num: int) -> int:
        """Return the last of the first `num` pages to `node` that is missing and seen from there, -1 if none is."""
        for at, i, page in self._places(node, self.first(num), num):
            if not page:
                return at.end - len(at.pages[0]) + i
        return -1

    def take(self, path: Sequence[Node], have: int, pages: Sequence[int]) -> tuple[list[int], bool]:
        """Own what the nodes of `path` lack of a request's `pages`; what stands from `have` on they own already.

        Returns:
            The tree's pages where the request has one, and whether the tree has more than before.
        """
        found, is_changed, start = [], False, 0
        for at in path:
            own, is_fresh = at.pages[self._group], start >= have
            for i, mine in enumerate(pages[start : at.end]):
                if mine and (is_fresh or not own[i]):
                    own[i], is_changed = mine, True
                    self.num_pages += 1
                    self._loosen(at)
                found.append(own[i] if mine else 0)
            start = at.end
        if is_changed:
            self._claim_path(path)
        return found, is_changed

    def _claim_path(self, path: Sequence[Node]) -> None:
        """Let nodes keep what is seen from their ends; of states, not where the only way on has a later one."""
        is_passed = False
        for at in reversed(path):
            is_passed = is_passed and len(at.children) == 1
            if is_passed and at in self._claims:
                self._unclaim(at)
            elif not is_passed:
                self.claim(at)
            is_passed = is_passed or (isinstance(self._reach, Recurrent) and any(at.pages[self._group]))

    def claim(self, node: Node) -> None:
        """Let a node keep what is seen from its end, if that is there: of states, the last one that it has."""
        first, last = self.first(node.end), node.end
        if isinstance(self._reach, Recurrent):
            own = node.pages[self._group]
            held = next((i for i in range(len(own) - 1, -1, -1) if own[i]), None)
            if held is None:
                return
            first = node.end - len(own) + held
            last = first + 1
        if self._claims.get(node) == (first, last) or first >= last or node.parent is None:
            return
        places = list(self._places(node, first, last))
        if not all(page for _, _, page in places):
            return
        if node in self._claims:
            self._unclaim(node)
        self._claims[node] = (first, last)
        for _, _, page in places:
            self._num_claims[page] = self._num_claims.get(page, 0) + 1
        self._push(node)

    def pin(self, node: Node, first: int, last: int) -> None:
        """A request sees the pages `first … last-1` of the path to `node`."""
        for _, _, page in self._places(node, first, last):
            if page:
                num = self._pins.get(page, 0)
                self._pins[page] = num + 1
                self.num_pinned += num == 0

    def unpin(self, node: Node, first: int, last: int) -> None:
        """It sees them no more."""
        for at, _, page in self._places(node, first, last):
            num = self._pins.pop(page, 0)
            if num > 1:
                self._pins[page] = num - 1
            elif num:
                self.num_pinned -= 1
                self._has_unpinned = True
                self._loosen(at)

    def evict(self, num: int) -> tuple[list[int], list[Node]]:
        """Evict `num` pages that no request sees, or fewer if there are not enough.

        Returns:
            The pages, now the caller's, and the nodes that lost some.
        """
        gone: list[int] = []
        losers: list[Node] = []
        while len(gone) < num:
            if self._loose:
                node = next(iter(self._loose))
                # Of states, each node loses its first one in turn: what stands near an end is of most use.
                gone += self._punch(node, 1 if isinstance(self._reach, Recurrent) else num - len(gone))
                losers.append(node)
                if node in self._loose:
                    self._loose.move_to_end(node)
            else:
                least = self._least_recent()
                if least is None:
                    break
                self._unclaim(least)
        return gone, losers

    def discard(self, nodes: Iterable[Node], pages: Set[int]) -> tuple[list[int], list[Node]]:
        """Drop pages of `nodes` whose contents are invalid, claimed or not; no request sees them.

        Returns:
            Those that the tree had, now the caller's, and the nodes that lost some.
        """
        for node, place in list(self._claims.items()):
            if any(page in pages for _, _, page in self._places(node, *place)):
                self._unclaim(node)
        gone: list[int] = []
        losers: list[Node] = []
        for node in nodes:
            own = node.pages[self._group]
            bad = [i for i, page in enumerate(own) if page in pages]
            if bad:
                gone += [own[i] for i in bad]
                losers.append(node)
            for i in bad:
                self.num_pinned -= self._pins.pop(own[i], 0) > 0
                own[i] = 0
        self.num_pages -= len(gone)
        return gone, losers

    def forget(self, node: Node) -> list[int]:
        """Free the pages of a leaf that leaves the tree, pinned or not."""
        if node in self._claims:
            self._unclaim(node)
        own = [page for page in node.pages[self._group] if page]
        for page in own:
            self.num_pinned -= self._pins.pop(page, 0) > 0
        self.num_pages -= len(own)
        self._loose.pop(node, None)
        return own

    def split(self, lower: Node, upper: Node) -> None:
        """A node was cut in two: what it claimed stays where it is, and one may go on from the upper part as well."""
        if lower in self._loose:
            self._loosen(upper)
        if lower in self._claims and self._claims[lower][1] <= upper.end and isinstance(self._reach, Recurrent):
            self._unclaim(lower)  # the last state of both stands in the upper part
        self.claim(upper)

    def recount(self, nodes: Iterable[Node]) -> None:
        """Recount pages and claims, without pins: for repairs."""
        self.num_pages = self.num_pinned = 0
        for kept in (self._pins, self._num_claims, self._claims, self._queue, self._aside, self._loose):
            kept.clear()
        for node in nodes:
            self.num_pages += sum(page != 0 for page in node.pages[self._group])
            self._loosen(node)
            self.claim(node)

    def _places(self, node: Node, first: int, last: int) -> Iterator[tuple[Node, int, int]]:
        """Yield holder, place in it, and page of the places `first … last-1` from the root, backwards."""
        at: Node | None = node
        while at is not None and at.parent is not None and at.end > first:
            own = at.pages[self._group]
            start = at.end - len(own)
            for i in range(min(last, at.end) - start - 1, max(first - start, 0) - 1, -1):
                yield at, i, own[i]
            at = at.parent

    def _unclaim(self, node: Node) -> None:
        first, last = self._claims.pop(node)
        for at, _, page in self._places(node, first, last):
            num = self._num_claims.pop(page, 1) - 1  # a page that a fault put here has none
            if num:
                self._num_claims[page] = num
            elif page not in self._pins:
                self._loosen(at)

    def _loosen(self, node: Node) -> None:
        self._loose.setdefault(node)

    def _punch(self, node: Node, num: int) -> list[int]:
        """Take at most `num` pages of a node that are neither pinned nor claimed; without more it leaves the queue."""
        gone: list[int] = []
        own = node.pages[self._group]
        for i, page in enumerate(own):
            if page and page not in self._pins and page not in self._num_claims:
                if len(gone) == num:
                    break
                own[i] = 0
                gone.append(page)
        else:
            del self._loose[node]
        self.num_pages -= len(gone)
        return gone

    def _push(self, node: Node) -> None:
        if len(self._queue) + len(self._aside) > 2 * len(self._claims) + 64:  # of nodes that are gone, mostly
            self._queue = [(at.last_use, at.end, next(self._tie), at) for at in self._claims]
            heapq.heapify(self._queue)
            self._aside = []
        else:
            heapq.heappush(self._queue, (node.last_use, node.end, next(self._tie), node))

    def _least_recent(self) -> Node | None:
        """Take the node out of the queue whose claim was used least recently, of those that no request sees whole."""
        if self._has_unpinned:
            self._has_unpinned = False
            for node in self._aside:
                self._push(node)
            self._aside = []
        while self._queue:
            stamp, _, _, node = heapq.heappop(self._queue)
            if node not in self._claims:
                continue
            if stamp != node.last_use:
                self._push(node)
            elif all(page in self._pins for _, _, page in self._places(node, *self._claims[node])):
                self._aside.append(node)
            else:
                return node
        return None
