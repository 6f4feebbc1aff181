"""Server-sent events: the response class, and running work that stops when the client leaves."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Coroutine
from typing import Any, TypeVar

import anyio
import msgspec
from starlette.requests import Request
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from dovetail_server.errors import ClientGoneError, describe
from dovetail_server.openai.errors import ErrorBody

T = TypeVar("T")
DONE = b"data: [DONE]\n\n"
Chunks = AsyncGenerator[bytes, None]


def error_event(error: Exception) -> bytes:
    """Return the event that tells of an error after the headers are gone."""
    _, detail, _ = describe(error)
    return b"event: error\ndata: " + msgspec.json.encode(ErrorBody(detail)) + b"\n\n"


async def while_connected(request: Request, work: Coroutine[Any, Any, T]) -> T:
    """Await `work`, cancelling it when the client leaves. The body must have been read.

    Raises:
        ClientGoneError: The client left first; the work has been cancelled and has cleaned up.
    """
    task = asyncio.ensure_future(work)
    watcher = asyncio.ensure_future(_disconnected(request.receive))
    try:
        await asyncio.wait({task, watcher}, return_when=asyncio.FIRST_COMPLETED)
        if not task.done():
            raise ClientGoneError("the client left before the reply")
        return task.result()
    finally:
        for unfinished in (task, watcher):
            unfinished.cancel()
        await asyncio.gather(task, watcher, return_exceptions=True)


async def _disconnected(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


class EventStream(Response):
    """Sends `first` and then what `chunks` yields; closes `chunks` however it ends."""

    media_type = "text/event-stream"

    def __init__(self, first: bytes, chunks: Chunks) -> None:
        """Take over `chunks`, whose first item has been awaited already."""
        super().__init__(headers={"cache-control": "no-cache", "x-accel-buffering": "no"})
        del self.headers["content-length"]
        self.first = first
        self.chunks = chunks

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Send until the stream ends or the client leaves."""
        try:
            async with anyio.create_task_group() as group:
                group.start_soon(self._watch, receive, group.cancel_scope)
                await self._send_all(send)
                group.cancel_scope.cancel()
        finally:
            with anyio.CancelScope(shield=True):
                await self.chunks.aclose()

    async def _send_all(self, send: Send) -> None:
        await send({"type": "http.response.start", "status": 200, "headers": self.raw_headers})
        await send({"type": "http.response.body", "body": self.first, "more_body": True})
        async for chunk in self.chunks:
            await send({"type": "http.response.body", "body": chunk, "more_body": True})
        await send({"type": "http.response.body", "body": b"", "more_body": False})

    async def _watch(self, receive: Receive, scope: anyio.CancelScope) -> None:
        await _disconnected(receive)
        scope.cancel()


async def guarded(chunks: Chunks) -> Chunks:
    """Pass chunks on; an error before the first is raised, a later one becomes an error event and `[DONE]`."""
    started = False
    try:
        async for chunk in chunks:
            started = True
            yield chunk
    except Exception as error:
        if not started:
            raise
        yield error_event(error) + DONE
    finally:
        await chunks.aclose()


async def start(request: Request, chunks: Chunks) -> EventStream:
    """Wait for the first chunk, so that an early error is a real HTTP status, and return the response."""
    stream = guarded(chunks)
    try:
        first = await while_connected(request, _first(stream))
    except BaseException:
        await stream.aclose()
        raise
    return EventStream(first, stream)


async def _first(stream: Chunks) -> bytes:
    return await anext(stream)
