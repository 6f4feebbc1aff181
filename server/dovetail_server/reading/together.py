"""Short work that the event loop waits for, done by several threads at once where several requests want it."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextvars import Context, copy_context
from time import perf_counter
from typing import Any, TypeVar

T = TypeVar("T")
Outcome = tuple[Any, BaseException | None]


class Together:
    """What requests of one round of the event loop want is done at once, while the loop waits.

    Most of a short request is tokenizing, which holds no lock of Python. Beside a loop that runs, each thread would
    wait up to 5 ms for that lock, again and again; a loop that waits leaves it to them.
    """

    def __init__(self, num_threads: int, most_s: float) -> None:
        """Use so many threads; in a round, nothing begins after `most_s` seconds, so that streams get their tokens."""
        self._num_threads, self._most_s = num_threads, most_s
        self._waiting: deque[tuple[Context, Callable[[], Any], asyncio.Future[Outcome]]] = deque()
        self._pool: ThreadPoolExecutor | None = None

    async def run(self, work: Callable[[], T]) -> T:
        """Return what `work` returns, or raise what it raises; it is done in the order of arrival, in this context."""
        loop = asyncio.get_running_loop()
        place: asyncio.Future[Outcome] = loop.create_future()
        if not self._waiting:
            loop.call_soon(self._round, loop)
        self._waiting.append((copy_context(), work, place))
        made, error = await place
        if error is not None:
            raise error
        found: T = made
        return found

    def _round(self, loop: asyncio.AbstractEventLoop) -> None:
        until = perf_counter() + self._most_s
        while self._waiting and perf_counter() < until:
            some = [self._waiting.popleft() for _ in range(min(self._num_threads, len(self._waiting)))]
            wanted = [each for each in some if not each[2].done()]  # whose client has not left
            for (_, _, place), outcome in zip(wanted, self._outcomes([each[:2] for each in wanted]), strict=True):
                place.set_result(outcome)
        if self._waiting:
            loop.call_soon(self._round, loop)

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
