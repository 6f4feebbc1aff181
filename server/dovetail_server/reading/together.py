"""Short work that the event loop waits for: key by key, and at once by several threads where several want some."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextvars import Context, copy_context
from time import perf_counter
from typing import Any, TypeVar

from dovetail_server.http.auth import CALLER
from dovetail_server.reading.turns import Place, TurnLine

T = TypeVar("T")
Outcome = tuple[Any, BaseException | None]


class Together:
    """What requests of one round of the event loop want is done at once, while the loop waits.

    Most of preparing a short request is tokenizing, which holds no lock of Python. Beside a loop that runs, each thread
    would wait up to 5 ms for that lock, again and again; a loop that waits leaves it to them.
    """

    def __init__(self, num_threads: int, most_s: float) -> None:
        """Use so many threads; in a round, nothing begins after `most_s` seconds, so that streams get their tokens."""
        self._num_threads, self._most_s = num_threads, most_s
        self._line, self._works = TurnLine(), dict[Place, tuple[Context, Callable[[], Any]]]()
        self._has_begun = False
        self._pool: ThreadPoolExecutor | None = None

    async def run(self, work: Callable[[], T]) -> T:
        """Return what `work` returns, or raise what it raises; it is done in this context.

        A round's first is done at once, the others when it is their key's turn.
        """
        if not self._has_begun:
            self._next_round_soon()
            return work()
        place = self._line.join(CALLER.get().owner)
        self._works[place] = copy_context(), work
        try:
            made, error = await place
        finally:
            self._works.pop(place, None)
        if error is not None:
            raise error
        found: T = made
        return found

    def _next_round_soon(self) -> None:
        self._has_begun = True
        asyncio.get_running_loop().call_soon(self._round)

    def _round(self) -> None:
        self._has_begun, until = False, perf_counter() + self._most_s
        while perf_counter() < until and (called := self._called()):
            works = [self._works.pop(place) for place in called]
            for place, outcome in zip(called, self._outcomes(works), strict=True):
                place.set_result(outcome)
        if self._works:
            self._next_round_soon()

    def _called(self) -> list[Place]:
        return [found[1] for _ in range(self._num_threads) if (found := self._line.next())]

    def _outcomes(self, works: list[tuple[Context, Callable[[], Any]]]) -> list[Outcome]:
        if len(works) < 2:
            return list(map(_done, works))
        self._pool = self._pool or ThreadPoolExecutor(self._num_threads, "prepare")
        try:
            return list(self._pool.map(_done, works))
        except RuntimeError as error:  # the machine has no thread left
            return [(None, error)] * len(works)


def _done(given: tuple[Context, Callable[[], Any]]) -> Outcome:
    """Do one's work; what it raises is its own."""
    context, work = given
    try:
        return context.run(work), None
    except BaseException as error:
        return None, error
