"""Objects of hook plugins that are called directly: request observers and stat loggers.

A call that raises is logged and never reaches a request. After `MAX_FAILURES` failures in a row the object is removed,
which health shows.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any

from dovetail.contracts.observers import (
    HttpEnd,
    LoadStats,
    RequestEnd,
    RequestObserver,
    RequestProgress,
    RequestStart,
    StatLogger,
)
from dovetail.engine.client import EngineClient
from dovetail.errors import EngineError, PluginError

logger = logging.getLogger("dovetail.server")
MAX_FAILURES = 5


@dataclass(slots=True)
class Watched:
    """One object of a plugin, with the failures in a row of each method. `label` names the plugin."""

    label: str
    target: Any
    failures: dict[str, int] = field(default_factory=dict)


class Observers:
    """The observers and loggers of one server. False where there is nothing to call."""

    def __init__(self) -> None:
        self.requests: list[Watched] = []
        self.loggers: list[Watched] = []
        self.removed: list[str] = []
        """One line for each object that was removed."""

    def __bool__(self) -> bool:
        """Whether any request observer is there."""
        return bool(self.requests)

    def add_observers(self, label: str, value: Any) -> None:
        """Take what `dovetail_request_observers` returned: an observer, or several.

        Raises:
            PluginError: It is something else.
        """
        self.requests += _watched(label, value, RequestObserver)

    def add_loggers(self, label: str, value: Any) -> None:
        """Take what `dovetail_stat_loggers` returned: a logger, or several.

        Raises:
            PluginError: It is something else.
        """
        self.loggers += _watched(label, value, StatLogger)

    def started(self, request: RequestStart) -> None:
        """Tell every observer that a request was admitted."""
        for watched in list(self.requests):
            self._call(watched, watched.target.request_started, request, self.requests)

    def progressed(self, request: RequestProgress) -> None:
        """Tell every observer that tokens have come."""
        for watched in list(self.requests):
            self._call(watched, watched.target.request_progressed, request, self.requests)

    def ended(self, request: RequestEnd) -> None:
        """Tell every observer that a request is over."""
        for watched in list(self.requests):
            self._call(watched, watched.target.request_ended, request, self.requests)

    def http_ended(self, request: HttpEnd) -> None:
        """Tell every observer that an HTTP request is over."""
        for watched in list(self.requests):
            self._call(watched, watched.target.http_ended, request, self.requests)

    async def log_stats(self, engine: EngineClient) -> None:
        """Give every logger the engine's load at its interval, until cancelled."""
        if self.loggers:
            await asyncio.gather(*(self._feed(watched, engine) for watched in self.loggers))

    async def _feed(self, watched: Watched, engine: EngineClient) -> None:
        while watched in self.loggers:
            await asyncio.sleep(max(float(watched.target.interval_s), 0.01))
            try:
                stats = await engine.control("stats")
            except EngineError:
                return
            known = {name: stats[name] for name in LoadStats.__dataclass_fields__}
            self._call(watched, watched.target.log, LoadStats(**known), self.loggers)

    def _call(self, watched: Watched, method: Callable[[Any], Any], value: Any, home: list[Watched]) -> None:
        try:
            method(value)
        except Exception as error:
            # A stranger's code may raise anything; it is logged, counted, and removed when it keeps failing.
            count = watched.failures[method.__name__] = watched.failures.get(method.__name__, 0) + 1
            name = f"{type(watched.target).__name__}.{method.__name__} of {watched.label}"
            reason = f"{type(error).__name__}: {error}"
            logger.warning("%s raised %s (%d of %d)", name, reason, count, MAX_FAILURES)
            if count >= MAX_FAILURES and watched in home:
                home.remove(watched)
                self.removed.append(f"{name} was removed after {MAX_FAILURES} failures in a row; the last: {reason}")
                logger.error("%s", self.removed[-1])
        else:
            watched.failures[method.__name__] = 0


def _watched(label: str, value: Any, contract: type) -> list[Watched]:
    found: Iterable[Any] = value if isinstance(value, list | tuple) else [value]
    for each in found:
        if not isinstance(each, contract):
            raise PluginError(
                f"{label} returned {each!r}, which is no dovetail.contracts.{contract.__name__}; return an instance"
            )
    return [Watched(label, each) for each in found]
