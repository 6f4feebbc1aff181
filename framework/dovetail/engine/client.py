"""The one way to reach an engine, in this process or another: `EngineClient`."""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import Any, Protocol

from dovetail.contracts.observers import CacheEvent
from dovetail.messages import EngineInfo, ProfileSpec, Submit, TokenDelta


class TokenStream(Protocol):
    """The deltas of one request; the last one has `finish` set. What arrives before it is asked for comes as one delta.

    Closing it before then, or dropping the last reference to it, aborts the request and frees its pages. Cancelling
    the task that waits for a delta does neither: a consumer may wait with a time-out and go on.
    """

    def __aiter__(self) -> AsyncIterator[TokenDelta]:
        """Return itself."""
        ...

    async def __anext__(self) -> TokenDelta:
        """Wait for the next delta.

        Raises:
            EngineDeadError: The engine is gone for good.
        """
        ...

    def abort(self) -> None:
        """Abort the request from elsewhere: its reader gets a last delta whose finish reason is `abort`."""

    async def aclose(self) -> None:
        """Abort the request unless it has ended. Safe to call twice; `contextlib.aclosing` calls it."""


class CacheWatch(Protocol):
    """Who is told what the engines' prefix cache holds, on the event loop."""

    def changed(self, events: list[CacheEvent]) -> None:
        """Pages came and went."""

    def cleared(self, num_restarts: int) -> None:
        """An engine begins, with an empty cache."""


class EngineClient(Protocol):
    """Submits requests and yields their tokens. Used from one asyncio event loop."""

    cache_watch: CacheWatch | None
    """Set before `start`, for an engine whose settings say `report_cache`."""
    step: int
    """The last step counter heard from the engine: its heartbeat."""
    dead: str | None
    """Why the engine is gone for good, or None."""

    @property
    def info(self) -> EngineInfo:
        """Facts of the engine; available once `start` has returned."""
        ...

    @property
    def restarting(self) -> str | None:
        """Why the engine is being started again, or None. What is submitted meanwhile waits for it."""
        ...

    @property
    def pid(self) -> int | None:
        """Process of the engine; None while there is none."""
        ...

    @property
    def num_restarts(self) -> int:
        """How often the engine was started again."""
        ...

    async def start(self) -> EngineInfo:
        """Start the engine and wait until it is ready.

        Raises:
            ConfigError: The settings, the model or a plugin is at fault; the message is for the user.
            EngineError: Anything else.
        """
        ...

    @property
    def num_unanswered(self) -> int:
        """Requests that wait for their first token, or for the end where none is sampled."""
        ...

    def submit(self, request: Submit, *, every: int = 1) -> TokenStream:
        """Queue a request at once and return its stream.

        Args:
            request: The request. The client sets its `handle`, and its seed where it has none.
            every: After the first delta, wait until so many new tokens are there, or the last.

        Raises:
            EngineDeadError: The engine is gone.
        """
        ...

    async def control(self, op: str, profile: ProfileSpec | None = None, *, after: int = 0) -> dict[str, Any]:
        """Run a command of `Control` and return its result; where the engine is being started again, after that."""
        ...

    async def close(self, *, wait: bool = True) -> None:
        """Stop the engine; open iterators end with `EngineDeadError`. Safe to call twice.

        Args:
            wait: For the step under way. Without it, an engine process is killed, and a thread left to itself.
        """
