"""The outer ASGI layers: `RequestIdMiddleware` names each request, `BodyLimitMiddleware` bounds bodies.

The first one says how a request ended; the second answers whatever is raised below it.
Between the two stand the CORS headers, so that error replies carry them too; keys are checked behind both (`auth.py`).
"""

from __future__ import annotations

import asyncio
import contextlib
import re
import time
import uuid
from collections.abc import Mapping

from starlette.datastructures import Headers, MutableHeaders
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from dovetail.base.panics import is_panic
from dovetail.contracts.errors import RequestError
from dovetail.contracts.observers import HttpEnd, HttpStart
from dovetail_server.errors.catalogue import ClientGoneError, to_reply
from dovetail_server.http.held import HeldBytes, Holder
from dovetail_server.http.origin import DIRECT, ORIGIN, Origin
from dovetail_server.observe.observers import Observers

SAFE_ID = re.compile(r"[\x21-\x7e]{1,128}")
HERE_S = 0.005
"""A body that has been sent is here by now."""
WHOLE_BODY = 10
"""A body that is held in memory must arrive within this many times `--body-timeout`."""
LINGER_S = 2.0
LINGER_BYTES = 1 << 26
"""In the scope: `send` past our layers, which look at the ends of a reply and would be five calls for each token."""
TRACE_HEADERS = ("traceparent", "tracestate", "baggage")
METHODS = frozenset({"GET", "POST", "DELETE", "PUT", "PATCH", "HEAD", "OPTIONS"})


class RequestIdMiddleware:
    """Gives each HTTP request its `x-request-id`, and reports its end to observers."""

    def __init__(self, app: ASGIApp, observers: Observers) -> None:
        """Wrap `app`."""
        self.app = app
        self.observers = observers

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve one connection's request."""
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        given = Headers(scope=scope).get("x-request-id", "")
        request_id = given if SAFE_ID.fullmatch(given) else f"req_{uuid.uuid4().hex}"
        scope.setdefault("state", {})["request_id"] = request_id
        scope[DIRECT] = send
        status: int | None = None

        async def send_with_id(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
                MutableHeaders(scope=message)["x-request-id"] = request_id
            await send(message)

        origin = Origin(client=":".join(map(str, scope.get("client") or ())))
        ORIGIN.set(origin)
        if self.observers.wanting["http_started"]:
            self._report_start(scope, request_id, origin)
        try:
            await self.app(scope, receive, send_with_id)
        finally:
            if self.observers.of_requests:
                self.observers.notify(
                    "http_ended",
                    HttpEnd(
                        request_id=request_id,
                        method=scope["method"] if scope["method"] in METHODS else "other",
                        route=route_of(scope),
                        status=status,
                        seconds=time.perf_counter() - origin.began,
                        number=origin.http,
                    ),
                )

    def _report_start(self, scope: Scope, request_id: str, origin: Origin) -> None:
        headers = Headers(scope=scope)
        trace = {name: ",".join(headers.getlist(name)) for name in TRACE_HEADERS if name in headers}
        self.observers.notify(
            "http_started", HttpStart(number=origin.http, request_id=request_id, at=time.time(), trace=trace)
        )


def route_of(scope: Scope) -> str:
    """Return the path of the route that served a request, with its parameters as written in the document; "" if none.

    Never the requested path: a million requested paths must not make a million routes.
    """
    return str(getattr(scope.get("route"), "path", ""))


class BodyLimitMiddleware:
    """Bounds bodies, each and all together, and answers whatever goes wrong below."""

    def __init__(self, app: ASGIApp, state: Holder, streamed: Mapping[str, int]) -> None:
        """Wrap `app`.

        Args:
            app: What is guarded.
            state: The server's; it counts the bytes that are held.
            streamed: Limits of paths whose bodies go to the disk piece by piece, and do not count as held.
        """
        self.app = app
        self.state = state
        self.streamed = dict(streamed)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve one connection's request."""
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        limiter = BodyLimiter(self.state, self.streamed.get(scope["path"]), Headers(scope=scope), receive, send)
        try:
            limiter.check_length()
            await self.app(scope, limiter.receive, limiter.send)
        except ClientGoneError:
            return
        except BaseException as error:
            if limiter.has_begun or not (isinstance(error, Exception) or is_panic(error)):
                raise  # the reply is under way; uvicorn logs and closes the connection
            await to_reply(error)(scope, limiter.receive, limiter.send)
        finally:
            limiter.let_go()


class BodyLimiter:
    """One request and its reply, on their way through `BodyLimitMiddleware`."""

    def __init__(
        self, state: Holder, streamed_limit: int | None, headers: Headers, receive: Receive, send: Send
    ) -> None:
        """Begin; `streamed_limit` is None where the body is held in memory."""
        self.state = state
        self.is_held = streamed_limit is None
        self._held = HeldBytes(state) if self.is_held else None
        self.limit = state.settings.max_body_bytes if streamed_limit is None else streamed_limit
        length = headers.get("content-length", "")
        self.length = int(length) if length.isdigit() else 0
        self.is_unread = self.length > 0 or "transfer-encoding" in headers
        self.has_begun = False
        self.drains_body = False
        self._num_bytes = 0
        self._waiting_s = 0.0
        self._receive, self._send = receive, send

    async def receive(self) -> Message:
        """Pass on a message of the client.

        Raises:
            RequestError: The body exceeds its limit, or stops coming.
            ServiceError: There is no room for it.
        """
        message = await (self._receive_soon() if self.is_unread else self._receive())
        if message["type"] == "http.request":
            new = len(message.get("body", b""))
            self._check(self._num_bytes, new)
            self._num_bytes += new
            self.is_unread = message.get("more_body", False)
            if self._held is not None:
                self._held.take(new)
        return message

    async def _receive_soon(self) -> Message:
        """Receive; only the client's time counts, not the reader's."""
        began = time.monotonic()
        try:
            async with asyncio.timeout(self._patience_s()):
                return await self._receive()
        except TimeoutError:
            took = self._waiting_s + time.monotonic() - began
            text = f"the request body pauses or comes too slowly: {self._num_bytes} bytes in {took:.0f} s"
            raise RequestError(f"{text} (--body-timeout, --min-body-rate)", code="body_timeout", status=408) from None
        finally:
            self._waiting_s += time.monotonic() - began
            if (origin := ORIGIN.get()) is not None:
                origin.body_s = self._waiting_s

    def _patience_s(self) -> float | None:
        """Return how long the body's next piece may take."""
        settings = self.state.settings
        pause = settings.body_timeout
        if not pause:
            return None
        limits = [pause]
        if settings.min_body_rate:
            limits.append(pause + self._num_bytes / settings.min_body_rate - self._waiting_s)
        if self.is_held:
            limits.append(WHOLE_BODY * pause - self._waiting_s)
        return max(0.0, min(limits))

    async def send(self, message: Message) -> None:
        """Pass on a message of the reply. One that comes before the body has ended also ends the connection.

        The reply is sent at once, and what still comes is thrown away for a while: clients that write their whole
        body before they read would else see a broken connection in place of the reply.
        """
        if message["type"] == "http.response.start":
            self.has_begun = True
            if self.is_unread and not await self._discard(HERE_S):
                self.drains_body = True
                MutableHeaders(scope=message)["connection"] = "close"
        elif self.drains_body and not message.get("more_body", False):
            await self._send({**message, "more_body": True})
            await self._discard(LINGER_S)
            message = {"type": "http.response.body", "body": b"", "more_body": False}
        await self._send(message)

    async def _discard(self, seconds: float) -> bool:
        """Throw away the rest of the body; false if it did not end in time, or within reason."""
        num_bytes = 0
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(seconds):
                while self.is_unread and num_bytes < LINGER_BYTES:
                    message = await self._receive()
                    num_bytes += len(message.get("body", b""))
                    self.is_unread = message.get("more_body", False)
        return not self.is_unread

    def check_length(self) -> None:
        """Refuse a body by what it says of its length."""
        self._check(0, self.length)

    def let_go(self) -> None:
        """Release the body of a finished request."""
        if self._held is not None:
            self._held.let_go()

    def _check(self, had: int, new: int) -> None:
        if had + new > self.limit:
            flag = "--max-body-bytes" if self.is_held else "--max-file-bytes"
            text = f"the request body is over {self.limit} bytes, the limit set by {flag}"
            raise RequestError(text, code="body_too_large", status=413)
        if self._held is not None:
            self._held.check(new)
