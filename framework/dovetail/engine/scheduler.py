"""Decides what each step computes: mixes decode rows with chunks of prompts, retracts when the pool is full.

Host side only; it never touches a tensor. `engine/admission.py` decides which requests are admitted, and
`engine/kv_cache_manager.py` owns the pages.
"""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Callable, Sequence

from dovetail.cache.node import has_any
from dovetail.engine.admission import Admission, NewTokenRatio
from dovetail.engine.kv_cache_manager import KVCacheManager
from dovetail.engine.limits import StepLimits
from dovetail.engine.media import TowerSchedule
from dovetail.engine.owners import Owners, WaitQueue
from dovetail.engine.policy import Policy
from dovetail.engine.request import EngineRequest, StepPlan
from dovetail.engine.speculation import Speculation

logger = logging.getLogger(__name__)


# When work that is in no hurry may run: beside nobody, and a little now and then so that it is never starved.

IDLE_DELAY_S = 1.0
"""For so long after the last other request background work holds back: where one was, the next is likely to come."""
BACKGROUND_INTERVAL_S = 0.5
"""While it holds back it takes part in one step in so many seconds where nobody else is served at the moment …"""
BUSY_INTERVAL_S = 5.0
"""… and in so many where somebody is, …"""
BUSY_ROWS = 4
"""… with so many requests. A step that computes more would be felt by whoever arrives during it."""


class LowPriorityThrottle:
    """Decides step by step how many background requests may take part."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        """`clock` tells seconds."""
        self._clock = clock
        self._busy_until = 0.0
        self._last_pulse = -math.inf

    def allowance(self, *, is_busy: bool) -> int | None:
        """Return how many background requests may take part in the next step, None for all of them.

        Args:
            is_busy: Whether anybody else waits or runs.
        """
        now = self._clock()
        if is_busy:
            self._busy_until = now + IDLE_DELAY_S
        elif now >= self._busy_until:
            return None
        if now < self._last_pulse + (BUSY_INTERVAL_S if is_busy else BACKGROUND_INTERVAL_S):
            return 0
        self._last_pulse = now
        return BUSY_ROWS

    def wait_s(self) -> float:
        """Seconds until the allowance changes by itself, at most."""
        return max(0.0, min(self._busy_until, self._last_pulse + BACKGROUND_INTERVAL_S) - self._clock())


class Scheduler:
    """Continuous batching over a paged cache.

    `waiting` has no pages or row; `running` has both, whether in prefill or decode. `num_background` of all of them are
    of the background. `num_launched` counts steps. While there are `poison_candidates`, one of which makes steps fail,
    only half of them are admitted. With `speculation`, a step is planned when the one before it has been read.
    """

    def __init__(
        self, pages: KVCacheManager, policy: Policy, limits: StepLimits, background: LowPriorityThrottle | None = None
    ) -> None:
        self.pages = pages
        self.policy = policy
        self.limits = limits
        self.background = background or LowPriorityThrottle()
        self.ratio = NewTokenRatio()
        by_owner = not policy.across_owners
        self.running: list[EngineRequest] = []
        self.owners = {b: Owners(self.running, by_owner=by_owner, background=b) for b in (False, True)}
        self.waiting = WaitQueue(self.owners[False], self.owners[True])
        self.num_background = 0
        self.num_launched = 0
        self.poison_candidates: list[EngineRequest] = []
        self.speculation: Speculation | None = None
        self.tower: TowerSchedule | None = None
        self._in_flight: list[StepPlan] = []
        self._live: dict[int, EngineRequest] = {}

    @property
    def has_work(self) -> bool:
        """Whether a step would compute anything."""
        return bool(self._live)

    def add(self, request: EngineRequest) -> None:
        """Take a request in; it waits."""
        self._live[request.handle] = request
        self.num_background += request.is_background
        self.owners[request.is_background].join(request)
        self.waiting.add(request)

    def schedule(self) -> StepPlan:
        """Plan the next step. It is empty where all that there is holds back; `background.wait_s` says how long."""
        paused, most = self._pause()
        plan = StepPlan(self._decode_rows(paused), [])
        if self.tower is not None:
            self.tower.begin(plan)
        self._fill(plan, paused, None, most)
        while not plan.chunks and not plan.decode and not self._in_flight and self._yield_pages(paused):
            self._fill(plan, paused, 0, 0)
        if self.speculation is not None:
            self.speculation.extend(plan, self.pages, self.limits)
        if plan.num_decode and not plan.has_prefill:
            self.ratio.step()
        return plan

    def _fill(self, plan: StepPlan, paused: set[int], most: int | None, most_background: int | None) -> None:
        admission = Admission(self, plan, paused)
        admission.fill(background=False, most=most)
        if self.num_background:
            admission.fill(background=True, most=most_background)

    def _yield_pages(self, paused: set[int]) -> bool:
        """Retract one of the prompts that wait for one another's pages; False where it is something else they wait for.

        Where every layer has a window, prompts take pages chunk by chunk, and a small cache has too few for all.
        """
        waiting = [r for r in self.running if not r.on_device and not r.waiting_for_grammar and id(r) not in paused]
        if len(waiting) > 1:
            self.retract(waiting)
        return len(waiting) > 1

    def launching(self, plan: StepPlan) -> None:
        """A planned step is about to be launched: note what it will write."""
        self.num_launched += 1
        plan.number = self.num_launched
        plan.writes = [(request, request.pages, request.computed_len) for request in plan.decode]
        plan.writes += [(chunk.request, chunk.request.pages, chunk.start) for chunk in plan.chunks]

    def launched(self, plan: StepPlan) -> None:
        """A planned step is under way: its requests move on as far as can be said without its tokens.

        The last token of one that waits for its grammar counts once `grammar_ready` is called; else it is done again.
        """
        self._in_flight.append(plan)
        self.pages.loaded()
        for request in plan.decode:
            request.computed_len += 1
            request.in_flight += 1
            request.num_sampled += 1
        for chunk in plan.chunks:
            is_open = chunk.samples and chunk.request.waiting_for_grammar
            chunk.request.computed_len += chunk.num_new - len(chunk.drafts) - is_open
            chunk.request.in_flight += 1
            chunk.request.on_device = chunk.samples and not is_open
            chunk.request.num_sampled += chunk.request.on_device
            if not chunk.decodes:
                self.pages.cache_prefix(chunk.request)

    def grammar_ready(self, request: EngineRequest) -> None:
        """A request that waited for its grammar when its step was launched is sampled in it after all."""
        request.computed_len += 1
        request.num_sampled += 1
        request.on_device = True
        self.pages.cache_prefix(request)

    def step_finished(self, plan: StepPlan) -> None:
        """A step's outcome has been read."""
        self._in_flight.remove(plan)
        for request in plan.requests:
            request.in_flight -= 1

    def counted(self, plan: StepPlan) -> None:
        """Free the pages that no later token attends to, once a step's results are known to be valid."""
        if self.pages.tree.partial:
            num_new = {chunk.request: chunk.num_new - len(chunk.drafts) for chunk in plan.chunks}
            for request, _, start in plan.writes:
                if request.row >= 0 and plan.number > request.void_step:
                    self.pages.slide(request, start + num_new.get(request, 1))

    def discard(self, plan: StepPlan, non_finite: list[EngineRequest]) -> None:
        """Undo what a step wrote for `non_finite` requests, and what later steps made of it: it does not count.

        All of these requests go back to the queue, as far as they run, with what they had before; nothing was emitted
        of what they lose, as steps are read in order. The step itself has finished, or was never under way.
        """
        if self.tower is not None:
            self.tower.failed(plan)
        poisoned, affected = self._spread(plan, non_finite)
        for request in affected:
            request.void_step = self.num_launched
            if request.num_output == 0:
                request.cached_len = -1
            if request.row >= 0:
                self._put_back(request)
        self.pages.discard(poisoned)

    def put_back(self, request: EngineRequest) -> None:
        """Let a running request wait again; what steps under way choose for it does not count."""
        request.void_step = self.num_launched
        self._put_back(request)

    def _spread(self, plan: StepPlan, non_finite: list[EngineRequest]) -> tuple[list[set[int]], list[EngineRequest]]:
        """Find the pages of each group that are not to be used, and the requests that have some."""
        poisoned: list[set[int]] = [set() for _ in self.pages.allocators]
        affected = dict.fromkeys(non_finite)
        size = self.pages.page_size
        for step in [plan, *(step for step in self._in_flight if step.number > plan.number)]:
            kept = []
            for write in step.writes:
                request, pages, start = write
                if request in affected or (step is not plan and has_any(pages, poisoned)):
                    affected[request] = None
                    for bad, own in zip(poisoned, pages, strict=True):
                        bad.update(page for page in own[start // size :] if page)
                else:
                    kept.append(write)
            step.writes = kept
        for request in self.running:
            if has_any(request.pages, poisoned):
                affected[request] = None
        return poisoned, list(affected)

    def _put_back(self, request: EngineRequest) -> None:
        """Let a running request wait again; the tree has its full pages."""
        self._give_up_row(request)
        self.waiting.add(request)
        request.timing.put_back()

    def _give_up_row(self, request: EngineRequest) -> None:
        owners = self.owners[request.is_background]
        if owners.is_shared:
            owners.charge(request)
        self.running.remove(request)
        self.pages.release(request)

    def find(self, handle: int) -> EngineRequest | None:
        """Return a request that waits or runs."""
        return self._live.get(handle)

    def end(self, request: EngineRequest) -> None:
        """Take a request out, waiting or running; its pages and row are released, and nothing binds it any more."""
        request.constraint = None
        if request in self.poison_candidates:
            self.poison_candidates.remove(request)
        del self._live[request.handle]
        if request.row < 0:
            self.waiting.remove(request)
        else:
            self._give_up_row(request)
        self.num_background -= request.is_background
        self.owners[request.is_background].leave(request)

    def candidates(self, num: int, *, background: bool) -> Sequence[EngineRequest]:
        """Return the first requests that may be admitted, in order: of the background, or of all others."""
        if self.poison_candidates:
            half = self.poison_candidates[: (len(self.poison_candidates) + 1) // 2]
            return [r for r in half if r.row < 0 and r.is_background == background]
        found = self.waiting.first(num, background=background)
        return self.policy.order(found, self.pages.tree) if found else found

    def retract(self, candidates: list[EngineRequest]) -> EngineRequest:
        """Send one request back to the queue: the lowest priority, then the latest arrival."""
        victim = min(candidates, key=lambda r: (r.priority, -r.arrival))
        self._put_back(victim)
        victim.num_retractions += 1
        return victim

    def _pause(self) -> tuple[set[int], int | None]:
        """Which running background requests take no part in this step, by `id`; and how many waiting ones may begin."""
        if not self.num_background or self.poison_candidates:
            return set(), None
        allowed = self.background.allowance(is_busy=len(self._live) > self.num_background)
        if allowed is None:
            return set(), None
        running = [r for r in self.running if r.is_background]
        return {id(r) for r in running[allowed:]}, max(0, allowed - len(running))

    def _decode_rows(self, paused: set[int]) -> list[EngineRequest]:
        """Running requests that decode, each with room for its next token; retracts until there is."""
        retracted: list[EngineRequest] = []
        while True:
            ready = [r for r in self.running if r.on_device and not r.is_last_token_scheduled]
            decode = [r for r in ready if id(r) not in paused] if paused else ready
            growing = self.pages.growing(decode)
            if self.pages.make_room_to_grow(len(growing)):
                break
            # Prompts of the background in prefill give way to any request that needs a page.
            prompts = (r for r in self.running if r.is_background and not r.on_device)
            retracted.append(self.retract([*ready, *prompts]))
        for request in growing:
            self.pages.allocate_page(request)
        if retracted:
            before = self.ratio.value
            self.ratio.retracted(self.running)
            logger.info(
                "KV cache pool is full. Retract requests. #retracted_reqs: %d, #new_token_ratio: %.4f -> %.4f",
                len(retracted),
                before,
                self.ratio.value,
            )
        return decode
