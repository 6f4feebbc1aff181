"""Replies whose states the prefix cache is to have: each is computed once more, as a prompt, when it has ended.

A copy of a recurrent state is taken from prompts alone: one that came of decoding has other last bits. So what follows
a reply that comes back, as a conversation does, has to compute it again. With `--fold-replies` that is done before the
next turn comes, by a request of the engine's own behind all others.
"""

from __future__ import annotations

import itertools

from dovetail.engine.request import EngineRequest
from dovetail.engine.scheduler import Scheduler
from dovetail.messages import SamplerParams, Submit


class ReplyFolds:
    """Makes a request of each reply that is worth it: it samples nothing, and no client knows of it."""

    def __init__(self, scheduler: Scheduler) -> None:
        self._scheduler, self._handles = scheduler, itertools.count(-1, -1)

    def ended(self, request: EngineRequest) -> None:
        """A request has ended well: if its reply reaches further than its prompt's copies, have it computed again.

        While as many wait as can run, nothing is done: what waits comes first.
        """
        scheduler, grid = self._scheduler, self._scheduler.pages.states.grid
        num = len(request.ids) // grid * grid
        if request.media is not None:
            return  # its images may be gone when it would be computed
        if num <= (request.num_prompt - 1) // grid * grid or request.num_output == 0:
            return
        if len(scheduler.waiting) >= scheduler.limits.max_running_requests:
            return
        message = Submit(
            rid=request.rid,
            handle=next(self._handles),
            prompt_ids=list(request.ids[:num]),
            params=SamplerParams(max_tokens=0),
            priority=request.priority,
            cache_salt=request.cache_salt,
            owner=request.owner,
            weight=request.weight,
        )
        again = EngineRequest.from_submit(message, arrival=request.arrival, eos_ids=())
        again.is_reply, again.max_tokens = True, 0
        scheduler.add(again)
