"""WebSocket at `/v1/responses`: each `response.create` is answered with the events of the HTTP route's stream.

A message becomes a request to that route, through all layers: keys, limits, observers and errors are the same ones, and
a client that leaves ends its work as over HTTP. One response at a time; what is sent meanwhile waits, and counts as
bodies do. A client that takes nothing has its connection's buffer only, for the stream behind it stops.
"""

from __future__ import annotations

import asyncio
import logging
from contextlib import suppress
from typing import TYPE_CHECKING, Any

import msgspec
from starlette.routing import WebSocketRoute
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from dovetail.contracts.errors import RequestError
from dovetail_server.apis.responses.keeper import LAST, LastResponse
from dovetail_server.errors import catalogue as errors
from dovetail_server.errors.body import ErrorBody, ErrorDetail
from dovetail_server.http.auth import CALLER
from dovetail_server.http.held import HeldBytes
from dovetail_server.reading.request import IN_THREAD

if TYPE_CHECKING:
    from dovetail_server.state import ServerState

logger = logging.getLogger("dovetail.server")
PATH = "/v1/responses"
CREATE = "response.create"
MAX_WAITING = 8
"""Messages that wait; more stay with the client until one of them is answered."""
OWN = frozenset((b"x-request-id", b"content-length", b"content-type", b"connection", b"upgrade", b"transfer-encoding"))
"""Headers of the handshake that are not of each request."""
NORMAL, GOING_AWAY, BROKEN = 1000, 1001, 1011


class Create(msgspec.Struct):
    """What a message says beside the fields of a body."""

    type: str | None = None
    stream: bool | None = None
    background: bool | None = None


class ErrorSent(msgspec.Struct, kw_only=True, tag_field="type", tag="error"):
    """An error before a response has begun."""

    status: int
    error: ErrorDetail


decode_create = msgspec.json.Decoder(Create).decode


def body_of(message: bytes) -> bytes:
    """Return the body of the HTTP route that a message stands for.

    Raises:
        RequestError: It is no `response.create`, or has fields that only HTTP has.
    """
    try:
        given = decode_create(message)
    except msgspec.ValidationError as error:
        raise RequestError(f"the message is no event: {error}", code="invalid_type") from None
    except msgspec.DecodeError as error:
        raise RequestError(f"the message is not valid JSON: {error}", code="invalid_json") from None
    if given.type != CREATE:
        shown = "is missing" if given.type is None else f"{errors.shortened(given.type)!r} is not supported"
        raise RequestError(f"type {shown}; possible: {CREATE}", param="type", code="invalid_value")
    if given.stream is False:
        raise errors.unsupported("stream", "what comes over a WebSocket are a stream's events; leave it out")
    if given.background:
        raise errors.unsupported("background", "a WebSocket waits for its response; POST /v1/responses has it")
    return message if given.stream else message.rstrip()[:-1] + b',"stream":true}'


class Exchange:
    """One response: an HTTP request to the application, and its reply as messages."""

    def __init__(self, socket: ResponseSocket, body: bytes) -> None:
        """Begin."""
        self._socket = socket
        self._body: bytes | None = body
        self._status = 0
        self._error = b""
        self._rest = b""

    async def receive(self) -> Message:
        """Give the body, and then nothing until the client leaves."""
        if self._body is not None:
            body, self._body = self._body, None
            return {"type": "http.request", "body": body, "more_body": False}
        await self._socket.gone.wait()
        return {"type": "http.disconnect"}

    async def send(self, message: Message) -> None:
        """Send the events of a stream; an error is one event."""
        if message["type"] == "http.response.start":
            self._status = message["status"]
            return
        if self._status != 200:
            self._error += message.get("body", b"")
            if not message.get("more_body", False):
                await self._socket.fail(self._status, msgspec.json.decode(self._error, type=ErrorBody).error)
            return
        *events, self._rest = (self._rest + message.get("body", b"")).split(b"\n\n")
        for event in events:
            _, _, data = event.rpartition(b"data: ")
            if data.startswith(b"{"):  # comments keep HTTP's streams alive
                await self._socket.send_text(data)


class ResponseSocket:
    """One connection."""

    def __init__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Take a WebSocket whose key has been checked."""
        self.gone = asyncio.Event()
        self._scope, self._receive, self._send = scope, receive, send
        self._app: ASGIApp = scope["app"]
        self._state: ServerState = scope["app"].state.server
        self._waiting: asyncio.Queue[bytes | None] = asyncio.Queue(MAX_WAITING)
        self._held = HeldBytes(self._state)

    async def run(self) -> None:
        """Answer messages until the client leaves, or is silent for too long, or the server ends."""
        if self._state.is_draining:
            await errors.refuse_websocket(errors.draining(), self._scope, self._receive, self._send)
            return
        protocol = self._scope.get("dovetail.websocket")  # `PROTOCOL`, whose module needs the library
        last = LastResponse(self._state.remembered, CALLER.get().owner)
        LAST.set(last)
        if protocol is not None:
            protocol.held = self._held
        await self._send({"type": "websocket.accept"})
        reader = asyncio.create_task(self._read())
        try:
            while (message := await self._next()) is not None:
                self._held.let_go(len(message))  # from here on it is held as any body
                await self._answer(message)
        finally:
            reader.cancel()
            await asyncio.gather(reader, return_exceptions=True)
            last.forget()
            if protocol is not None:
                protocol.held = None
            self._held.let_go()

    async def send_text(self, data: bytes) -> None:
        """Send an event; what is sent to a client that has left is dropped."""
        if not self.gone.is_set():
            try:
                await self._send({"type": "websocket.send", "text": data.decode()})
            except OSError:
                self.gone.set()

    async def fail(self, status: int, error: ErrorDetail) -> None:
        """Send an error."""
        await self.send_text(msgspec.json.encode(ErrorSent(status=status, error=error)))

    async def _read(self) -> None:
        """Queue messages until the client leaves."""
        await self._receive()  # websocket.connect
        while (message := await self._receive())["type"] == "websocket.receive":
            text = message.get("text")
            await self._waiting.put(text.encode() if text is not None else message.get("bytes") or b"")
        self.gone.set()

    async def _next(self) -> bytes | None:
        """Return the next message; None where the connection ends."""
        idle_s = self._state.settings.websocket_idle_timeout
        events: list[Any] = [self.gone.wait(), self._state.leaving.wait(), self._waiting.get()]
        tasks = [asyncio.ensure_future(event) for event in events]
        try:
            done, _ = await asyncio.wait(tasks, timeout=idle_s or None, return_when=asyncio.FIRST_COMPLETED)
            if tasks[0] in done:
                return None
            if tasks[2] in done:
                return tasks[2].result()  # type: ignore[no-any-return]
            await self._close(*((GOING_AWAY, errors.DRAINING) if done else (NORMAL, "idle")))
            return None
        finally:
            for task in tasks:
                task.cancel()

    async def _answer(self, message: bytes) -> None:
        try:
            body = await asyncio.to_thread(body_of, message) if len(message) > IN_THREAD else body_of(message)
        except RequestError as error:
            status, detail, _ = errors.describe(error)
            await self.fail(status, detail)
            return
        exchange = Exchange(self, body)
        try:
            await asyncio.ensure_future(self._app(self._request(), exchange.receive, exchange.send))
        except Exception as error:
            errors.describe(error)  # which logs what is not ours
            await self._close(BROKEN, "internal_error")

    def _request(self) -> Scope:
        """Return the scope of a request to the HTTP route."""
        scope = self._scope
        headers = [
            (name, value) for name, value in scope["headers"] if name not in OWN and not name.startswith(b"sec-")
        ]
        return {
            "type": "http",
            "asgi": scope["asgi"],
            "http_version": "1.1",
            "method": "POST",
            "scheme": "https" if scope["scheme"] == "wss" else "http",
            "path": PATH,
            "raw_path": PATH.encode(),
            "root_path": "",
            "query_string": b"",
            "headers": [*headers, (b"content-type", b"application/json")],
            "client": scope.get("client"),
            "server": scope.get("server"),
            "state": {},
            "extensions": {},
        }

    async def _close(self, code: int, reason: str) -> None:
        with suppress(OSError):
            await self._send({"type": "websocket.close", "code": code, "reason": reason})
        self.gone.set()


class _Endpoint:
    """The route's application."""

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve a connection."""
        await ResponseSocket(scope, receive, send).run()


route = WebSocketRoute(PATH, _Endpoint())
