"""Background work of one process: named tasks that are watched, restarted, counted, and ended together.

An unwatched task dies unseen. So every task that outlives the call that starts it is started here, and a test
that walks the source refuses others.
"""

from __future__ import annotations

import asyncio
import logging
import os
import threading
import time
import traceback
from collections import Counter, deque
from collections.abc import Awaitable, Callable, Coroutine, Iterator
from contextlib import contextmanager
from typing import Any, TypeVar

logger = logging.getLogger("dovetail")
T = TypeVar("T")

MAX_CRASHES = 5
WINDOW_S = 60.0
"""A service that died so often in so long a time makes the process unready, until it lives again."""
STABLE_S = 10.0
"""A service that has run for so long since its last death lives again."""
FIRST_DELAY_S = 0.1
MAX_DELAY_S = 8.0
END_S = 5.0
"""Time for tasks to end once they were cancelled."""
LAST_RESORT_S = 30.0
"""For the whole process: after this `exit_after` is meant to end it."""
MAX_CAUSES = 256


class SupervisedService:
    """Work that goes on as long as the process: when it dies, it is started again, later each time."""

    def __init__(self, group: Supervisor, name: str, work: Callable[[], Awaitable[None]]) -> None:
        """Start it. `work` is called again after each death; when it returns, the service has ended."""
        self.name = name
        self._group = group
        self._work = work
        self._crashes: deque[float] = deque(maxlen=MAX_CRASHES)
        self._last_error = ""
        self._is_waiting = False
        self._began = time.monotonic()
        self._task = group.start(name, self._run())

    @property
    def problem(self) -> str | None:
        """Why it cannot be kept alive, or None."""
        now = time.monotonic()
        is_often = len(self._crashes) == MAX_CRASHES and now - self._crashes[0] < WINDOW_S
        if not is_often or (not self._is_waiting and now - self._began > STABLE_S):
            return None
        return f"background task {self.name!r} died {MAX_CRASHES} times within {WINDOW_S:g} s: {self._last_error}"

    async def stop(self, limit_s: float = END_S) -> None:
        """End it."""
        await self._group.stop([self._task], limit_s)

    async def _run(self) -> None:
        while True:
            self._began = time.monotonic()
            try:
                await self._work()
                return
            except asyncio.CancelledError as error:
                if is_cancelled():
                    raise
                self._note(error)  # something that it waited for was cancelled, not the service
            except Exception as error:
                self._note(error)
            self._is_waiting = True
            await asyncio.sleep(self._delay_s())
            self._is_waiting = False

    def _note(self, error: BaseException) -> None:
        self._crashes.append(time.monotonic())
        self._last_error = f"{type(error).__name__}: {error}"
        self._group.note_crash(self.name, error)

    def _delay_s(self) -> float:
        recent = sum(at > time.monotonic() - WINDOW_S for at in self._crashes)
        return min(MAX_DELAY_S, FIRST_DELAY_S * 2 ** (recent - 1) if recent < MAX_CRASHES else MAX_DELAY_S)


class Supervisor:
    """The background tasks of one process. Used from its event loop, but for `exit_after`."""

    def __init__(self) -> None:
        """Begin with none."""
        self.crashes: Counter[str] = Counter()
        """How often work died, by its name."""
        self._tasks: dict[asyncio.Task[Any], str] = {}
        self._services: list[SupervisedService] = []
        self._causes: set[tuple[str, str, str]] = set()
        self._timer: threading.Timer | None = None

    @property
    def problem(self) -> str | None:
        """Why the process should get no traffic, or None."""
        return next((service.problem for service in self._services if service.problem is not None), None)

    def keep(self, name: str, work: Callable[[], Awaitable[None]]) -> SupervisedService:
        """Start work that is restarted when it dies."""
        service = SupervisedService(self, name, work)
        self._services = [each for each in self._services if each._task in self._tasks]
        self._services.append(service)
        return service

    def start(self, name: str, work: Coroutine[Any, Any, T], *, is_awaited: bool = False) -> asyncio.Task[T]:
        """Start work that ends by itself and is not restarted.

        Args:
            name: One of few: it is a label of metrics.
            work: The work.
            is_awaited: Its error reaches the code that awaits the task. Otherwise it is logged and counted.
        """
        task = asyncio.get_running_loop().create_task(work, name=name)
        self._tasks[task] = name
        task.add_done_callback(self._awaited if is_awaited else self._ended)
        return task

    def _awaited(self, task: asyncio.Task[Any]) -> None:
        self._tasks.pop(task, None)

    def _ended(self, task: asyncio.Task[Any]) -> None:
        name = self._tasks.pop(task)
        if not task.cancelled() and (error := task.exception()) is not None:
            self.note_crash(name, error)

    def note_crash(self, name: str, error: BaseException) -> None:
        """Count a death and log it, with its traceback if its cause is new."""
        self.crashes[name] += 1
        last = traceback.extract_tb(error.__traceback__)[-1:]
        cause = (name, type(error).__name__, f"{last[0].filename}:{last[0].lineno}" if last else str(error))
        if cause in self._causes:
            text = "Background task %r died again (%d times): %s: %s"
            logger.warning(text, name, self.crashes[name], type(error).__name__, error)
            return
        if len(self._causes) >= MAX_CAUSES:
            self._causes.clear()
        self._causes.add(cause)
        logger.error("Background task %r died: %s: %s", name, type(error).__name__, error, exc_info=error)

    async def stop(self, tasks: list[asyncio.Task[Any]], limit_s: float = END_S) -> list[str]:
        """Cancel tasks and wait for their end, but no longer than the limit.

        Returns:
            The names of those that did not end.
        """
        deadline = time.monotonic() + limit_s
        left = {task for task in tasks if not task.done()}
        while left and (rest_s := deadline - time.monotonic()) > 0:
            for task in left:
                task.cancel()
            # Cancelled again in a while: who swallows the first one is often waiting for something else by then.
            _, left = await asyncio.wait(left, timeout=min(rest_s, 1.0))
        names = sorted({self._tasks.get(task, task.get_name()) for task in left})
        if names:
            logger.error("Background tasks did not end within %g s: %s", limit_s, ", ".join(names))
        return names

    async def close(self, limit_s: float = END_S) -> list[str]:
        """End everything; see `stop`."""
        current = asyncio.current_task()
        return await self.stop([task for task in self._tasks if task is not current], limit_s)

    def exit_after(self, limit_s: float) -> None:
        """End the process `limit_s` seconds from now, whatever hangs; a later call replaces this one."""
        timer, self._timer = self._timer, threading.Timer(limit_s, self._exit)
        self._timer.daemon = True
        self._timer.start()
        if timer is not None:
            timer.cancel()

    @contextmanager
    def cancelling_exit(self) -> Iterator[None]:
        """Call off `exit_after` behind a block that leaves no thread which would keep the process."""
        before = set(threading.enumerate())
        try:
            yield
        finally:
            left = [thread for thread in threading.enumerate() if thread not in before and not thread.daemon]
            if self._timer is not None and not left:
                self._timer.cancel()

    def _exit(self) -> None:
        # Not through `logging`: what hangs may hold its lock.
        names = ", ".join(list(self._tasks.values())) or "a thread"
        os.write(2, f"The process did not end in time and is ended now; still running: {names}\n".encode())
        os._exit(1)


def is_cancelled() -> bool:
    """Return whether the current task is being cancelled."""
    task = asyncio.current_task()
    return task is not None and task.cancelling() > 0
