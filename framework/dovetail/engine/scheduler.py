"""Decides what each step computes: admits, chunks prompts, mixes them with decode rows, retracts when the pool is full.

Host side only; it never touches a tensor. Page ownership is in `engine/pages.py`.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass

from dovetail.engine.background import Background, is_background
from dovetail.engine.pages import PageBook
from dovetail.engine.policy import SchedulePolicy
from dovetail.engine.request import Chunk, Request, StepPlan

logger = logging.getLogger(__name__)

PageKey = tuple[int, tuple[int, ...]]


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """Bounds of a step. With `cut_prompts` off, a prompt longer than `max_prefill_tokens` runs whole, alone."""

    max_running_requests: int
    max_prefill_tokens: int
    cut_prompts: bool = True


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

    def retracted(self, running: list[Request]) -> None:
        """Requests were retracted: learn from how much the others have used."""
        used = sum(r.num_output for r in running) + 20 * len(running)
        allowed = sum(r.max_tokens for r in running)
        self.value = min(1.0, used / (allowed + 1))


class Scheduler:
    """Continuous batching over a paged cache.

    `waiting` has no pages or row; `running` has both, whether in prefill or decode.
    """

    def __init__(
        self, pages: PageBook, policy: SchedulePolicy, limits: Limits, background: Background | None = None
    ) -> None:
        self.pages = pages
        self.policy = policy
        self.limits = limits
        self.background = background or Background()
        self.ratio = NewTokenRatio()
        self.waiting: list[Request] = []
        self.running: list[Request] = []

    @property
    def has_work(self) -> bool:
        """Whether a step would compute anything."""
        return bool(self.waiting or self.running)

    def schedule(self) -> StepPlan:
        """Plan the next step. It is empty where all that there is holds back; `background.wait_s` says how long."""
        paused = self._paused()
        plan = StepPlan(self._decode_rows(paused), [])
        budget = self.limits.max_prefill_tokens
        for request in self.running:
            if not request.on_device and budget > 0 and id(request) not in paused:
                budget -= self._add_chunk(plan, request, budget)
        if self.waiting and budget > 0:
            self._admit(plan, budget, paused)
        if plan.decode and not plan.chunks:
            self.ratio.step()
        return plan

    def launched(self, plan: StepPlan) -> None:
        """A planned step is under way: its requests move on as far as can be said without its tokens.

        The last token of an undecided request counts once `decided` is called; else it is computed again.
        """
        for request in plan.decode:
            request.computed_len += 1
            request.in_flight += 1
        for chunk in plan.chunks:
            is_open = chunk.samples and chunk.request.undecided
            chunk.request.computed_len += chunk.num_new - is_open
            chunk.request.in_flight += 1
            chunk.request.on_device = chunk.samples and not is_open
            self.pages.share(chunk.request)

    def decided(self, request: Request) -> None:
        """A request that was undecided when its step was launched is sampled in it after all."""
        request.computed_len += 1
        request.on_device = True
        self.pages.share(request)

    def landed(self, plan: StepPlan) -> None:
        """A step's outcome has been read."""
        for request in plan.requests:
            request.in_flight -= 1

    def remove(self, handle: int) -> Request | None:
        """Take a request out, waiting or running; its pages and row are released."""
        for request in (*self.waiting, *self.running):
            if request.handle == handle:
                self.end(request)
                return request
        return None

    def end(self, request: Request, *, scrub: bool = False) -> None:
        """Take a request out that has ended: it runs, or was retracted while its last token was on its way."""
        if request.row < 0:
            self.waiting.remove(request)
        else:
            self.running.remove(request)
            self.pages.release(request, scrub=scrub)

    def _paused(self) -> set[int]:
        """Background requests, by `id`, that take no part in this step."""
        everyone = self.running + self.waiting
        waiting = [r for r in everyone if is_background(r)]
        if not waiting:
            return set()
        allowed = self.background.allowance(everyone)
        return set() if allowed is None else {id(r) for r in waiting[allowed:]}

    def _decode_rows(self, paused: set[int]) -> list[Request]:
        """Running requests that decode, each with room for its next token; retracts until there is."""
        retracted: list[Request] = []
        while True:
            ready = [r for r in self.running if r.on_device and not r.is_sampled_out]
            decode = [r for r in ready if id(r) not in paused] if paused else ready
            growing = [r for r in decode if self.pages.needs_page(r)]
            if self.pages.make_room(len(growing)):
                break
            retracted.append(self._retract(ready))
        for request in growing:
            self.pages.grow(request)
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

    def _retract(self, candidates: list[Request]) -> Request:
        """Send one request back to the queue: the lowest priority, then the latest arrival."""
        victim = min(candidates, key=lambda r: (r.priority, -r.arrival))
        self.running.remove(victim)
        self.pages.release(victim)
        victim.num_retractions += 1
        self.waiting.append(victim)
        return victim

    def _admit(self, plan: StepPlan, budget: int, paused: set[int]) -> None:
        """Move waiting requests to `running` while rows, pages and the token budget last."""
        prefixes = self._prefixes_in_flight()
        for request in self.policy.order(self.waiting, self.pages.tree):
            if budget <= 0:
                break
            if id(request) in paused:
                continue
            if request.in_flight:
                continue  # retracted with a token on its way, which belongs to what is to be computed again
            self.pages.match(request)
            key = self._next_page(request)
            if key is not None and key in prefixes:
                self.pages.unmatch(request)  # another request is computing this very page: wait for it and share
                continue
            whole = self.limits.cut_prompts or not plan.chunks or self._uncached(request) <= budget
            if not whole or not self._make_space(plan, request):
                self.pages.unmatch(request)
                break
            self.waiting.remove(request)
            self.running.append(request)
            self.pages.admit(request)
            plan.num_new_requests += 1
            plan.num_cached_tokens += request.computed_len
            budget -= self._add_chunk(plan, request, budget)
            if key is not None:
                prefixes.add(key)

    def _make_space(self, plan: StepPlan, request: Request) -> bool:
        """Whether `request` fits beside the running ones, after retracting those that give way to it.

        These are background requests, and any of lower priority if the policy retracts them.
        """
        while not self._fits(request):
            busy = {id(chunk.request) for chunk in plan.chunks}
            lower = [r for r in self.running if r.priority < request.priority and id(r) not in busy]
            victims = lower if self.policy.preempts else [r for r in lower if is_background(r)]
            if not victims:
                return False
            victim = self._retract(victims)
            plan.decode = [r for r in plan.decode if r is not victim]
        return True

    def _fits(self, request: Request) -> bool:
        """Whether there is a row, and room for the prompt and for what all are expected to generate."""
        if len(self.running) >= self.limits.max_running_requests:
            return False
        need = self.pages.pages_to_compute(request)
        if self.running:
            need += sum(self._expected_pages(r) for r in self.running) + self._expected_pages(request)
        return need <= self.pages.num_available

    def _uncached(self, request: Request) -> int:
        """Tokens that a matched request has to compute."""
        return len(request.ids) - request.num_tree_pages * self.pages.page_size

    def _expected_pages(self, request: Request) -> int:
        return self.pages.pages_for(int(request.remaining_tokens * self.ratio.value))

    def _prefixes_in_flight(self) -> set[PageKey]:
        """First page that each prefilling request is about to add to the tree."""
        keys = (self._next_page(r) for r in self.running if not r.on_device)
        return {key for key in keys if key is not None}

    def _next_page(self, request: Request) -> PageKey | None:
        """Where in the tree, and with which tokens, the next full page of `request` will go."""
        size = self.pages.page_size
        start = request.num_tree_pages * size
        if request.node is None or start + size > len(request.ids) - 1:
            return None
        return id(request.node), tuple(request.ids[start : start + size])

    def _add_chunk(self, plan: StepPlan, request: Request, budget: int) -> int:
        """Plan the next chunk of a prompt; returns its length.

        An undecided request's last token takes part with others, as what follows it may be known in time; by itself
        it waits for that.
        """
        wanted = 0 if request.undecided and request.num_pending == 1 else request.num_pending
        num = min(wanted, budget) if self.limits.cut_prompts else wanted
        if num > 0:
            plan.chunks.append(Chunk(request, request.computed_len, num, samples=num == request.num_pending))
        return num
