"""Who of the waiting requests comes into a step, while rows, pages and the token budget last.

What it costs does not depend on how many wait: rows are looked at first, and of the queue only its head.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from enum import Enum, auto
from heapq import heapify, heappop, heapreplace
from typing import Protocol

from dovetail.engine.kv_cache_manager import KVCacheManager
from dovetail.engine.limits import StepLimits
from dovetail.engine.media import TowerSchedule
from dovetail.engine.owners import BEHIND, Owner, Owners, WaitQueue
from dovetail.engine.policy import Policy
from dovetail.engine.request import EngineRequest, PromptChunk, StepPlan

PageKey = tuple[int | str, tuple[int, ...]]

ALONE = -1
"""In place of a number of pages: no other request runs."""
MAX_LOOKED_AT = 1024
"""Maximum number of queued requests that a step checks."""
MAX_MATCHED = 64
"""Most that it matches with the cache in vain, as they are to wait for another's pages, of those that begin alike."""
MAX_PASSED = 8
"""Most owners that miss their turn in a step, as there is no row for them, before it is over."""
MAX_WAITING = 256
"""And most that do as their requests wait for another's pages."""


class AdmissionAnswer(Enum):
    """What became of a request that was to be admitted."""

    ADMITTED = auto()
    LATER = auto()
    """It waits for something else; later requests may be admitted first."""
    NO_ROOM = auto()
    """It waits for a row or for pages."""


class NewTokenRatio:
    """Share of its remaining `max_tokens` a request is expected to use: falls while all is well, rises on retraction.

    The reserve it stands for lets far more requests in than reserving `max_tokens` in full. Idea and constants: SGLang.
    """

    start = 0.7
    floor = 0.098
    decay = (start - floor) / 600

    def __init__(self) -> None:
        self.value = self.start

    def step(self) -> None:
        """One decode step went well."""
        self.value = max(self.floor, self.value - self.decay)

    def retracted(self, running: list[EngineRequest]) -> None:
        """Requests were retracted: learn from how much the others have used."""
        used = sum(r.num_output for r in running) + 20 * len(running)
        allowed = sum(r.max_tokens for r in running)
        self.value = min(1.0, used / (allowed + 1))


class Requests(Protocol):
    """What admission sees of the scheduler, which is the only one."""

    pages: KVCacheManager
    owners: dict[bool, Owners]
    """Those of the background's requests, and of all others."""
    limits: StepLimits
    policy: Policy
    waiting: WaitQueue
    running: list[EngineRequest]
    num_background: int
    tower: TowerSchedule | None
    poison_candidates: list[EngineRequest]
    ratio: NewTokenRatio

    def candidates(self, num: int, *, background: bool) -> Sequence[EngineRequest]:
        """Return the first who may be admitted, in order."""

    def retract(self, candidates: list[EngineRequest]) -> EngineRequest:
        """Have one of these give its row and pages up."""


class Admission:
    """The admission of one step: first all other requests, then the background with what is left.

    So background work never takes budget, a row, a page or the reserve from others, and never is what they wait for.
    """

    def __init__(self, scheduler: Requests, plan: StepPlan, paused: set[int]) -> None:
        """`paused` are the `id`s of running requests that take no part in the step."""
        self._scheduler, self._plan, self._paused = scheduler, plan, paused
        self._pages, self._limits = scheduler.pages, scheduler.limits
        self._budget = scheduler.limits.max_prefill_tokens
        self._expected: int | None = None
        self._coming: set[PageKey] = set()
        self._num_deferred, self._deferred = 0, set[PageKey]()
        """Requests matched in vain, and how they begin."""
        self._owners = scheduler.owners[False]
        """Of the requests that come in at the moment: see `fill`."""
        self._background, self._is_shared = False, False
        """They are of the background; they take turns."""
        self._held: dict[Owner, list[EngineRequest]] = {}
        """Then: running requests by owner, …"""
        self._prompts: list[tuple[float, int, EngineRequest]] = []
        """… and those whose prompts are to go on in this step, by what their owners were served."""

    def fill(self, *, background: bool, most: int | None = None) -> None:
        """Add chunks of running requests, then admit.

        Args:
            background: Those of the background, or all others.
            most: How many may be admitted; None: any number.
        """
        self._owners, self._background = self._scheduler.owners[background], background
        self._is_shared = self._owners.is_shared and not self._scheduler.poison_candidates
        if self._is_shared:
            self._take_turns(most)
            return
        self._held, self._prompts = {}, []
        for request in self._prefilling():
            if self._budget <= 0:
                return
            self._budget -= self._add_chunk(request)
        if (most is None or most > 0) and self._budget > 0 and self._has_row():
            found = self._scheduler.candidates(MAX_LOOKED_AT, background=background)
            if found:
                self._begin()
                self._admit(found, most)

    def _prefilling(self) -> Iterator[EngineRequest]:
        """Running requests whose prompts go on in this step."""
        for request in self._scheduler.running:
            if not request.on_device and request.is_background == self._background and id(request) not in self._paused:
                yield request

    def _begin(self) -> None:
        """Look at what those who run are computing, before others are admitted beside them."""
        self._expected = None
        self._num_deferred, self._deferred = 0, set()
        self._coming = self._being_computed()

    def _take_turns(self, most: int | None) -> None:
        """Add chunks and admit, owner by owner: the next owner is the least served for its weight.

        An owner that gets no row misses its turn. While one waits for pages, no request is admitted.
        """
        scheduler, owners = self._scheduler, self._owners
        unfinished = list(self._prefilling())
        if not unfinished and not scheduler.waiting:
            return
        self._held = owners.settle()
        self._begin()
        self._prompts = prompts = [(owners.of(r).served, r.arrival, r) for r in unfinished]
        heapify(prompts)
        orders: dict[Owner, Iterator[EngineRequest]] = {}
        passed: list[Owner] = []
        may_admit = most != 0 and self._has_row()
        while self._budget > 0:
            owner = owners.next() if may_admit else None
            if prompts and (owner is None or prompts[0][0] <= owner.served):
                request = prompts[0][2]
                if prompts[0][0] < (served := owners.of(request).served):
                    heapreplace(prompts, (served, request.arrival, request))
                else:
                    heappop(prompts)
                    self._budget -= self._add_chunk(request)
            elif owner is None:
                break
            else:
                owners.take(owner)
                answer = self._admit_of(owner, orders)
                if answer is AdmissionAnswer.ADMITTED:
                    owners.put_back(owner)
                    most = None if most is None else most - 1
                    may_admit = most != 0
                else:
                    passed.append(owner)
                    num = MAX_WAITING if answer is AdmissionAnswer.LATER else MAX_PASSED
                    may_admit = len(passed) < num and (answer is AdmissionAnswer.LATER or not self._has_free_row)
        for owner in passed:
            owners.put_back(owner)

    def _admit_of(self, owner: Owner, orders: dict[Owner, Iterator[EngineRequest]]) -> AdmissionAnswer:
        """Admit the next request of an owner, in the policy's order, which is asked for once in a step."""
        if not self._has_free_row and not self._may_retract and not self._may_take_row(owner):
            return AdmissionAnswer.NO_ROOM
        if owner not in orders:
            orders[owner] = iter(self._scheduler.policy.order(owner.waiting[:MAX_LOOKED_AT], self._pages.tree))
        for request in orders[owner]:
            answer = self._try(request)
            if answer is not AdmissionAnswer.LATER:
                return answer
        return AdmissionAnswer.LATER

    def _add_chunk(self, request: EngineRequest) -> int:
        """Plan the next chunk of a prompt; returns its length.

        The last token of one that waits for its grammar takes part with others, as what follows may be known in time;
        by itself it waits for that.
        """
        wanted = 0 if request.waiting_for_grammar and request.num_pending == 1 else request.num_pending
        if request.waiting_for_grammar and self._pages.states.groups:
            wanted = request.num_pending - 1  # a state that has taken a token in does not take it in again
        num = min(wanted, self._budget) if self._limits.cut_prompts else wanted
        allowed = num
        if request.media is not None and num > 0:
            # An image that no step has room for is computed alone: by the first chunk of a step.
            num = request.media.uncut(request.computed_len, num, num if self._plan.chunks else wanted)
        if request.media is not None and num > 0 and (tower := self._scheduler.tower) is not None:
            num = tower.fit(request.media, request.computed_len, num, self._plan)
        if 0 < num < wanted:
            aligned = self._pages.states.aligned(request.computed_len, num, self._limits.max_prefill_tokens)
            num = aligned or (num if num < allowed else 0)  # one that ends before an image must get on
        if request.media is not None and num > 0:
            room = self._pages.num_fitting(request, num)
            num = request.media.uncut(request.computed_len, room, room)
        num = self._pages.provide(request, num) if num > 0 else num
        if num > 0:
            is_last, pools = num == request.num_pending, request.pool is not None
            samples = is_last and not pools and not request.prefill_only
            chunk = PromptChunk(request, request.computed_len, num, samples=samples, pools=is_last and pools)
            self._plan.chunks.append(chunk)
            if self._is_shared:
                self._owners.charge(request, num + is_last)
        return num

    def _admit(self, waiting: Sequence[EngineRequest], most: int | None) -> None:
        """Move waiting requests to `running`, in the order given."""
        for request in waiting:
            if self._budget <= 0 or most == 0:
                break
            answer = self._try(request)
            if answer is AdmissionAnswer.NO_ROOM:
                break
            if answer is AdmissionAnswer.ADMITTED and most is not None:
                most -= 1

    def _try(self, request: EngineRequest) -> AdmissionAnswer:
        """Move a waiting request to `running` if it may begin now."""
        if request.in_flight:  # retracted with a token on its way, which belongs to what is to be computed again
            return AdmissionAnswer.LATER
        if self._num_deferred >= MAX_MATCHED and self._first_page(request) in self._deferred:
            return AdmissionAnswer.LATER
        if not self._may_fit(request):
            return AdmissionAnswer.NO_ROOM
        self._pages.match(request)
        key = self._next_page(request)
        if key is not None and key in self._coming and request.first_needed:
            self._pages.unmatch(request)  # another request is computing this very page: wait for it and share
            self._num_deferred += 1
            self._deferred.add(self._first_page(request))
            return AdmissionAnswer.LATER
        whole = self._limits.cut_prompts or not self._plan.chunks or self._uncached(request) <= self._budget
        if not whole or not self._retract_until_fits(request):
            request.matched_pages, request.matched_version = request.num_tree_pages, self._pages.tree.version
            self._pages.unmatch(request)
            return AdmissionAnswer.NO_ROOM
        self._start(request)
        if key is not None:
            self._coming.add(key)
        return AdmissionAnswer.ADMITTED

    def _start(self, request: EngineRequest) -> None:
        self._scheduler.waiting.remove(request)
        if self._expected is not None:
            self._expected = max(0, self._expected) + self._pages_expected(request)
        self._scheduler.running.append(request)
        self._pages.admit(request)
        if self._is_shared:
            request.num_charged = max(request.num_charged, request.computed_len)  # what was cached costs nothing
            self._held.setdefault(self._owners.of(request), []).append(request)
        request.timing.admitted()
        request.num_sampled = request.num_output
        self._plan.num_new_requests += 1
        self._plan.num_cached_tokens += request.computed_len
        self._budget -= self._add_chunk(request)

    def _first_page(self, request: EngineRequest) -> PageKey:
        """How it begins."""
        return request.cache_salt, tuple(request.ids[: self._pages.page_size])

    def _being_computed(self) -> set[PageKey]:
        """The next page of each request in prefill: requests that need the same page wait for it.

        No request waits for a paused one, and only the background waits for the background.
        """
        active = (r for r in self._scheduler.running if not r.on_device and id(r) not in self._paused)
        authors = [r for r in active if self._background or not r.is_background]
        return {key for key in map(self._next_page, authors) if key is not None}

    def _next_page(self, request: EngineRequest) -> PageKey | None:
        """Where in the tree, and with which tokens, the next full page of `request` will go."""
        size, node = self._pages.page_size, request.node
        start = request.num_tree_pages * size
        if node is None or start + size > len(request.ids) - (not request.prefill_only):
            return None  # a page with the token that is sampled from is computed by everybody
        return request.cache_salt if node.parent is None else id(node), tuple(request.ids[start : start + size])

    def _has_row(self) -> bool:
        """Whether any queued request could get a row: one is free, or a request may have to give one back."""
        return self._has_free_row or self._may_retract or any(len(held) > 1 for held in self._held.values())

    @property
    def _has_free_row(self) -> bool:
        return len(self._scheduler.running) < self._limits.max_running_requests

    @property
    def _may_retract(self) -> bool:
        """Whether requests give way to others regardless of their owners."""
        return not self._background and (self._scheduler.policy.preempts or self._scheduler.num_background > 0)

    def _may_fit(self, request: EngineRequest) -> bool:
        """Whether matching it could be worth its cost, by what is known of it from an earlier step."""
        if self._has_free_row and (
            request.matched_version != self._pages.tree.version
            or self._need(request, request.matched_pages) <= self._pages.num_available
        ):
            return True
        return bool(self._retractable(request))

    def _retract_until_fits(self, request: EngineRequest) -> bool:
        """Whether `request` fits beside the running ones, after retracting those that give way to it."""
        while not (self._has_free_row and self._need(request, request.num_tree_pages) <= self._pages.num_available):
            candidates = self._retractable(request)
            if not candidates:
                return False
            victim = self._scheduler.retract(candidates)
            if self._is_shared and victim.is_background == request.is_background:
                self._held[self._owners.of(victim)].remove(victim)
                self._prompts[:] = [prompt for prompt in self._prompts if prompt[2] is not victim]
                heapify(self._prompts)
            self._expected = None
            self._plan.decode = [r for r in self._plan.decode if r is not victim]
        return True

    def _retractable(self, request: EngineRequest) -> list[EngineRequest]:
        """Running requests that give way to another.

        Those of the background, any of lower priority if the policy retracts them, else one of an owner that holds more
        than its share.
        """
        busy = {id(chunk.request) for chunk in self._plan.chunks}
        lower: list[EngineRequest] = []
        if self._may_retract:
            lower = [r for r in self._scheduler.running if r.priority < request.priority and id(r) not in busy]
            if not self._scheduler.policy.preempts:
                lower = [r for r in lower if r.is_background]
        if lower or not self._is_shared:
            return lower
        return self._beyond_share(request, busy)

    def _beyond_share(self, request: EngineRequest, busy: set[int]) -> list[EngineRequest]:
        """Return the youngest request of an owner that still holds as much without it as `request`'s owner with that.

        What is held counts in rows where there is none, else in pages, and by the owners' weights. So what is taken
        from one owner is never taken back for it at once.
        """
        num_pages = self._pages.pages_for(len(request.ids) + 1) if self._has_free_row else 0

        def size(other: EngineRequest) -> int:
            return len(other.pages[0]) if num_pages else 1

        owner = self._owners.of(request)
        wanted = (sum(map(size, self._held.get(owner, ()))) + (num_pages or 1)) / owner.weight
        ahead = [other for other in self._held if other is not owner and other.served >= owner.served + BEHIND]
        sizes = {other: sum(map(size, self._held[other])) for other in ahead}
        for other in sorted(sizes, key=lambda other: -sizes[other] / other.weight):
            free = [r for r in self._held[other] if r.priority <= request.priority and id(r) not in busy]
            youngest = max(free, key=lambda r: r.arrival, default=None)
            if youngest is not None and wanted <= (sizes[other] - size(youngest)) / other.weight:
                return [youngest]
        return []

    def _may_take_row(self, owner: Owner) -> bool:
        """Whether another owner holds enough more rows for its weight to lose one."""
        wanted = (len(self._held.get(owner, ())) + 1) / owner.weight
        return any(
            (len(held) - 1) / other.weight >= wanted
            for other, held in self._held.items()
            if other is not owner and other.served >= owner.served + BEHIND
        )

    def _need(self, request: EngineRequest, num_cached: int) -> int:
        """Pages for its known tokens and any next one; unless it is alone, for what all will generate, too.

        Who would give way to it does not count.
        """
        if not self._pages.grows:
            return 0  # each row has room for what it sees
        need = self._pages.pages_for(len(request.ids) + (request.pool is None)) - num_cached
        if self._expected is None:
            others = [r for r in self._scheduler.running if request.is_background or not r.is_background]
            self._expected = sum(self._pages_expected(r) for r in others) if others else ALONE
        return need if self._expected == ALONE else need + self._expected + self._pages_expected(request)

    def _pages_expected(self, request: EngineRequest) -> int:
        return self._pages.pages_for(int(request.remaining_tokens * self._scheduler.ratio.value))

    def _uncached(self, request: EngineRequest) -> int:
        """Tokens that a matched request has to compute."""
        return len(request.ids) - request.num_tree_pages * self._pages.page_size
