"""Who owns which page: keeps allocators, radix tree, requests and device rows in agreement.

At any time, for each cache group: free + owned by the tree + owned by running requests == all pages. Whatever needs
pages of several groups gets all of them or none.

The lists of a request's pages are as long for each group, but that groups which do not see everything get pages with
each chunk, and have 0 for those that were given back as nothing that is still to come sees them. Of a recurrent group
they have copies of the state, at the page where each ends, until these are the tree's.
"""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence, Set
from dataclasses import dataclass
from math import lcm

import numpy as np

from dovetail.cache.node import Pages, has_any
from dovetail.cache.radix import RadixTree
from dovetail.contracts.cache import FULL, Reach, Recurrent
from dovetail.contracts.observers import CacheEvent
from dovetail.engine.device_rows import DeviceRows
from dovetail.engine.request import EngineRequest
from dovetail.messages.step import MAX_SAVES

# Hands out page ids of the KV pool. Host side only; a page has exactly one owner: free list, radix tree or request.


class PageAllocator:
    """A free list of page ids. Page 0 is the null page: never handed out, always zero, padding in page tables."""

    def __init__(self, num_pages: int) -> None:
        """Own pages `1 … num_pages-1`."""
        self.num_pages = num_pages - 1
        self.free_pages = list(range(num_pages - 1, 0, -1))
        """Pages that nobody owns, in the order in which they would be given back."""

    @property
    def num_free(self) -> int:
        """Pages that nobody owns."""
        return len(self.free_pages)

    def reset(self, free: Iterable[int]) -> None:
        """Replace the free list: for repairs."""
        self.free_pages = sorted(free, reverse=True)

    def allocate(self, n: int) -> list[int]:
        """Take `n` pages; the caller has made sure that there are enough.

        Raises:
            IndexError: Fewer than `n` pages are free. Nothing is taken.
        """
        left = len(self.free_pages) - n
        if left < 0:
            raise IndexError(f"{n} pages asked for, {len(self.free_pages)} are free")
        taken = self.free_pages[left:]
        del self.free_pages[left:]
        taken.reverse()
        return taken

    def free(self, pages: Sequence[int]) -> None:
        """Give pages back; each must have been allocated and not yet freed."""
        self.free_pages.extend(reversed(pages))


# Copies of recurrent states, as the KV-cache manager sees them: where they are taken.
#
# A copy is the page at whose end it stands, so the tree finds, keeps and evicts it like the pages of a window. It
# belongs to the request from the step that takes it until its pages go to the tree, and is nobody's need: where there
# is no room for one, a step does without.
#
# Some copies are sure to be of use: where a prompt ends, since a conversation goes on there, and where it left what
# others had. Where a first prompt will be left by others is not known: it may be left by a short question, so it has
# copies ever farther before its end, and whoever shares all but n tokens of it computes 2 n of its own. Such copies,
# those at the ends of chunks, and those that a later one of the same conversation stands behind give way to others
# first (`is_spare`).

ZEROS = 0
"""The copy that a request without a cached prefix begins with."""
NEVER = 1 << 30
"""In place of the first page that is seen: a running request sees no copy, but the one that it begins with."""
BACK = tuple(1 << k for k in range(MAX_SAVES - 3))
"""Grid steps before the last copy of a prompt, at which there are spare ones."""


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

    def places(self, start: int, end: int, num_known: int, branch: int) -> list[tuple[int, bool]]:
        """Return behind how many tokens to copy the states in a chunk from `start` to `end`, and whether that is spare.

        What is not spare comes first.

        That is where the prompt is left, so that whoever has the same one can go on; where it left what others had
        before it (`branch`), for whoever begins like them; before its end; and at the end of the chunk.
        """
        last, parted = ((num // self.grid) * self.grid for num in (num_known - 1, branch))
        spare = [last - steps * self.grid for steps in self._back] + ([end] if end % self.grid == 0 else [])
        each = dict.fromkeys([last, parted, *spare])
        return [(at, at not in (last, parted)) for at in each if start < at <= end]


@dataclass(frozen=True, slots=True)
class Repair:
    """What was wrong: pages without an owner, pages with two, and cached pages with a lock too many.

    `affected` are requests that shared a page; they own none now, and are to be ended.
    """

    num_lost: int
    num_doubled: int
    num_stuck: int
    affected: list[EngineRequest]

    def __bool__(self) -> bool:
        """Whether anything was wrong."""
        return bool(self.num_lost or self.num_doubled or self.num_stuck or self.affected)


class KVCacheManager:
    """Page ownership of all requests. With `use_tree` off, nothing is shared.

    The first group's layers see farthest, so its pages stand for tokens; there is none where nothing is cached. `grows`
    says whether a request has more pages the longer it is: not where no layer sees everything. `states` says where
    recurrent layers' states are copied.
    """

    def __init__(
        self,
        rows: DeviceRows,
        *,
        page_size: int,
        num_pages: Sequence[int],
        reaches: Sequence[Reach] = (FULL,),
        use_tree: bool = True,
        journal: list[CacheEvent] | None = None,
    ) -> None:
        """`num_pages` of each group are without its null page; `reaches` say how far back its layers see."""
        self.page_size = page_size
        self.tree = RadixTree(page_size, reaches, journal)
        self.allocators = [PageAllocator(num + 1) for num in num_pages]
        self.num_held = [0 for _ in self.allocators]
        self._full = [g for g in range(len(self.allocators)) if g not in self.tree.partial]
        self.states = StateGrid(reaches, page_size)
        self._sliding = [g for g in self.tree.partial if g not in self.states.groups]
        self._paged = [*self._full, *self._sliding]
        self._loading: list[EngineRequest] = []
        self.grows = bool(self._full)
        self.rows = rows
        self._use_tree = use_tree and bool(self.allocators)

    @property
    def num_pages(self) -> int:
        """Pages of the first group; 0 where nothing is cached."""
        return self.allocators[0].num_pages if self.allocators else 0

    @property
    def usage(self) -> float:
        """Share of the first group's pages in the hands of running requests; 0 where nothing is cached."""
        return self.num_used / self.num_pages if self.allocators else 0.0

    @property
    def num_available(self) -> int:
        """Pages of the first group that are free or can be made free now."""
        return self.allocators[0].num_free + self.tree.num_free_to_go() if self.allocators else 0

    @property
    def num_used(self) -> int:
        """Pages of the first group in the hands of running requests, shared ones counted once."""
        if not self.allocators:
            return 0
        return self.num_held[0] + self.tree.num_pages() - self.tree.num_free_to_go()

    def pages_for(self, num_tokens: int) -> int:
        """Pages that hold `num_tokens` tokens."""
        return -(-num_tokens // self.page_size)

    def whole(self, num_tokens: int) -> int:
        """Return how many leading tokens of a prompt the tree can keep, so that others go on behind them."""
        return num_tokens // self.states.grid * self.states.grid if self._use_tree else 0

    def is_cached(self, request: EngineRequest) -> bool:
        """Whether the tree has all of a request's known tokens, which fill whole pages."""
        return self.tree.count(request.ids, request.cache_salt) * self.page_size >= len(request.ids)

    def match(self, request: EngineRequest) -> None:
        """Find and lock a waiting request's cached prefix; at least its last token stays to be computed."""
        if not self._use_tree:
            return
        request.pages, node = self.tree.match(request.ids[: request.first_needed], request.cache_salt)
        request.firsts = [partial.first(node.end) for partial in self.tree.partial.values()]
        self.tree.lock(node, request.firsts)
        request.node, request.num_tree_pages = node, node.end
        if self.states.groups:
            known = self.tree.num_known(request.ids[: request.first_needed], request.cache_salt)
            request.branch = known * self.page_size

    def unmatch(self, request: EngineRequest) -> None:
        """Undo `match`: the request goes on waiting."""
        if request.node is not None:
            self.tree.unlock(request.node, request.firsts)
        self._forget(request)

    def admit(self, request: EngineRequest) -> None:
        """Give a matched request its row and the pages for its known tokens. There is room: the caller checked.

        Of groups that do not see everything it gets them with each chunk (`provide`).
        """
        request.row, request.is_admitted = self.rows.take_row(), False
        if request.node is None:
            request.pages = [[] for _ in self.allocators]
            request.firsts = [0 for _ in self.tree.partial]
        num = self.pages_for(len(request.ids)) - request.num_tree_pages
        need = [num if g in self._full else 0 for g in range(len(self.allocators))]
        self.make_room(need)
        for g in self._full:
            request.pages[g] = request.pages[g] + self._take(g, num)
        request.computed_len = request.num_tree_pages * self.page_size
        request.on_device = False
        if request.cached_len < 0:
            request.cached_len = request.computed_len
        if request.prompt_logprobs is not None and request.num_output == 0:
            request.prompt_logprobs = []
        for g in self._paged:
            self.rows.set_pages(request.row, 0, request.pages[g], g)
        for g in self.states.groups:
            self.rows.load(request.row, request.pages[g][-1] if request.pages[g] else ZEROS, g)
        if self.states.groups:
            self._loading.append(request)

    def loaded(self) -> None:
        """A step is under way that puts states into the rows of those who were admitted: the copies may go now."""
        for request in self._loading:
            for i, (g, partial) in enumerate(self.tree.partial.items()):
                if g in self.states.groups:
                    if request.node is not None:
                        partial.unpin(request.node, request.firsts[i], request.node.end)
                    request.firsts[i] = NEVER
            request.pages = self._without_copies(request, request.pages)
        self._loading = []

    def provide(self, request: EngineRequest, num_tokens: int) -> int:
        """Add the pages that a request's next chunk of `num_tokens` needs; returns how many tokens there is room for.

        Only groups that do not see everything may lack some: all others have what its known tokens need.
        """
        if not self.tree.partial:
            return num_tokens
        start, num_tokens = request.computed_len, self.num_fitting(request, num_tokens)
        if num_tokens > 0:
            self._extend(request, start + num_tokens, self._sliding)
            self._copy_states(request, start, start + num_tokens)
        return num_tokens

    def num_fitting(self, request: EngineRequest, num_tokens: int) -> int:
        """Return how many tokens of a request's next chunk there is room for, as `provide` does."""
        for g in self._sliding:
            room = self.allocators[g].num_free + self.tree.num_free_to_go(g)
            num_tokens = min(num_tokens, (len(request.pages[g]) + room) * self.page_size - request.computed_len)
        return max(0, num_tokens)

    def growing(self, requests: Sequence[EngineRequest]) -> list[EngineRequest]:
        """Return the decoding requests whose next token starts a new page, of all groups."""
        size = self.page_size
        return [request for request in requests if request.computed_len >= len(request.pages[0]) * size]

    def make_room(self, need: Sequence[int]) -> bool:
        """Evict until `need` pages of each group are free; False if they cannot be."""
        short = [num - allocator.num_free for num, allocator in zip(need, self.allocators, strict=True)]
        if max(short, default=0) > 0:
            for allocator, gone in zip(self.allocators, self.tree.evict(short), strict=True):
                allocator.free(gone)
        return all(allocator.num_free >= num for num, allocator in zip(need, self.allocators, strict=True))

    def make_room_to_grow(self, num_requests: int) -> bool:
        """Evict until `num_requests` decoding requests can `allocate_page`; False if they cannot."""
        return self.make_room([0 if g in self.states.groups else num_requests for g in range(len(self.allocators))])

    def allocate_page(self, request: EngineRequest) -> None:
        """Add one page of each group to a decoding request. There is room: the caller made it."""
        for g in self._paged:
            own = request.pages[g]
            own += self._take(g, 1)
            self.rows.set_pages(request.row, len(own) - 1, own[-1:], g)
        for g in self.states.groups:
            request.pages[g].append(0)

    def allocate_slots(self, request: EngineRequest, num_tokens: int) -> bool:
        """Add the pages that a running request needs for more known tokens; False, and nothing done, without room."""
        return self._extend(request, len(request.ids) + num_tokens, self._full)

    def allocate_draft_slots(self, request: EngineRequest, num_tokens: int) -> bool:
        """As `allocate_slots`, for tokens computed at once, in all groups: the pages stay, whatever comes of them."""
        return self._extend(request, len(request.ids) + num_tokens, self._paged)

    def cache_prefix(self, request: EngineRequest) -> None:
        """Give the tree the full pages that a prefilling request has computed, so that others find them."""
        if self._use_tree and request.node is not None:
            self._insert(request)
            for g in self._paged:
                self.rows.set_pages(request.row, 0, request.pages[g][: request.num_tree_pages], g)

    def slide(self, request: EngineRequest, num_known: int) -> None:
        """Free pages that no token after a request's first `num_known` tokens attends to."""
        num = min(num_known, request.computed_len) // self.page_size
        for i, (g, partial) in enumerate(self.tree.partial.items()):
            first, own = request.firsts[i], request.pages[g]
            last = min(partial.first(num), len(own))
            if last <= first:
                continue
            border = min(max(first, request.num_tree_pages), last)
            if request.node is not None:
                partial.unpin(request.node, first, border)
            self._give_back(g, own[border:last])
            own[first:last] = [0] * (last - first)
            request.firsts[i] = last
            self.rows.set_pages(request.row, first, own[first:last], g)

    def release(self, request: EngineRequest) -> None:
        """Take everything back: full pages go to the tree, the rest to the free list, the row is cleared."""
        if request in self._loading:
            self._loading.remove(request)
        if self._use_tree and request.node is not None:
            self._insert(request)
        for g, own in enumerate(request.pages):
            self._give_back(g, [page for page in own[request.num_tree_pages :] if page])
        if request.node is not None:
            self.tree.unlock(request.node, request.firsts)
        self.rows.release_row(request.row)
        request.row = -1
        self._forget(request)
        request.computed_len, request.on_device = 0, False

    def discard(self, pages: Sequence[Set[int]]) -> None:
        """Forget what the tree has of `pages` and beyond, and zero it and them: what they hold may not be finite.

        No running request reads them any more. The device zeroes them before the next step.
        """
        for g, (bad, gone) in enumerate(zip(pages, self.tree.discard(pages), strict=True)):
            self.allocators[g].free(gone)
            self.rows.zero_pages(g, [*{*bad, *gone}])

    def flush(self) -> int:
        """Evict every unused prefix; return the number of pages that this freed in the first group."""
        gone = self.tree.clear()
        for allocator, pages in zip(self.allocators, gone, strict=True):
            allocator.free(pages)
        return len(gone[0]) if gone else 0

    def held(self, running: Sequence[EngineRequest], group: int) -> Iterator[int]:
        """Yield the pages of a group that requests own, not the tree."""
        own = (r.pages[group][r.num_tree_pages :] for r in running)
        return (page for page in itertools.chain.from_iterable(own) if page)

    def check_counts(self, running: Sequence[EngineRequest]) -> bool:
        """Whether the counts agree: cheap, and enough to notice a page that was lost or taken twice."""
        for g, allocator in enumerate(self.allocators):
            num = sum(1 for _ in self.held(running, g)) if g in self.tree.partial else self._num_own(running, g)
            if num != self.num_held[g] or allocator.num_free + self.tree.num_pages(g) + num != allocator.num_pages:
                return False
        return bool(running or not self.tree.num_locked)

    def check_ownership(self, running: Sequence[EngineRequest]) -> bool:
        """Whether every page has exactly one owner: some milliseconds per 100,000 pages."""
        for g, allocator in enumerate(self.allocators):
            cached = (page for node in self.tree.nodes() for page in node.pages[g] if page)
            owned = itertools.chain(allocator.free_pages, cached, self.held(running, g))
            pages = np.fromiter(owned, dtype=np.int64)
            if pages.size and (pages.min() < 1 or pages.max() > allocator.num_pages):
                return False
            if not (np.bincount(pages, minlength=allocator.num_pages + 1)[1:] == 1).all():
                return False
        return True

    def repair(self, running: Sequence[EngineRequest]) -> Repair:
        """Check every page, and repair: each has one owner.

        A page without an owner becomes free. A page with two owners is taken from both: the tree forgets what it had
        behind it, and requests with the page lose all their pages, because its contents may belong to another request.
        The caller ends these requests and no others.
        """
        num_lost, num_doubled, shared = 0, 0, []
        for g, allocator in enumerate(self.allocators):
            free = list(allocator.free_pages)
            cached = [page for node in self.tree.nodes() for page in node.pages[g] if page]
            owned = Counter([*cached, *self.held(running, g)])
            all_pages = range(1, allocator.num_pages + 1)
            shared.append({page for page, num in owned.items() if num > 1 or page not in all_pages})
            num_lost += len(set(all_pages) - owned.keys() - set(free))
            freed = (owned.keys() & set(free)) | {page for page, num in Counter(free).items() if num > 1}
            num_doubled += len(shared[g] | freed)
        affected = [r for r in running if has_any(r.pages, shared) or self._has_wrong_path(r)]
        cached_by_requests = {id(node) for r in running if r.node is not None for node in self.tree.path(r.node)}
        locked = sum(len(node.pages[0]) for node in self.tree.nodes() if id(node) in cached_by_requests)
        num_stuck = max(0, self.tree.num_locked - locked)
        for request in affected:
            self._strip(request)
        self.tree.discard_nodes(shared)
        lost = [r for r in running if r.node is not None and r.node.end and not self.tree.path(r.node)]
        for request in lost:  # others' pages of a node went with it
            self._strip(request)
        self.tree.relock((r.node, r.firsts) for r in running if r.node is not None)
        for g, allocator in enumerate(self.allocators):
            held = list(self.held(running, g))
            cached = [page for node in self.tree.nodes() for page in node.pages[g] if page]
            self.num_held[g] = len(held)
            allocator.reset(set(range(1, allocator.num_pages + 1)) - set(cached) - set(held))
        return Repair(num_lost, num_doubled, num_stuck, affected + lost)

    def _has_wrong_path(self, request: EngineRequest) -> bool:
        """Whether a request reads pages as cached that its place in the tree does not have."""
        path = [] if request.node is None else self.tree.path(request.node)
        for g, own in enumerate(request.pages):
            cached = [page for node in path for page in node.pages[g]]
            mine = own[: request.num_tree_pages]
            if len(cached) != len(mine) or any(
                page and page != found for page, found in zip(mine, cached, strict=True)
            ):
                return True
        return False

    def _strip(self, request: EngineRequest) -> None:
        """Take everything from a victim of a repair."""
        self._forget(request)
        request.pages, request.computed_len = [[] for _ in self.allocators], 0

    def _num_own(self, running: Sequence[EngineRequest], group: int) -> int:
        """Pages of a group that sees everything which requests own."""
        return sum(len(r.pages[group]) - r.num_tree_pages for r in running)

    def _forget(self, request: EngineRequest) -> None:
        request.node, request.pages, request.firsts, request.num_tree_pages = None, [], [], 0

    def _extend(self, request: EngineRequest, num_tokens: int, groups: Sequence[int]) -> bool:
        """Give a request's row pages for `num_tokens` tokens of each of `groups`, or of none if there is no room."""
        num = self.pages_for(num_tokens)
        need = [max(0, num - len(own)) if g in groups else 0 for g, own in enumerate(request.pages)]
        if any(need) and not self.make_room(need):
            return False
        for g in groups:
            own = request.pages[g]
            if need[g]:
                own += self._take(g, need[g])
                self.rows.set_pages(request.row, len(own) - need[g], own[-need[g] :], g)
        return True

    def _copy_states(self, request: EngineRequest, start: int, end: int) -> None:
        """Have the states copied within a request's next chunk, as far as there is room for copies."""
        for g in self.states.groups:
            own = request.pages[g]
            own += [0] * (self.pages_for(end) - len(own))
        if request.node is None:
            return
        need = [int(g in self.states.groups) for g in range(len(self.allocators))]
        # The next turn has one more token at least.
        num_known = len(request.ids) + request.prefill_only
        branch = 0 if request.prefill_only else request.branch
        for length, is_spare in self.states.places(start, end, num_known, branch):
            if is_spare and not all(self._has_spare(g) for g in self.states.groups):
                continue
            if not self.make_room(need):
                return
            for g in self.states.groups:
                [copy] = self._take(g, 1)
                request.pages[g][length // self.page_size - 1] = copy
                self.rows.save(request.row, length, copy, g)

    def _has_spare(self, group: int) -> bool:
        """Whether a spare copy takes the place of none but spare ones."""
        return self.allocators[group].num_free > 0 or self.tree.partial[group].num_spare > 0

    def _without_copies(self, request: EngineRequest, pages: Pages) -> Pages:
        """Return lists without the tree's copies of states: no running request sees them, so they may be evicted.

        New lists: the old ones tell what a step in flight wrote and read.
        """
        num = request.num_tree_pages
        return [[0] * num + own[num:] if g in self.states.groups else own for g, own in enumerate(pages)]

    def _take(self, group: int, num: int) -> list[int]:
        pages = self.allocators[group].allocate(num)
        self.num_held[group] += num
        return pages

    def _give_back(self, group: int, pages: Sequence[int]) -> None:
        """Free what a request owned."""
        self.allocators[group].free(pages)
        self.num_held[group] -= len(pages)

    def _insert(self, request: EngineRequest) -> None:
        """Move the request's computed full pages to the tree; its doubles of pages the tree had are freed."""
        # A step in flight computes the place of a token that is not known yet.
        num_full = min(request.computed_len, len(request.ids)) // self.page_size
        if num_full <= request.num_tree_pages or request.node is None:
            return
        mine: Pages = [own[:num_full] for own in request.pages]
        pages, node = self.tree.insert(request.ids, mine, request.cache_salt)
        self.tree.lock(node, request.firsts)
        self.tree.unlock(request.node, request.firsts)
        for g, (own, found) in enumerate(zip(mine, pages, strict=True)):
            fresh = [i for i in range(request.num_tree_pages, num_full) if own[i]]
            self.num_held[g] -= len(fresh)
            self.allocators[g].free([own[i] for i in fresh if own[i] != found[i]])
        # New lists: the old ones tell what a step in flight wrote.
        request.pages = [found + own[num_full:] for found, own in zip(pages, request.pages, strict=True)]
        request.node, request.num_tree_pages = node, num_full
        request.pages = self._without_copies(request, request.pages)
