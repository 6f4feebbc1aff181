"""Server-sent events: the response class, and running work that stops when the client leaves.

A stream is one asynchronous generator of encoded events. The status waits for the first of them, so that an early error
is a real HTTP status; when that takes longer than `--stream-keep-alive` (a prompt may wait long in the queue), the
headers go out without it, and from then on an error is an event. A silent stream gets a comment at that interval.

What a client does not take stays in two places, both bounded: the connection's buffer, and the deltas that wait for the
generator, merged into one (`RequestEntry`). A client that takes nothing for `--stream-write-timeout` is cut off.
"""

from __future__ import annotations

import asyncio
import logging
import math
import time
from collections.abc import AsyncGenerator, Callable, Coroutine
from typing import TYPE_CHECKING, Any, Protocol, TypeVar

import msgspec
from starlette.requests import Request
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from dovetail.contracts.errors import EngineDeadError
from dovetail_server.errors.body import ErrorBody
from dovetail_server.errors.catalogue import DRAINING, ClientGoneError, describe
from dovetail_server.http.journal import JOURNAL, MovedError, end_of
from dovetail_server.http.json_lines import one_line
from dovetail_server.http.origin import DIRECT

if TYPE_CHECKING:
    from dovetail_server.serving.context import ServingContext

logger = logging.getLogger("dovetail.server")
T = TypeVar("T")
DONE = b"data: [DONE]\n\n"
COMMENT = b": keep-alive\n\n"
Chunks = AsyncGenerator[bytes, None]


class StreamForm(Protocol):
    """How a stream looks to HTTP: see `Writer`, which has these."""

    @property
    def media_type(self) -> str: ...
    @property
    def keep_alive(self) -> bytes: ...


class _Events:
    media_type, keep_alive = "text/event-stream", COMMENT


EVENTS: StreamForm = _Events()


def error_event(error: Exception) -> bytes:
    """Return the event that tells of an error after the headers are gone."""
    _, detail, _ = describe(error)
    return b"event: error\ndata: " + msgspec.json.encode(ErrorBody(detail)) + b"\n\n"


def goes_on_elsewhere(error: Exception) -> bool:
    """Whether a gateway has another server go on: this one cannot, and the request is not at fault."""
    ends_here = isinstance(error, EngineDeadError) or getattr(error, "code", None) == DRAINING
    return ends_here and JOURNAL.get() is not None


def final_error_event(error: Exception) -> bytes:
    """Return how a stream of the chat API ends after an error."""
    return error_event(error) + DONE


async def cancel_on_disconnect(request: Request, work: Coroutine[Any, Any, T]) -> T:
    """Await `work`, cancelling it when the client leaves. The body must have been read.

    Raises:
        ClientGoneError: The client left first; the work has been cancelled and has cleaned up.
    """
    task = asyncio.ensure_future(work)
    try:
        await _first_of(task, request.receive, None)
        return task.result()
    finally:
        await _cancel(task)


async def start(
    request: Request,
    chunks: Chunks,
    ends: Callable[[Exception], bytes] = final_error_event,
    form: StreamForm = EVENTS,
) -> EventStream:
    """Wait for the first chunk, but not longer than the headers may wait, and return the response.

    Args:
        request: Whose body has been read.
        chunks: The stream; it is closed.
        ends: Writes the end of the stream after an error, where the status is gone already.
        form: Its media type, and what it says in a silence.

    Raises:
        ClientGoneError: The client left first.
        Exception: What `chunks` raised before its first chunk.
    """
    state: ServingContext = request.app.state.server
    first = asyncio.ensure_future(_next(chunks))
    try:
        await _first_of(first, request.receive, state.settings.stream_keep_alive or None)
        if first.done():
            first.result()
    except BaseException:
        await _cancel(first)
        await chunks.aclose()
        raise
    return EventStream(_guarded(first, chunks, ends), state, form)


async def _first_of(task: asyncio.Future[Any], receive: Receive, timeout_s: float | None) -> None:
    """Wait until a task has ended, or the time is over.

    Raises:
        ClientGoneError: The client left first.
    """
    gone = asyncio.ensure_future(_disconnected(receive))
    try:
        await asyncio.wait({task, gone}, timeout=timeout_s, return_when=asyncio.FIRST_COMPLETED)
        if gone.done() and not task.done():
            raise ClientGoneError("the client left before the reply")
    finally:
        await _cancel(gone)


async def _cancel(*tasks: asyncio.Future[Any]) -> None:
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)


async def _disconnected(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


async def _next(chunks: Chunks) -> bytes:
    return await anext(chunks)


async def _guarded(first: asyncio.Future[bytes], chunks: Chunks, ends: Callable[[Exception], bytes]) -> Chunks:
    """Pass chunks on; an error becomes the last words. Closes `chunks` however it ends."""
    try:
        yield await first
        async for chunk in chunks:
            yield chunk
    except Exception as error:
        if goes_on_elsewhere(error):
            raise MovedError(str(error)) from error
        yield ends(error)
    finally:
        await _cancel(first)
        await chunks.aclose()


class EventStream(Response):
    """Sends what a generator yields, and keeps watch over the client meanwhile."""

    def __init__(self, chunks: Chunks, state: ServingContext, form: StreamForm) -> None:
        """Take over `chunks`, which raise nothing."""
        headers = {"cache-control": "no-cache", "x-accel-buffering": "no"}
        super().__init__(headers=headers, media_type=form.media_type)
        del self.headers["content-length"]
        self._chunks = chunks
        self._comment = form.keep_alive
        self._end = end_of(form.media_type)
        self._state = state
        self._is_writing = False
        self._moved = time.monotonic()
        """When the last write began."""

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Send until the stream ends, the client leaves, or the client takes nothing for too long."""
        sender = asyncio.ensure_future(self._send_all(send, scope.get(DIRECT, send)))
        gone = asyncio.ensure_future(_disconnected(receive))
        try:
            await self._watch(sender, gone, send)
            if sender.done():
                sender.result()
        except TimeoutError:
            logger.warning("Disconnected a client that read nothing from its stream for %g s.", self._write_timeout)
            self._state.cut_off(scope)
        except MovedError:
            self._state.cut_off(scope)
        finally:
            await _cancel(sender, gone)

    async def _send_all(self, send: Send, direct: Send) -> None:
        """Send everything; what is between start and end goes past the layers, none of which looks at it."""
        try:
            await send({"type": "http.response.start", "status": 200, "headers": self.raw_headers})
            self._is_writing = False
            end = self._end
            journal = None if end is None else JOURNAL.get()
            async for events in self._chunks:
                made = one_line(events)  # clients that split lines as Python does read whole events
                chunk = made if journal is None or end is None else journal.written(made, end)
                self._moved, self._is_writing = time.monotonic(), True
                await direct({"type": "http.response.body", "body": chunk, "more_body": True})
                self._is_writing = False
            await send({"type": "http.response.body", "body": b"", "more_body": False})
        finally:
            await self._chunks.aclose()

    async def _watch(self, sender: asyncio.Future[None], gone: asyncio.Future[None], send: Send) -> None:
        """Wait for the end, breaking long silences.

        Raises:
            TimeoutError: The client takes nothing.
        """
        idle_s = (self._state.settings.stream_keep_alive if self._comment else 0) or math.inf
        stuck = self._write_timeout or math.inf
        while not (sender.done() or gone.done()):
            passed = time.monotonic() - self._moved
            if self._is_writing and passed >= stuck:
                raise TimeoutError
            if not self._is_writing and passed >= idle_s:
                comment = send({"type": "http.response.body", "body": self._comment, "more_body": True})
                await asyncio.wait_for(comment, self._write_timeout or None)
                passed, self._moved = 0.0, time.monotonic()
            rest = min(limit - passed if limit > passed else limit for limit in (idle_s, stuck))
            patience = None if rest == math.inf else rest
            await asyncio.wait({sender, gone}, timeout=patience, return_when=asyncio.FIRST_COMPLETED)

    @property
    def _write_timeout(self) -> float:
        return self._state.settings.stream_write_timeout
