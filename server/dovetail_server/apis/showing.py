"""Calls what a view shows, in threads that nobody else needs: one that sleeps cannot be ended, only left behind.

The event loop's own threads are few, and tokenizing, files and batches wait for them; at its end the process does, too.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from concurrent.futures import Future
from contextlib import suppress
from threading import Thread
from typing import Any

from dovetail.contracts.api import ServerFacts
from dovetail.contracts.errors import PluginError
from dovetail.contracts.requests import JsonObject
from dovetail_server.apis.watch import TICK_S, WATCH

MAX_AT_ONCE = 4
GRACE_S = 2 * TICK_S
"""`WATCH` ends a call that loops so much later at most, and can say where it stood."""


class Showing:
    """Calls one view."""

    def __init__(self, what: str, show: Callable[[ServerFacts, JsonObject], Any]) -> None:
        """Take a view's `show`; `what` it is, for messages."""
        self._what, self._show = what, show
        self._turns = asyncio.Semaphore(MAX_AT_ONCE)

    async def __call__(self, facts: ServerFacts, body: JsonObject) -> Any:
        """Return what it shows.

        Raises:
            PluginError: It did not end in time, or none of `MAX_AT_ONCE` earlier calls did.
            Exception: What it raises.
        """
        try:
            async with asyncio.timeout(WATCH.limit_s + GRACE_S) as limit:
                await self._turns.acquire()
                return await asyncio.wrap_future(self._begin(facts, body))
        except TimeoutError:
            if not limit.expired():
                raise
            raise PluginError(f"{self._what} did not end within {WATCH.limit_s:g} s and is left behind") from None

    def _begin(self, facts: ServerFacts, body: JsonObject) -> Future[Any]:
        loop = asyncio.get_running_loop()
        made: Future[Any] = Future()
        made.set_running_or_notify_cancel()  # who gives up waiting cannot cancel it

        def run() -> None:
            try:
                made.set_result(self._show(facts, body))
            except BaseException as error:
                made.set_exception(error)
            with suppress(RuntimeError):  # the loop has closed meanwhile
                loop.call_soon_threadsafe(self._turns.release)

        try:
            Thread(target=run, name="dovetail-show", daemon=True).start()
        except BaseException:
            self._turns.release()
            raise
        return made
