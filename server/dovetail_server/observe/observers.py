"""Objects of hook plugins that are told what happens: request observers and stat loggers.

Each has a thread of its own, so that one that takes its time keeps neither the event loop nor another one waiting. What
happens is put into its queue and told in that order, many at a time: a thread that woke up for every event would cost
more than the event. A queue that is full takes no more; how much was lost is told as soon as there is room.

A call that raises is logged and never reaches a request. After `MAX_FAILURES` failures in a row the object is removed,
which health shows.
"""

from __future__ import annotations

import asyncio
import inspect
import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable
from typing import Any

from dovetail.contracts.errors import EngineError, PluginError
from dovetail.contracts.observers import (
    CacheEvent,
    CacheObserver,
    LoadStats,
    RequestObserver,
    StatLogger,
)
from dovetail.engine.client import EngineClient

logger = logging.getLogger("dovetail.server")
MAX_FAILURES = 5
MAX_WAITING = 10_000
"""Events that wait for one observer."""
GATHER_S = 0.02
"""A thread that was woken waits so long for more."""
SAY_EVERY_S = 60.0
CLOSE_S = 2.0
"""What still waits when the server stops is told for so long."""
REQUEST_METHODS = (
    "http_started",
    "request_started",
    "request_progressed",
    "request_ended",
    "http_ended",
    "events_lost",
)
KINDS: dict[str, tuple[type, tuple[str, ...]]] = {
    "dovetail_request_observers": (RequestObserver, REQUEST_METHODS),
    "dovetail_stat_loggers": (StatLogger, ("log",)),
    "dovetail_cache_observers": (CacheObserver, ("cache_changed", "cache_cleared", "events_lost")),
}
"""Of which class the objects of a hook are, and which of their methods are called."""


class ObserverHandle:
    """One object of a plugin, its queue and its thread, which begins with the first event."""

    def __init__(self, target: Any, on_failure: Callable[[ObserverHandle, str], None]) -> None:
        """Watch `target`; `on_failure` is called when it is removed, with the reason."""
        self.target = target
        self.is_removed = False
        self.num_lost = 0
        self._on_failure = on_failure
        self._methods: dict[str, tuple[Callable[[Any], Any], str]] = {}
        """What is called, and the plugin and hook that brought it."""
        self._failures: dict[str, int] = {}
        self._waiting: deque[tuple[str, Any]] = deque()
        self._num_untold = 0
        self._said = -SAY_EVERY_S
        self._thread: threading.Thread | None = None
        self._wake, self._hurry = threading.Event(), threading.Event()
        self._is_idle = True
        self._is_closing = False

    def call(self, label: str, names: Iterable[str]) -> None:
        """Call these methods from now on, but those that do nothing; `label` names plugin and hook.

        Raises:
            PluginError: One is `async def`.
        """
        for name in names:
            method = getattr(self.target, name)
            if inspect.iscoroutinefunction(method):
                text = f"{label}: {type(self.target).__name__}.{name} is `async def`, and nobody would await it"
                raise PluginError(f"{text}; write a plain function: it is called in a thread of its own and may block")
            default = getattr(RequestObserver, name, None)
            if default is None or getattr(method, "__func__", None) is not default:
                self._methods[name] = method, label

    def wants(self, name: str) -> bool:
        """Whether this method is called."""
        return name in self._methods

    @property
    def is_behind(self) -> bool:
        """Whether something waits to be told, or is being told."""
        return bool(self._waiting) or not self._is_idle

    def notify(self, name: str, value: Any) -> None:
        """Put an event into the queue; called in the event loop, and takes a microsecond."""
        if name not in self._methods or self._is_closing:
            return
        if len(self._waiting) >= MAX_WAITING:
            self._lose()
            return
        if self._num_untold:
            lost, self._num_untold = self._num_untold, 0
            self._waiting.append(("events_lost", lost))
        self._waiting.append((name, value))
        if self._is_idle:
            self._start()

    def settle(self, timeout_s: float) -> bool:
        """Wait in another thread than the event loop's until all that waits was told; false if it takes longer."""
        deadline = time.monotonic() + timeout_s
        while self.is_behind and not self.is_removed:
            self._hurry.set()
            if time.monotonic() > deadline:
                return False
            time.sleep(0.001)
        return True

    def close(self) -> None:
        """Take no more, tell what waits, and end the thread unless it is stuck."""
        self._is_closing = True
        self._hurry.set()
        self._wake.set()
        if self._thread is not None:
            self._thread.join(CLOSE_S)

    def _start(self) -> None:
        self._is_idle = False
        if self._thread is None:
            self._thread = threading.Thread(
                target=self._work, name=f"observer {type(self.target).__name__}", daemon=True
            )
            self._thread.start()
        self._wake.set()

    def _lose(self) -> None:
        self.num_lost += 1
        self._num_untold += 1
        if time.monotonic() - self._said >= SAY_EVERY_S:
            self._said = time.monotonic()
            text = "%s is slow: %d events wait for it, and those that come now are lost (%d so far)"
            who = f"{type(self.target).__name__} of {next(iter(self._methods.values()))[1]}"
            logger.warning(text, who, MAX_WAITING, self.num_lost)

    def _work(self) -> None:
        while not (self._is_closing and not self._waiting):
            self._wake.wait()
            self._wake.clear()
            self._hurry.wait(GATHER_S)
            self._hurry.clear()
            while self._waiting and not self.is_removed:
                name, value = self._waiting.popleft()
                if name in self._methods:
                    self._call(name, value)
            if self.is_removed:
                self._waiting.clear()
                self._is_idle = True
                return
            self._is_idle = True
            if self._waiting:  # put there before this thread was idle
                self._is_idle = False
                self._wake.set()

    def _call(self, name: str, value: Any) -> None:
        method, label = self._methods[name]
        try:
            result = method(value)
            if inspect.isawaitable(result):
                if inspect.iscoroutine(result):
                    result.close()
                raise TypeError("it returned what is to be awaited, which nobody does; write a plain function")
        except (Exception, SystemExit) as error:
            # A stranger's code may raise anything; it is logged, counted, and removed when it keeps failing.
            count = self._failures[name] = self._failures.get(name, 0) + 1
            who, reason = f"{type(self.target).__name__}.{name} of {label}", f"{type(error).__name__}: {error}"
            logger.warning("%s raised %s (%d of %d)", who, reason, count, MAX_FAILURES)
            if count >= MAX_FAILURES:
                self.is_removed = True
                self._on_failure(self, f"{who} was removed after {MAX_FAILURES} failures in a row; the last: {reason}")
        else:
            self._failures[name] = 0


class Observers:
    """The observers and loggers of one server."""

    def __init__(self) -> None:
        self.handles: list[ObserverHandle] = []
        self.wanting: dict[str, list[ObserverHandle]] = {name: [] for _, names in KINDS.values() for name in names}
        """By method, who is told. Replaced and never changed: who fails is taken out in another thread."""
        self.of_requests = False
        """Whether anybody is told of requests."""
        self.removed: list[str] = []
        """One line for each object that was removed."""

    def add(self, hook: str, label: str, value: Any) -> None:
        """Take what a hook of `KINDS` returned: an object or several. One of two hooks has one thread all the same.

        Raises:
            PluginError: It is something else, or a method is `async def`.
        """
        contract, methods = KINDS[hook]
        found: Iterable[Any] = value if isinstance(value, list | tuple) else [value]
        for each in found:
            if not isinstance(each, contract):
                raise PluginError(
                    f"{label} returned {each!r}, which is no dovetail.contracts.{contract.__name__}; return an instance"
                )
            handle = next((known for known in self.handles if known.target is each), None)
            if handle is None:
                handle = ObserverHandle(each, self._remove)
                self.handles = [*self.handles, handle]
            handle.call(label, methods)
        self._set_wanting()

    def notify(self, name: str, event: Any) -> None:
        """Tell those who have a method of this name."""
        for watched in self.wanting[name]:
            watched.notify(name, event)

    def changed(self, events: list[CacheEvent]) -> None:
        """Tell what came into the cache and went; this and the next make it a `CacheWatch`."""
        self.notify("cache_changed", events)

    def cleared(self, num_restarts: int) -> None:
        """Tell that an engine begins with an empty cache."""
        self.notify("cache_cleared", num_restarts)

    async def log_stats(self, engine: EngineClient) -> None:
        """Give every logger the engine's load at its interval, until cancelled."""
        await asyncio.gather(*(self._feed(watched, engine) for watched in self.wanting["log"]))

    def settle(self, timeout_s: float = 10.0) -> bool:
        """Wait until everything that has happened was told, for tests; false where that takes longer."""
        return all(watched.settle(timeout_s) for watched in self.handles)

    def close(self) -> None:
        """Tell what still waits, for a moment, and end the threads."""
        for watched in self.handles:
            watched.close()

    async def _feed(self, watched: ObserverHandle, engine: EngineClient) -> None:
        while not watched.is_removed:
            await asyncio.sleep(max(float(watched.target.interval_s), 0.01))
            if watched.is_behind:
                continue  # a snapshot of what was is worth nothing
            try:
                stats = await engine.control("stats")
            except EngineError:
                return
            known = {name: stats[name] for name in LoadStats.__dataclass_fields__}
            watched.notify("log", LoadStats(**known))

    def _set_wanting(self) -> None:
        self.wanting = {name: [each for each in self.handles if each.wants(name)] for name in self.wanting}
        self.of_requests = any(self.wanting[name] for name in REQUEST_METHODS)

    def _remove(self, watched: ObserverHandle, why: str) -> None:
        """Take an object out; called in its thread."""
        self.handles = [each for each in self.handles if each is not watched]
        self._set_wanting()
        self.removed.append(why)
        logger.error("%s", why)
