"""Who owns which page: the book that keeps allocator, radix tree, requests and device rows in agreement.

At any time: free + owned by the tree + owned by running requests == all pages.
"""

from __future__ import annotations

from dovetail.cache.allocator import PageAllocator
from dovetail.cache.pool import PagedKVPool
from dovetail.cache.radix import RadixTree
from dovetail.engine.request import Request
from dovetail.runtime.device_state import DeviceState


class PageBook:
    """Page ownership of all requests. With `use_tree` off, nothing is shared."""

    def __init__(self, pool: PagedKVPool, state: DeviceState, *, use_tree: bool) -> None:
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

    def pages_to_compute(self, request: Request) -> int:
        """Pages that a matched request needs for its known tokens and the next one."""
        return self.pages_for(len(request.ids) + 1) - request.num_tree_pages

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

    def share(self, request: Request) -> None:
        """Give the tree the full pages that a prefilling request has computed, so that others find them."""
        if self._use_tree and request.node is not None:
            self._insert(request)
            self._state.set_pages(request.row, 0, request.pages[: request.num_tree_pages])

    def release(self, request: Request, *, scrub: bool = False) -> None:
        """Take everything back: full pages go to the tree, the rest to the free list, the row is cleared.

        With `scrub`, the request's own pages may hold numbers that are not finite: they are zeroed, not shared.
        """
        if scrub:
            self._pool.scrub(request.pages[request.num_tree_pages :])
        elif self._use_tree and request.node is not None:
            self._insert(request)
        own = request.pages[request.num_tree_pages :]
        self.allocator.free(own)
        self._num_held -= len(own)
        if request.node is not None:
            self.tree.unlock(request.node)
        self._state.release_row(request.row)
        request.row, request.node, request.pages, request.num_tree_pages = -1, None, [], 0
        request.computed_len, request.on_device = 0, False

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
        request.pages[:num_full] = pages
        request.node, request.num_tree_pages = node, num_full
