"""The one way to reach an engine, in this process or another: `EngineClient`."""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import Any, Protocol

from dovetail.engine.messages import EngineInfo, Submit, TokenDelta


class EngineClient(Protocol):
    """Submits requests and yields their tokens. Used from one asyncio event loop."""

    @property
    def info(self) -> EngineInfo:
        """Facts of the engine; available once `start` has returned."""
        ...

    @property
    def step(self) -> int:
        """The last step counter heard from the engine: its heartbeat."""
        ...

    @property
    def dead(self) -> str | None:
        """Why the engine is gone, or None while it lives."""
        ...

    async def start(self) -> EngineInfo:
        """Start the engine and wait until it is ready.

        Raises:
            ConfigError: The settings, the model or a plugin is at fault; the message is for the user.
            EngineError: Anything else.
        """
        ...

    def submit(self, request: Submit) -> AsyncIterator[TokenDelta]:
        """Queue a request at once and iterate over its deltas; the last one has `finish` set.

        Leaving the iterator early (`aclose`, cancellation) aborts the request and frees its pages.

        Raises (while iterating):
            EngineDeadError: The engine died.
        """
        ...

    def abort(self, rid: str) -> None:
        """Abort a request from elsewhere; its iterator ends with a delta whose finish reason is `abort`."""
        ...

    async def control(self, op: str) -> dict[str, Any]:
        """Run `flush_cache` or `stats` and return its result."""
        ...

    async def close(self) -> None:
        """Stop the engine; open iterators end with `EngineDeadError`. Safe to call twice."""
        ...
