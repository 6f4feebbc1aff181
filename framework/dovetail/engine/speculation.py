"""Drafts: what requests may say next, guessed on the host and verified by the step that would compute one token anyway.

A draft belongs to the step that verifies it, never to a request: a step that fails, a retraction or an abort leaves
nothing to undo. Only a request of which nothing is under way gets any, as a guess needs to know its last token.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from time import perf_counter
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
import numpy.typing as npt

from dovetail.contracts.speculation import Speculator
from dovetail.engine.draft_record import DraftRecord
from dovetail.engine.request import EngineRequest, PromptChunk, StepPlan
from dovetail.messages.step import PrefillGraph
from dovetail.plugins import LoadedPlugins
from dovetail.plugins.loader import describe

if TYPE_CHECKING:
    from dovetail.engine.kv_cache_manager import KVCacheManager
    from dovetail.engine.limits import StepLimits

logger = logging.getLogger(__name__)


# How many drafts of each request a step verifies, none included: what brings down their mean time a token most.
#
# Drafts need the last token, so a step that verifies waits for the one before it, and computes more. Both are worth it
# where enough of the drafts hold, of enough requests: the others get a token a step, however long it takes.
#
# What steps cost is measured: those that run ahead by their rows and prompt tokens, those that verify by the graph that
# they fit. What holds is measured of each request, and costs no verification: while steps run ahead, its speculator is
# asked now and then, and what follows is compared with what it said (`draft_record.py`). Replies are the same either
# way.

MARGIN = 1.05
"""How many times the time a token of a step with drafts others have to take."""
GUESSED = 2.0
"""Cost of a step with drafts that has not been measured, in those without; rows that have none come on top."""
TRUSTED, REFRESHED = 1024, 256
"""Steps until a measured cost is measured again, where drafts would pay; and that of steps without, while all draft."""
COMPARED = 4
"""Steps without drafts in a row that measure their cost."""
LEAST_PAUSE, MOST_PAUSE = 4, 64
"""Steps without drafts after one that was to have some and found too few: twice as many each time."""
NEW = 0.25
"""Weight of the last step in a cost."""
MOST_NEW = 4.0
"""A step that takes more times the cost so far counts for so much: something else was in its way."""


@dataclass(slots=True)
class Cost:
    """Seconds that steps of a kind take; the first one does not count, as what it needs may have yet to be made."""

    seconds: float = 0.0
    num: int = 0
    at: int = 0

    def add(self, seconds: float, at: int) -> None:
        """Note one, the step number `at`."""
        if self.num < 2 or not self.known(at):
            self.seconds = seconds
        else:
            self.seconds += NEW * (min(seconds, MOST_NEW * self.seconds) - self.seconds)
        self.num, self.at = self.num + 1, at

    def known(self, at: int, trusted: int = TRUSTED) -> bool:
        """Whether it can be relied on in step number `at`."""
        return self.num >= 2 and at - self.at <= trusted


class StepCosts:
    """Costs of steps by kind, those with drafts and those without."""

    def __init__(self, clock: Callable[[], float] = perf_counter) -> None:
        """`clock` gives seconds."""
        self._clock = clock
        self._plain: dict[tuple[int, int], Cost] = {}
        self._verify: dict[tuple[PrefillGraph, int], Cost] = {}
        self._read_at, self._ran_ahead = 0.0, False
        self.now = 0

    def plain(self, num_rows: int, num_prompt: int) -> Cost:
        """Of steps that run ahead, by rows that decode and prompt tokens: about as many have the same."""
        return self._plain.setdefault((num_rows.bit_length(), num_prompt.bit_length()), Cost())

    def verify(self, graph: PrefillGraph, num_left: int) -> Cost:
        """Of steps with drafts, by their graph and the rows that have none."""
        return self._verify.setdefault((graph, num_left.bit_length()), Cost())

    def read(self, plan: StepPlan, graph: PrefillGraph | None) -> None:
        """Take the time since the step before from one that has been read, whose drafts fit a graph."""
        now, before, ran_ahead = self._clock(), self._read_at, self._ran_ahead
        self._read_at, self._ran_ahead = now, not plan.may_draft
        self.now += 1
        if graph is not None:
            self.verify(graph, len(plan.decode)).add(now - before, self.now)
        elif ran_ahead and not plan.may_draft and plan.decode:
            self.plain(len(plan.decode), plan.num_prefill_tokens).add(now - before, self.now)


class Shares(NamedTuple):
    """Drafts that a step verifies, of some rows, and whether the others have room in the same graph."""

    drafts: list[tuple[EngineRequest, list[int]]]
    has_room: bool = False


class DraftChoice(NamedTuple):
    """A graph, None for a step without drafts; `[offers]` drafts of each; and whether it has room for all rows."""

    graph: PrefillGraph | None
    num: npt.NDArray[np.int64]
    has_room: bool = False


class Gain:
    """Decides for one engine.

    Attributes:
        costs: Of its steps.
    """

    def __init__(self, graphs: Callable[[], Sequence[PrefillGraph]], costs: StepCosts | None = None) -> None:
        """`graphs` are those that can verify now, the largest last."""
        self._graphs, self.costs = graphs, costs or StepCosts()
        self._left_plain, self._pause = 0, LEAST_PAUSE
        self._chosen: PrefillGraph | None = None
        self._num_paid = 0

    def is_promising(self, rows: Sequence[EngineRequest], most: int) -> bool:
        """Whether the next step, of these rows that decode, should have drafts: by their records, at most so many."""
        if self._left_plain > 0:
            self._left_plain -= 1
            return False
        offers = [r.record.promise() for r in rows if r.record is not None and r.record.is_promising]
        if not offers:
            self._num_paid = 0
            return False
        cost = self.costs.plain(len(rows), 0)
        if cost.num >= 2 and not cost.known(self.costs.now, REFRESHED):
            self._left_plain, self._num_paid = COMPARED - 1, 0
            return False
        # As the step before, unless fewer promise something: the host's time is the device's, too.
        is_as_before = 0 < self._num_paid <= len(offers)
        return is_as_before or self._best(offers, len(rows), 0, 0, most).graph is not None

    def choose(self, plan: StepPlan, found: Sequence[tuple[EngineRequest, list[int]]], most: int) -> Shares:
        """Choose what a step verifies of drafts of rows of `plan.decode`, at most `most` in all."""
        offers = [(1.0, 0.5 if r.record is None else r.record.hold, len(ids)) for r, ids in found]
        best = self._best(offers, len(plan.decode), len(plan.chunks), plan.num_prefill_tokens, most)
        self._chosen = best.graph
        if best.graph is None:
            self.disappointed()
        else:
            self._num_paid, self._pause = len(found), LEAST_PAUSE
        shares = [(request, ids[:num]) for (request, ids), num in zip(found, best.num.tolist(), strict=True) if num]
        return Shares(shares, best.has_room)

    def disappointed(self) -> None:
        """A step was to have drafts, waited for the one before, and has none."""
        self._left_plain, self._num_paid = self._pause, 0
        self._pause = min(2 * self._pause, MOST_PAUSE)

    def read(self, plan: StepPlan) -> None:
        """Take the time of a step that has been read."""
        self.costs.read(plan, self._chosen if plan.drafts else None)

    def _best(
        self, offers: Sequence[tuple[float, float, int]], num_rows: int, chunks: int, prompt: int, most: int
    ) -> DraftChoice:
        """Choose a graph, and of each offer how many drafts: those that are most likely to hold, as many as fit.

        Args:
            offers: Of each row: how likely there are drafts, how likely each holds if those before do, their number.
            num_rows: Rows of the step that decode.
            chunks: Prompt chunks in the same graph, …
            prompt: … and their tokens.
            most: Most drafts.
        """
        chosen = DraftChoice(None, np.zeros(len(offers), dtype=np.int64))
        plain = self.costs.plain(num_rows, prompt)
        if not offers or plain.num < 2:
            return chosen
        there, hold, length = np.array(offers).T
        places = np.arange(1, int(length.max()) + 1)
        likely = np.where(places <= length[:, None], there[:, None] * hold[:, None] ** places, 0.0)
        order, num_likely = np.argsort(-likely.sum(axis=1), kind="stable"), np.count_nonzero(likely)
        best, least = num_rows * plain.seconds / MARGIN, plain.seconds
        graphs = self._graphs()
        roomy = [graph for graph in graphs if graph.chunks >= chunks + num_rows and graph.tokens > prompt + num_rows]
        has_room = bool(roomy)
        for graph in roomy or graphs[-1:]:
            rows = order if has_room else order[: max(0, min(graph.chunks - chunks, (graph.tokens - prompt) // 2))]
            room = min(most, graph.tokens - prompt - (num_rows if has_room else len(rows)))
            if not len(rows) or room <= 0:
                continue
            mine = likely[rows]
            taken = np.argsort(-mine, axis=None, kind="stable")[:room]
            taken = taken[mine.flat[taken] > 0]
            each = np.bincount(taken // mine.shape[1], minlength=len(rows))
            left = 0 if has_room else num_rows - int(np.count_nonzero(each))
            cost = self.costs.verify(graph, left)
            guessed = max(least, (GUESSED + (left > 0)) * plain.seconds)
            seconds = cost.seconds if cost.known(self.costs.now) else guessed
            least = max(least, seconds)
            expected = np.bincount(taken // mine.shape[1], mine.flat[taken], len(rows))
            if (waits := (num_rows - len(rows) + (1 / (1 + expected)).sum()) * seconds) < best:
                best, chosen = waits, DraftChoice(graph, np.zeros(len(offers), dtype=np.int64), has_room)
                chosen.num[rows] = each
            if has_room and len(taken) == num_likely:
                break  # larger ones would compute padding
        return chosen


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
