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


class EarlyPrefill:
    """What the engine computes for one request that is not submitted yet. Used from the event loop.

    It is the engine's work for the request's owner, under the request's salt and priority. Where others wait for their
    first token, nothing is done early: it would only come before them.
    """

    def __init__(self, state: ServingContext) -> None:
        """Nothing has begun."""
        self._state = state
        self._tasks: list[asyncio.Task[None]] = []
        self._ends: list[TokenDelta] = []
        self._owed: tuple[Tenant, int] | None = None

    def begin(self, ids: list[int], priority: int, cache_salt: str) -> None:
        """Have the first tokens of the prompt computed, behind those of earlier calls.

        Args:
            ids: Of the whole prompt up to there.
            priority: The request's, as its client asked.
            cache_salt: The request's own.
        """
        with suppress(DovetailError):  # whatever is wrong, the request itself is refused for it
            if not self._may_begin(len(ids)):
                return
            service = service_of(priority, cache_salt)
            submit = Submit(rid="", prompt_ids=ids, params=SamplerParams(max_tokens=1), prefill_only=True, **service)
            stream = self._state.engine.submit(submit)
            self._owed = CALLER.get().tenant, len(ids)
            self._tasks.append(self._state.tasks.start("early prefill", self._read(stream)))

    def num_cached(self, num_found: int) -> int:
        """Return how much of the prompt was cached before anything began, of what the request found in the end."""
        for end in self._ends:
            if end.finish is None or end.finish.reason != "stop":
                break
            if end.cached_tokens < end.prompt_tokens:
                return min(num_found, end.cached_tokens)
        return num_found

    def admitted(self) -> None:
        """The request was let in, and all of its prompt counted."""
        self._owed = None

    def close(self) -> None:
        """Abort what still runs. If the request never came, what was begun for it counts as its caller's tokens."""
        for task in self._tasks:
            task.cancel()
        if self._owed is not None:
            tenant, num_tokens = self._owed
            tenant.used(num_tokens)
            self._owed = None

    def _may_begin(self, num_tokens: int) -> bool:
        """Whether the engine would have nothing better to do.

        Raises:
            DovetailError: The request will be refused.
        """
        state = self._state
        state.check_ready()
        state.check_room(1, num_tokens, is_counted=False)
        if state.settings.disable_radix_cache or state.num_live >= state.info.max_running_requests:
            return False
        return state.engine.num_unanswered <= len(self._tasks) - len(self._ends)

    async def _read(self, stream: TokenStream) -> None:
        with suppress(DovetailError):  # the engine is gone, which the request will meet
            async with aclosing(stream):
                self._ends.append(await anext(stream))
