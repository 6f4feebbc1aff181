"""Who owns which page: the book that keeps allocator, radix tree, requests and device rows in agreement.

At any time: free + owned by the tree + owned by running requests == all pages.
"""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from dovetail.cache.allocator import PageAllocator
from dovetail.cache.pool import KVCache
from dovetail.cache.radix import RadixTree
from dovetail.engine.request import Request
from dovetail.runtime.device_state import DeviceState


@dataclass(frozen=True, slots=True)
class Repair:
    """What was wrong: pages without an owner, pages with two, and cached pages that nobody's lock should have held.

    `victims` are requests that shared a page; they own none now, and are to be ended.
    """

    num_lost: int
    num_doubled: int
    num_stuck: int
    victims: list[Request]

    def __bool__(self) -> bool:
        """Whether anything was wrong."""
        return bool(self.num_lost or self.num_doubled or self.num_stuck or self.victims)


class PageBook:
    """Page ownership of all requests. With `use_tree` off, nothing is shared."""

    def __init__(self, pool: KVCache, state: DeviceState, *, use_tree: bool) -> None:
        self.page_size = pool.page_size
        self.tree = RadixTree(pool.page_size)
        self.allocator = PageAllocator(pool.num_pages)
        self._pool = pool
        self._state = state
        self._use_tree = use_tree
        self._num_held = 0

    @property
    def num_available(self) -> int:
        """Pages that are free or can be made free now."""
        return self.allocator.num_free + self.tree.num_evictable

    @property
    def num_used(self) -> int:
        """Pages in the hands of running requests, shared ones counted once."""
        return self._num_held + self.tree.num_locked

    def pages_for(self, num_tokens: int) -> int:
        """Pages that hold `num_tokens` tokens."""
        return -(-num_tokens // self.page_size)

    def match(self, request: Request) -> None:
        """Find and lock a waiting request's cached prefix; at least its last token stays to be computed."""
        if not self._use_tree:
            return
        limit = len(request.ids) - 1
        if request.prompt_logprobs is not None:
            limit = min(limit, request.params.prompt_logprobs_start)
        pages, node = self.tree.match(request.ids[:limit], request.cache_salt)
        self.tree.lock(node)
        request.node, request.pages, request.num_tree_pages = node, pages, len(pages)

    def unmatch(self, request: Request) -> None:
        """Undo `match`: the request goes on waiting."""
        if request.node is not None:
            self.tree.unlock(request.node)
        request.node, request.pages, request.num_tree_pages = None, [], 0

    def admit(self, request: Request) -> None:
        """Give a matched request its row and the pages for its known tokens. There is room: the caller checked."""
        num = self.pages_for(len(request.ids)) - request.num_tree_pages
        request.row = self._state.take_row()
        request.pages = request.pages + self._take(num)
        request.computed_len = request.num_tree_pages * self.page_size
        request.on_device = False
        if request.cached_len < 0:
            request.cached_len = request.computed_len
        if request.prompt_logprobs is not None and request.num_output == 0:
            request.prompt_logprobs = []
        self._state.set_pages(request.row, 0, request.pages)

    def needs_page(self, request: Request) -> bool:
        """Whether the next token of a decoding request starts a new page."""
        return request.computed_len >= len(request.pages) * self.page_size

    def make_room(self, num_pages: int) -> bool:
        """Evict until `num_pages` are free; False if they cannot be."""
        short = num_pages - self.allocator.num_free
        if short > 0:
            self.allocator.free(self.tree.evict(short))
        return self.allocator.num_free >= num_pages

    def grow(self, request: Request) -> None:
        """Add one page to a decoding request. There is room: the caller made it."""
        request.pages += self._take(1)
        self._state.set_pages(request.row, len(request.pages) - 1, request.pages[-1:])

    def extend(self, request: Request, num_tokens: int) -> bool:
        """Add the pages that a running request needs for more known tokens; False, and nothing done, without room."""
        num = self.pages_for(len(request.ids) + num_tokens) - len(request.pages)
        if num > 0 and not self.make_room(num):
            return False
        for _ in range(num):
            self.grow(request)
        return True

    def share(self, request: Request) -> None:
        """Give the tree the full pages that a prefilling request has computed, so that others find them."""
        if self._use_tree and request.node is not None:
            self._insert(request)
            self._state.set_pages(request.row, 0, request.pages[: request.num_tree_pages])

    def release(self, request: Request) -> None:
        """Take everything back: full pages go to the tree, the rest to the free list, the row is cleared."""
        if self._use_tree and request.node is not None:
            self._insert(request)
        own = request.pages[request.num_tree_pages :]
        self.allocator.free(own)
        self._num_held -= len(own)
        if request.node is not None:
            self.tree.unlock(request.node)
        self._state.release_row(request.row)
        request.row, request.node, request.pages, request.num_tree_pages = -1, None, [], 0
        request.computed_len, request.on_device = 0, False

    def cut(self, pages: set[int]) -> None:
        """Forget what the tree has of `pages` and beyond, and zero it and them: what they hold may not be finite.

        No running request reads them any more. After steps that were launched, the device zeroes them.
        """
        gone = self.tree.cut(pages)
        self.allocator.free(gone)
        self._pool.scrub([*pages.union(gone)])

    def flush(self) -> int:
        """Forget every cached prefix that nobody uses; returns how many pages that freed."""
        gone = self.tree.clear()
        self.allocator.free(gone)
        return len(gone)

    def check(self, running: list[Request]) -> None:
        """Verify the book.

        Raises:
            RuntimeError: Pages were lost or doubled; the message has the counts.
        """
        held = [page for r in running for page in r.pages[r.num_tree_pages :]]
        total = self.allocator.num_free + self.tree.num_pages + len(held)
        if total != self.allocator.num_pages or len(held) != self._num_held or len(set(held)) != len(held):
            raise RuntimeError(
                f"page accounting: {self.allocator.num_free} free + {self.tree.num_pages} cached + {len(held)} held "
                f"(book says {self._num_held}) is not {self.allocator.num_pages}"
            )

    def is_sound(self, running: Sequence[Request]) -> bool:
        """Whether the counts agree: cheap, and enough to notice a page that was lost or taken twice."""
        held = sum(len(r.pages) - r.num_tree_pages for r in running)
        counted = self.allocator.num_free + self.tree.num_pages + held == self.allocator.num_pages
        return counted and held == self._num_held and bool(running or not self.tree.num_locked)

    def is_exact(self, running: Sequence[Request]) -> bool:
        """Whether every page has exactly one owner: some milliseconds per 100,000 pages."""
        held = (r.pages[r.num_tree_pages :] for r in running)
        owned = itertools.chain(self.allocator.free_pages, *(node.pages for node in self.tree.nodes()), *held)
        pages = np.fromiter(owned, dtype=np.int64)
        if pages.size and (pages.min() < 1 or pages.max() > self.allocator.num_pages):
            return False
        return bool((np.bincount(pages, minlength=self.allocator.num_pages + 1)[1:] == 1).all())

    def repair(self, running: Sequence[Request]) -> Repair:
        """Look at every page, and make the book right: one owner for each.

        A page that nobody owned becomes free. A page of two owners is taken from both: what the tree knew beyond it is
        forgotten, and requests that had it lose all their pages, for its contents may be another's. The caller ends
        them; nobody else is touched.
        """
        free, cached = list(self.allocator.free_pages), [page for node in self.tree.nodes() for page in node.pages]
        held = [page for r in running for page in r.pages[r.num_tree_pages :]]
        owned = Counter(cached + held)
        all_pages = range(1, self.allocator.num_pages + 1)
        shared = {page for page, num in owned.items() if num > 1 or page not in all_pages}
        victims = [r for r in running if not shared.isdisjoint(r.pages) or self._is_astray(r)]
        cached_by_requests = {page for r in running for page in r.pages[: r.num_tree_pages]}
        num_stuck = max(0, self.tree.num_locked - len(cached_by_requests))
        lost = set(all_pages) - owned.keys() - set(free)
        doubled = shared | (owned.keys() & set(free)) | {page for page, num in Counter(free).items() if num > 1}
        for request in victims:
            request.pages, request.num_tree_pages, request.node, request.computed_len = [], 0, None, 0
        self.tree.cut(shared)
        self.tree.relock(r.node for r in running if r.node is not None)
        held = [page for r in running for page in r.pages[r.num_tree_pages :]]
        self._num_held = len(held)
        self.allocator.reset(set(all_pages) - {p for node in self.tree.nodes() for p in node.pages} - set(held))
        return Repair(len(lost), len(doubled), num_stuck, victims)

    def _is_astray(self, request: Request) -> bool:
        """Whether a request reads pages as cached that its place in the tree does not have."""
        path = [] if request.node is None else self.tree.path(request.node)
        return path != request.pages[: request.num_tree_pages]

    def _take(self, num: int) -> list[int]:
        self.make_room(num)
        pages = self.allocator.allocate(num)
        self._num_held += num
        return pages

    def _insert(self, request: Request) -> None:
        """Move the request's computed full pages to the tree; its doubles of pages the tree had are freed."""
        # A step in flight computes the place of a token that is not known yet.
        num_full = min(request.computed_len, len(request.ids)) // self.page_size
        if num_full <= request.num_tree_pages or request.node is None:
            return
        pages, node = self.tree.insert(request.ids, request.pages[:num_full], request.cache_salt)
        self.tree.lock(node)
        self.tree.unlock(request.node)
        fresh = range(request.num_tree_pages, num_full)
        self.allocator.free([request.pages[i] for i in fresh if request.pages[i] != pages[i]])
        self._num_held -= len(fresh)
        request.pages = pages + request.pages[num_full:]  # a new list: the old one tells what a step in flight wrote
        request.node, request.num_tree_pages = node, num_full
