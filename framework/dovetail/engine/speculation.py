"""Drafts: what requests may say next, guessed on the host and verified by the step that would compute one token anyway.

A draft belongs to the step that verifies it, never to a request: a step that fails, a retraction or an abort leaves
nothing to undo. Only a request of which nothing is under way gets any, as a guess needs to know its last token.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from dovetail.contracts.speculation import Speculator
from dovetail.engine.draft_gain import Gain, Shares
from dovetail.engine.draft_record import DraftRecord
from dovetail.engine.request import EngineRequest, PromptChunk, StepPlan
from dovetail.plugins import LoadedPlugins
from dovetail.plugins.loader import describe

if TYPE_CHECKING:
    from dovetail.engine.kv_cache_manager import KVCacheManager
    from dovetail.engine.limits import StepLimits

logger = logging.getLogger(__name__)
KIND = "speculator"
Propose = Callable[[Sequence[EngineRequest]], Sequence[Sequence[int]]]
MAX_DRAFTS = 64
"""Most drafts of a request in a step: the state of thinking is taken back this far and farther."""
MOST_WATCHED = 16
"""Most requests that a speculator is asked for in a step that verifies nothing."""


class Speculation:
    """Gives rows that decode their drafts.

    Attributes:
        gain: Says which steps verify how many drafts; None: each verifies what there is room for, in even shares.
        num_drafted: Drafts that were verified since the start, …
        num_accepted: … and those of them that held.
    """

    def __init__(self, propose: Propose, vocab_size: int) -> None:
        """`propose` guesses for several requests at once, at most `most_drafts` tokens each."""
        self._propose, self._vocab_size = propose, vocab_size
        self.gain: Gain | None = None
        self.num_drafted = 0
        self.num_accepted = 0
        self._is_next, self._most = True, 0

    def wants_next(self, running: Sequence[EngineRequest]) -> bool:
        """Decide whether the next step is to have drafts: the one in flight is read before it is planned."""
        rows = [request for request in running if request.on_device]
        self._is_next = bool(rows) and (self.gain is None or self.gain.is_promising(rows, self._most - len(rows)))
        return self._is_next

    def extend(self, plan: StepPlan, pages: KVCacheManager, limits: StepLimits) -> None:
        """Let rows of a step that would decode verify drafts instead, as far as tokens, places and pages go."""
        plan.may_draft, self._most = self._is_next, limits.max_places
        if not self._is_next:
            self._watch(plan.decode)
            return
        room = min(limits.max_places - len(plan.sampled), limits.max_prefill_tokens - plan.num_prefill_tokens)
        asked = [request for request in plan.decode if may_have_drafts(request) and self._is_asked(request)]
        found = self._ask(asked, room, len(plan.decode)) if room > 0 else []
        if not found:
            if self.gain is not None:
                self.gain.disappointed()
            return
        shares = self._even(found, room) if self.gain is None else self.gain.choose(plan, found, room)
        for request, ids in shares.drafts:
            if pages.allocate_draft_slots(request, len(ids)):
                record_of(request).ids = ()
                plan.chunks.append(_chunk(request, ids))
        moved = {chunk.request for chunk in plan.chunks if chunk.drafts}
        plan.decode = [request for request in plan.decode if request not in moved]
        if moved and shares.has_room:
            plan.chunks += [_chunk(request, ()) for request in plan.decode]
            plan.decode = []

    def verified(self, plan: StepPlan, num: Sequence[int]) -> None:
        """Note how many tokens the rows of a step got, in their order."""
        for request, ids, got in zip(plan.sampled, plan.drafts, num, strict=False):
            self.num_drafted += len(ids)
            self.num_accepted += max(0, got - 1)
            if ids and got and request.record is not None:
                request.record.tried(len(ids), got - 1)

    def _is_asked(self, request: EngineRequest) -> bool:
        """Whether a request is asked for drafts that are to be verified."""
        return self.gain is None or request.record is None or request.record.is_asked(len(request.ids))

    def _ask(
        self, requests: Sequence[EngineRequest], most: int, num_rows: int
    ) -> list[tuple[EngineRequest, list[int]]]:
        """Return the drafts of those that have any, at most `most` each; `num_rows` decode."""
        if not requests:
            return []
        for request in requests:
            request.most_drafts = min(MAX_DRAFTS, request.remaining_tokens - 1, most)
        found = []
        for request, drafts in zip(requests, self._propose(requests), strict=True):
            ids = self._usable(request, drafts)
            if self.gain is not None:
                record = record_of(request)
                record.compare(request.ids)
                record.asked(len(request.ids), ids, num_rows)
            if ids:
                found.append((request, ids))
        return found

    def _watch(self, rows: Sequence[EngineRequest]) -> None:
        """Learn what drafts of rows would be worth whose step has none."""
        due = [r for r in rows if r.record is None or r.record.due <= len(r.ids)]
        due = [r for r in due if r.remaining_tokens > 1 and not r.params.looks_back][:MOST_WATCHED]
        self._ask(due, MAX_DRAFTS, len(rows))

    def _even(self, found: list[tuple[EngineRequest, list[int]]], room: int) -> Shares:
        """Share `room` drafts out: short ones first, so that what they leave is for the longer ones."""
        found.sort(key=lambda pair: len(pair[1]))
        shares = []
        for i, (request, ids) in enumerate(found):
            share = ids[: room // (len(found) - i)]
            room -= len(share)
            shares.append((request, share))
        return Shares([(request, ids) for request, ids in shares if ids])

    def _usable(self, request: EngineRequest, ids: Sequence[int]) -> list[int]:
        """Return what of a draft can hold: nothing from an id on that is none, or ends the request."""
        usable = []
        for token in ids[: request.most_drafts]:
            if not 0 <= token < self._vocab_size or token in request.stop_ids:
                break
            usable.append(int(token))
        return usable


def _chunk(request: EngineRequest, ids: Sequence[int]) -> PromptChunk:
    """A request that decodes, in the form of a prompt's last tokens: its last token, and drafts behind it."""
    num = request.num_pending + len(ids)
    return PromptChunk(request, request.computed_len, num, samples=True, decodes=True, drafts=ids)


def record_of(request: EngineRequest) -> DraftRecord:
    """Return a request's record, which it may yet have to get."""
    if request.record is None:
        request.record = DraftRecord()
    return request.record


def may_have_drafts(request: EngineRequest) -> bool:
    """Whether drafts of a request can be verified: its last token is known, and its draws do not look back.

    What penalties and logits processors note would have to be taken back for drafts that do not hold.
    """
    return request.in_flight == 0 and request.remaining_tokens > 1 and not request.params.looks_back


class Drafter:
    """Calls a `Speculator`. One that fails, or returns what it may not, costs its step the drafts."""

    def __init__(self, plugin: Speculator, label: str) -> None:
        """`label` names the plugin in the log."""
        self._plugin, self._label = plugin, label
        self._faults: set[str] = set()

    def propose(self, requests: Sequence[EngineRequest]) -> Sequence[Sequence[int]]:
        """Return drafts for each request; none where the plugin is at fault, which is logged once."""
        try:
            found = [list(ids[: r.most_drafts]) for r, ids in zip(requests, self._plugin.draft(requests), strict=True)]
            if not all(isinstance(token, int) or hasattr(token, "__index__") for ids in found for token in ids):
                raise TypeError("it drafts what is no token id")
            return found
        except Exception as error:  # a stranger's code; a step is right without drafts
            if type(error).__name__ not in self._faults:
                self._faults.add(type(error).__name__)
                what = f"{type(error).__name__}: {' '.join(str(error).split())[:200]}"
                text = "%s: draft failed (%s); such steps do without drafts. It is not logged again."
                logger.error(text, self._label, what, exc_info=error)
            return [()] * len(requests)


def make_speculation(plugins: LoadedPlugins, vocab_size: int) -> Speculation | None:
    """Make what an engine's plan drafts with; None where it names no speculator."""
    for planned, cls in plugins.candidates(KIND):
        with plugins.watched(planned):
            return Speculation(Drafter(cls(), describe(planned)).propose, vocab_size)
    return None
