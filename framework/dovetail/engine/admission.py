"""Who of the waiting requests comes into a step, while rows, pages and the token budget last.

What it costs does not depend on how many wait: rows are looked at first, and of the queue only its head.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from dovetail.engine.kv_cache_manager import KVCacheManager
from dovetail.engine.limits import StepLimits
from dovetail.engine.low_priority import is_background
from dovetail.engine.policy import Policy
from dovetail.engine.queue import WaitQueue
from dovetail.engine.request import Chunk, Request, StepPlan

PageKey = tuple[int | str, tuple[int, ...]]

ALONE = -1
"""In place of a number of pages: nobody else runs."""
MAX_LOOKED_AT = 1024
"""Most waiting requests that a step looks at."""
MAX_MATCHED = 64
"""Most that it matches with the cache in vain, as they are to wait for another's pages."""


class Ratio(Protocol):
    """Says how much of what requests may generate they are expected to."""

    @property
    def value(self) -> float:
        """From 0 to 1."""


class Requests(Protocol):
    """What admission sees of the scheduler, which is the only one."""

    pages: KVCacheManager
    limits: StepLimits
    policy: Policy
    waiting: WaitQueue
    running: list[Request]
    num_background: int

    @property
    def ratio(self) -> Ratio:
        """Learnt from retractions."""

    def candidates(self, num: int, *, background: bool) -> Sequence[Request]:
        """Return the first who may be admitted, in order."""

    def retract(self, candidates: list[Request]) -> Request:
        """Have one of these give its row and pages up."""


class Admission:
    """One step's. First everybody but the background, then the background with what is left.

    So background work never takes budget, a row, a page or the reserve from others, and never is what they wait for.
    """

    def __init__(self, scheduler: Requests, plan: StepPlan, paused: set[int]) -> None:
        """`paused` are the `id`s of running requests that take no part in the step."""
        self._scheduler, self._plan, self._paused = scheduler, plan, paused
        self._pages, self._limits = scheduler.pages, scheduler.limits
        self._budget = scheduler.limits.max_prefill_tokens
        self._expected: int | None = None

    def fill(self, *, background: bool, most: int | None = None) -> None:
        """Add chunks of running requests, then admit.

        Args:
            background: Those of the background, or all others.
            most: How many may be admitted; None: any number.
        """
        for request in self._scheduler.running:
            if self._budget <= 0:
                return
            if not request.on_device and is_background(request) == background and id(request) not in self._paused:
                self._budget -= self._add_chunk(request)
        self._expected = None
        if (most is None or most > 0) and self._budget > 0 and self._has_row(background=background):
            found = self._scheduler.candidates(MAX_LOOKED_AT, background=background)
            if found:
                self._admit(found, most)

    def _add_chunk(self, request: Request) -> int:
        """Plan the next chunk of a prompt; returns its length.

        The last token of one that waits for its grammar takes part with others, as what follows may be known in time;
        by itself it waits for that.
        """
        wanted = 0 if request.waiting_for_grammar and request.num_pending == 1 else request.num_pending
        if request.waiting_for_grammar and self._pages.states.groups:
            wanted = request.num_pending - 1  # a state that has taken a token in does not take it in again
        num = min(wanted, self._budget) if self._limits.cut_prompts else wanted
        if 0 < num < wanted:
            num = self._pages.states.aligned(request.computed_len, num, self._limits.max_prefill_tokens)
            self._budget = max(num, 0)  # what is left is less than anybody's next stretch
        num = self._pages.provide(request, num) if num > 0 else num
        if num > 0:
            is_last, pools = num == request.num_pending, request.pool is not None
            chunk = Chunk(request, request.computed_len, num, samples=is_last and not pools, pools=is_last and pools)
            self._plan.chunks.append(chunk)
        return num

    def _admit(self, waiting: Sequence[Request], most: int | None) -> None:
        """Move waiting requests to `running`, in the order given."""
        coming = self._coming(background=is_background(waiting[0]))
        num_vain = 0
        for request in waiting:
            if self._budget <= 0 or most == 0 or num_vain >= MAX_MATCHED:
                break
            if request.in_flight:
                continue  # retracted with a token on its way, which belongs to what is to be computed again
            if not self._may_fit(request):
                break
            self._pages.match(request)
            key = self._next_page(request)
            if key is not None and key in coming and request.first_needed:
                self._pages.unmatch(request)  # another request is computing this very page: wait for it and share
                num_vain += 1
                continue
            whole = self._limits.cut_prompts or not self._plan.chunks or self._uncached(request) <= self._budget
            if not whole or not self._make_space(request):
                request.matched_pages, request.matched_version = request.num_tree_pages, self._pages.tree.version
                self._pages.unmatch(request)
                break
            self._start(request)
            most = None if most is None else most - 1
            if key is not None:
                coming.add(key)

    def _start(self, request: Request) -> None:
        self._scheduler.waiting.remove(request)
        if self._expected is not None:
            self._expected = max(0, self._expected) + self._pages_expected(request)
        self._scheduler.running.append(request)
        self._pages.admit(request)
        request.timing.admitted()
        request.num_sampled = request.num_output
        self._plan.num_new_requests += 1
        self._plan.num_cached_tokens += request.computed_len
        self._budget -= self._add_chunk(request)

    def _coming(self, *, background: bool) -> set[PageKey]:
        """The next page of everybody who is computing a prompt: who needs the same one waits for it.

        Nobody waits for who is paused, nor for the background but the background itself.
        """
        authors = [
            r
            for r in self._scheduler.running
            if not r.on_device and id(r) not in self._paused and (background or not is_background(r))
        ]
        return {key for key in map(self._next_page, authors) if key is not None}

    def _next_page(self, request: Request) -> PageKey | None:
        """Where in the tree, and with which tokens, the next full page of `request` will go."""
        size, node = self._pages.page_size, request.node
        start = request.num_tree_pages * size
        if node is None or start + size > len(request.ids) - 1:
            return None
        return request.cache_salt if node.parent is None else id(node), tuple(request.ids[start : start + size])

    def _has_row(self, *, background: bool) -> bool:
        """Whether any waiting request could get a row: there is one, or somebody may have to give one up."""
        running = self._scheduler.running
        if len(running) < self._limits.max_running_requests:
            return True
        return not background and (self._scheduler.policy.preempts or self._scheduler.num_background > 0)

    def _may_fit(self, request: Request) -> bool:
        """Whether matching it could be worth its cost, by what is known of it from an earlier step."""
        if len(self._scheduler.running) < self._limits.max_running_requests and (
            request.matched_version != self._pages.tree.version
            or self._need(request, request.matched_pages) <= self._pages.num_available
        ):
            return True
        return bool(self._retractable(request))

    def _make_space(self, request: Request) -> bool:
        """Whether `request` fits beside the running ones, after retracting those that give way to it."""
        while not self._fits(request):
            candidates = self._retractable(request)
            if not candidates:
                return False
            victim = self._scheduler.retract(candidates)
            self._expected = None
            self._plan.decode = [r for r in self._plan.decode if r is not victim]
        return True

    def _retractable(self, request: Request) -> list[Request]:
        """Running requests that give way: of the background, and any of lower priority if the policy retracts them."""
        if not self._scheduler.policy.preempts and not self._scheduler.num_background:
            return []
        busy = {id(chunk.request) for chunk in self._plan.chunks}
        lower = [r for r in self._scheduler.running if r.priority < request.priority and id(r) not in busy]
        return lower if self._scheduler.policy.preempts else [r for r in lower if is_background(r)]

    def _fits(self, request: Request) -> bool:
        """Whether there is a row, and room for the prompt and for what all are expected to generate."""
        if len(self._scheduler.running) >= self._limits.max_running_requests:
            return False
        return self._need(request, request.num_tree_pages) <= self._pages.num_available

    def _need(self, request: Request, num_cached: int) -> int:
        """Pages for its known tokens and any next one; unless it is alone, for what all will generate, too.

        Who would give way to it does not count.
        """
        if not self._pages.grows:
            return 0  # each row has room for what it sees
        need = self._pages.pages_for(len(request.ids) + (request.pool is None)) - num_cached
        if self._expected is None:
            others = [r for r in self._scheduler.running if is_background(request) or not is_background(r)]
            self._expected = sum(self._pages_expected(r) for r in others) if others else ALONE
        return need if self._expected == ALONE else need + self._expected + self._pages_expected(request)

    def _pages_expected(self, request: Request) -> int:
        return self._pages.pages_for(int(request.remaining_tokens * self._scheduler.ratio.value))

    def _uncached(self, request: Request) -> int:
        """Tokens that a matched request has to compute."""
        return len(request.ids) - request.num_tree_pages * self._pages.page_size
