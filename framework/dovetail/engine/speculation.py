"""Drafts: what requests may say next, guessed on the host and verified by the step that would compute one token anyway.

A draft belongs to the step that verifies it, never to a request: a step that fails, a retraction or an abort leaves
nothing to undo. Only a request of which nothing is under way gets any, as a guess needs to know its last token.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from dovetail.contracts.speculation import Speculator
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


class Speculation:
    """Gives rows that decode their drafts.

    Attributes:
        num_drafted: Drafts that were verified since the start, …
        num_accepted: … and those of them that held.
    """

    def __init__(self, propose: Propose, vocab_size: int) -> None:
        """`propose` guesses for several requests at once, at most `most_drafts` tokens each."""
        self._propose, self._vocab_size = propose, vocab_size
        self.num_drafted = 0
        self.num_accepted = 0

    def extend(self, plan: StepPlan, pages: KVCacheManager, limits: StepLimits) -> None:
        """Let rows of a step that would decode verify drafts instead, as far as tokens, places and pages go."""
        room = min(limits.max_places - len(plan.sampled), limits.max_prefill_tokens - plan.num_prefill_tokens)
        if room <= 0:
            return
        asked = []
        for request in plan.decode:
            if may_have_drafts(request):
                request.most_drafts = min(MAX_DRAFTS, request.remaining_tokens - 1, room)
                asked.append(request)
        if not asked:
            return
        found = [(r, self._usable(r, ids)) for r, ids in zip(asked, self._propose(asked), strict=True)]
        found = [(request, ids) for request, ids in found if ids]
        # Short ones first, so that what they leave is shared out among the longer ones.
        found.sort(key=lambda pair: len(pair[1]))
        for i, (request, ids) in enumerate(found):
            share = ids[: room // (len(found) - i)]
            if share and pages.allocate_draft_slots(request, len(share)):
                room -= len(share)
                start, num = request.computed_len, request.num_pending + len(share)
                plan.chunks.append(PromptChunk(request, start, num, samples=True, drafts=share))
        moved = {chunk.request for chunk in plan.chunks if chunk.drafts}
        plan.decode = [request for request in plan.decode if request not in moved]

    def verified(self, plan: StepPlan, num: Sequence[int]) -> None:
        """Note how many tokens the rows of a step got, in their order."""
        for ids, got in zip(plan.drafts, num, strict=False):
            self.num_drafted += len(ids)
            self.num_accepted += max(0, got - 1)

    def _usable(self, request: EngineRequest, ids: Sequence[int]) -> list[int]:
        """Return what of a draft can hold: nothing from an id on that is none, or ends the request."""
        usable = []
        for token in ids[: request.most_drafts]:
            if not 0 <= token < self._vocab_size or token in request.stop_ids:
                break
            usable.append(int(token))
        return usable


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
