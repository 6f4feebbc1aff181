"""What both clients share: which request's tokens go to which iterator."""

from __future__ import annotations

import asyncio
import itertools
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import AsyncIterator
from typing import Any

from dovetail.engine.messages import (
    Abort,
    Control,
    ControlReply,
    EngineInfo,
    Failed,
    FromEngine,
    Ready,
    Submit,
    Tick,
    ToEngine,
    TokenDelta,
)
from dovetail.errors import ConfigError, EngineDeadError, EngineError


class Inbox:
    """What waits for one stream's reader. One reader, on the event loop; half the cost of an `asyncio.Queue`."""

    __slots__ = ("_items", "_reader")

    def __init__(self) -> None:
        self._items: deque[TokenDelta | EngineDeadError] = deque()
        self._reader: asyncio.Future[None] | None = None

    def put(self, item: TokenDelta | EngineDeadError) -> None:
        """Add an item and wake the reader."""
        self._items.append(item)
        if self._reader is not None and not self._reader.done():
            self._reader.set_result(None)

    async def get(self) -> TokenDelta | EngineDeadError:
        """Wait for an item. Cancelling loses none."""
        while not self._items:
            self._reader = asyncio.get_running_loop().create_future()
            try:
                await self._reader
            finally:
                self._reader = None
        return self._items.popleft()


class Stream:
    """See `TokenStream`."""

    def __init__(self, client: StreamClient, rid: str, inbox: Inbox) -> None:
        self._client, self._rid, self._inbox = client, rid, inbox
        self._open = True

    def __aiter__(self) -> AsyncIterator[TokenDelta]:
        return self

    async def __anext__(self) -> TokenDelta:
        if not self._open:
            raise StopAsyncIteration
        item = await self._inbox.get()
        if isinstance(item, EngineDeadError):
            self._leave(finished=True)
            raise item
        if item.finish is not None:
            self._leave(finished=True)
        return item

    async def aclose(self) -> None:
        """See `TokenStream.aclose`."""
        self._leave(finished=False)

    def __del__(self) -> None:
        self._leave(finished=False)

    def _leave(self, *, finished: bool) -> None:
        if self._open:
            self._open = False
            self._client.leave(self._rid, finished=finished)


class StreamClient(ABC):
    """Everything of an `EngineClient` but the transport; subclasses send, and call `_receive` and `_lost`."""

    def __init__(self) -> None:
        self._info: EngineInfo | None = None
        self._step = 0
        self._dead: str | None = None
        self._started: asyncio.Future[EngineInfo] | None = None
        self._streams: dict[str, Inbox] = {}
        self._replies: dict[int, asyncio.Future[dict[str, Any]]] = {}
        self._ids = itertools.count(1)

    @property
    def info(self) -> EngineInfo:
        """Facts of the engine; available once `start` has returned."""
        if self._info is None:
            raise EngineError("the engine has not been started")
        return self._info

    @property
    def step(self) -> int:
        """The last step counter heard from the engine."""
        return self._step

    @property
    def dead(self) -> str | None:
        """Why the engine is gone, or None while it lives."""
        return self._dead

    @property
    def num_streams(self) -> int:
        """Requests that have not ended."""
        return len(self._streams)

    def submit(self, request: Submit) -> Stream:
        """See `EngineClient.submit`."""
        if self._dead is not None:
            raise EngineDeadError(self._dead)
        if request.rid in self._streams:
            raise EngineError(f"request id {request.rid!r} is in use")
        inbox = self._streams[request.rid] = Inbox()
        self._send(request)
        return Stream(self, request.rid, inbox)

    def leave(self, rid: str, *, finished: bool) -> None:
        """A stream has ended or was closed: forget it, and tell the engine if it does not know yet."""
        self._streams.pop(rid, None)
        if not finished and self._dead is None:
            self._send(Abort(rid))

    def abort(self, rid: str) -> None:
        """See `EngineClient.abort`."""
        if rid in self._streams and self._dead is None:
            self._send(Abort(rid))

    async def control(self, op: str) -> dict[str, Any]:
        """See `EngineClient.control`."""
        if self._dead is not None:
            raise EngineDeadError(self._dead)
        number = next(self._ids)
        reply = self._replies[number] = asyncio.get_running_loop().create_future()
        self._send(Control(id=number, op=op))  # type: ignore[arg-type]  # the engine checks it
        try:
            result: dict[str, Any] = await reply
            return result
        finally:
            self._replies.pop(number, None)

    @abstractmethod
    def _send(self, message: ToEngine) -> None:
        """Hand one message to the engine, without waiting."""

    def _receive(self, message: FromEngine) -> None:
        """Take one message from the engine, on the event loop."""
        if isinstance(message, Tick):
            self._step = message.step
            for delta in message.deltas:
                if (inbox := self._streams.get(delta.rid)) is not None:
                    inbox.put(delta)
        elif isinstance(message, ControlReply):
            reply = self._replies.get(message.id)
            if reply is not None and not reply.done():
                reply.set_result(message.result)
        elif isinstance(message, Ready):
            self._info = message.info
            if self._started is not None and not self._started.done():
                self._started.set_result(message.info)
        elif isinstance(message, Failed):
            self._lost(message.message, user_error=message.user_error)

    def _lost(self, why: str, *, user_error: bool = False) -> None:
        """The engine is gone: end everything that waits for it. The first reason is kept."""
        if self._dead is not None:
            return
        self._dead = why
        if self._started is not None and not self._started.done():
            self._started.set_exception(ConfigError(why) if user_error else EngineError(why))
        for inbox in self._streams.values():
            inbox.put(EngineDeadError(why))
        for reply in self._replies.values():
            if not reply.done():
                reply.set_exception(EngineDeadError(why))
