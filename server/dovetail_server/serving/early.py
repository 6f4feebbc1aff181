"""The beginning of a long prompt is computed while the rest is tokenized: the request finds it in the prefix cache."""

from __future__ import annotations

import asyncio
from contextlib import aclosing, suppress
from typing import TYPE_CHECKING

from dovetail.contracts.errors import DovetailError
from dovetail.engine.client import TokenStream
from dovetail.messages import SamplerParams, Submit, TokenDelta
from dovetail_server.http.auth import CALLER
from dovetail_server.serving.common import service_of

if TYPE_CHECKING:
    from dovetail_server.serving.context import ServingContext
    from dovetail_server.tenants.tenant import Tenant

WEIGHTS_PER_S = 2e12
"""Bytes of weights for which a step more costs a second: of Qwen3.5-35B-A3B it took about 40 ms on an H200, which reads
them in half that time. On a slower device a dense model's step costs more, and yet as little beside its tokens."""


def next_end(
    num_sent: int, num_known: int, num_about: int, num_new: int, seconds: float, size: int, step_s: float
) -> int:
    """Return where the next beginning of a prompt ends, or 0 while another one does not pay.

    It adds no step to those that the prompt takes, unless waiting for the tokens that spare the step takes longer. So a
    step that reads the weights of many experts is filled, and one of a small model begins soon.

    Args:
        num_sent: Tokens of the beginnings before: this one has twice as many at least.
        num_known: Tokens that are known, …
        num_about: … and about how many the prompt will have.
        num_new: Of those known, what came last, all at once: as many will come next.
        seconds: How long it took to know so many.
        size: Tokens that a step takes.
        step_s: What a step costs beside its tokens.
    """
    last = (num_known - num_sent) % size
    lacks = (num_about - num_sent - 1) % size + 1 - last  # with so many more, all steps behind it are full
    waits_s = seconds / num_known * num_new * -(-lacks // num_new)
    end = num_known - last if lacks > 0 and waits_s <= step_s else num_known
    return end if end >= 2 * num_sent else 0


class EarlyPrefill:
    """What the engine computes for one request that is not submitted yet. Used from the event loop.

    It is the engine's work for the request's owner, under the request's salt and priority. Where others wait for their
    first token, nothing is done early: it would only come before them.
    """

    def __init__(self, state: ServingContext) -> None:
        """Nothing has begun."""
        self._state = state
        self._ids: list[int] = []
        self._known, self._asked, self._num_sent = (0, 0, 0.0), (0, ""), 0
        self._tasks: list[asyncio.Task[None]] = []
        self._ends: list[TokenDelta] = []
        self._owed: tuple[Tenant, int] | None = None

    def begin(self, ids: list[int], num_about: int, seconds: float, priority: int, cache_salt: str) -> None:
        """Take the next tokens of the prompt, and have the engine compute what is known of it as soon as that pays.

        Args:
            ids: Those behind the ones of earlier calls.
            num_about: About how many the prompt will have.
            seconds: How long it took to tokenize all up to there.
            priority: The request's, as its client asked.
            cache_salt: The request's own.
        """
        self._ids += ids
        self._known, self._asked = (num_about, len(ids), seconds), (priority, cache_salt)
        self._go_on()

    def num_cached(self, num_found: int) -> int:
        """Return how much of the prompt was cached before anything began, of what the request found in the end."""
        for end in self._ends:
            if end.finish is None or end.finish.reason != "stop":
                break
            if end.cached_tokens < end.prompt_tokens:
                return min(num_found, end.cached_tokens)
        return num_found

    def admitted(self) -> None:
        """The request was let in, and all of its prompt counted: nothing more begins."""
        self._owed = None
        self._ids.clear()

    def close(self) -> None:
        """Abort what still runs. If the request never came, what was begun for it counts as its caller's tokens."""
        for task in self._tasks:
            task.cancel()
        if self._owed is not None:
            tenant, num_tokens = self._owed
            tenant.used(num_tokens)
            self._owed = None

    def _go_on(self) -> None:
        """Have the next beginning computed if there is one."""
        with suppress(DovetailError):  # whatever is wrong, the request itself is refused for it
            if not self._ids or not (end := self._next_end()):
                return
            ids, params, service = self._ids[:end], SamplerParams(max_tokens=1), service_of(*self._asked)
            submit = Submit(rid="", prompt_ids=ids, params=params, prefill_only=True, **service)
            stream = self._state.engine.submit(submit)
            self._num_sent, self._owed = end, (CALLER.get().tenant, end)
            self._tasks.append(self._state.tasks.start("early prefill", self._read(stream)))

    def _next_end(self) -> int:
        """Return where the next beginning ends; 0 if there is none, or the engine has something better to do.

        Raises:
            DovetailError: The request will be refused.
        """
        state = self._state
        state.check_ready()
        info = state.info
        if state.settings.disable_radix_cache or state.num_live >= info.max_running_requests:
            return 0
        if state.engine.num_unanswered:  # by others, or by the beginning before: meanwhile more becomes known
            return 0
        size = info.chunk_size if info.chunk_size > 0 else info.context_len
        step_s = info.weight_bytes / WEIGHTS_PER_S
        end = next_end(self._num_sent, len(self._ids), *self._known, size, step_s)
        state.check_room(1, end, is_counted=False)
        return end

    async def _read(self, stream: TokenStream) -> None:
        with suppress(DovetailError):  # the engine is gone, which the request will meet
            async with aclosing(stream):
                self._ends.append(await anext(stream))
        self._go_on()
