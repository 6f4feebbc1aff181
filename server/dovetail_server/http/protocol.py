"""HTTP/1.1 on a connection: uvicorn's fast protocol, with bounds on connections and on what belongs to no body."""

from __future__ import annotations

import asyncio
import sys
import uuid
from http import HTTPStatus
from typing import Any, NamedTuple

import httptools
import msgspec
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol, RequestResponseCycle

from dovetail_server.errors.body import ErrorBody, ErrorDetail
from dovetail_server.http.connections import Connections

MAX_HEAD_BYTES = 1 << 16
"""Request line and headers, beyond the first piece that is read; also a body's trailers, or a chunk's extension."""
VERSIONS = ("1.1", "1.0")
OTHER_VERSION = ("Invalid HTTP version", "Pause on PRI/Upgrade")
"""What the parser says of request lines of other versions, and of HTTP/2's preface."""


class Fault(NamedTuple):
    """Why a request is refused before anything looks at it."""

    status: HTTPStatus
    text: str
    code: str


NO_HTTP = Fault(HTTPStatus.BAD_REQUEST, "the request is no valid HTTP/1.1", "invalid_http")
VERSION = Fault(HTTPStatus.HTTP_VERSION_NOT_SUPPORTED, "this server speaks HTTP/1.1 and 1.0", "http_version")
CODING = Fault(HTTPStatus.NOT_IMPLEMENTED, "of transfer codings, only chunked is supported", "transfer_coding")
OLD_CHUNKS = Fault(HTTPStatus.BAD_REQUEST, "HTTP/1.0 has no transfer codings", "invalid_http")
LARGE_HEAD = Fault(
    HTTPStatus.REQUEST_HEADER_FIELDS_TOO_LARGE,
    f"the request's headers have over {MAX_HEAD_BYTES} bytes",
    "headers_too_large",
)
LARGE_TRAILERS = Fault(
    HTTPStatus.REQUEST_HEADER_FIELDS_TOO_LARGE,
    f"what the request's body has beside its data has over {MAX_HEAD_BYTES} bytes",
    "trailers_too_large",
)


class BoundedHttp(HttpToolsProtocol):
    """Ends connections that are too many, or whose headers or trailers are too large or too slow.

    httptools keeps a header or trailer until it ends. So what comes is counted until it brings the parser further: a
    new message, the end of its headers, a chunk, or bytes of its body. Trailers are counted, too, and dropped.
    """

    def __init__(self, *args: Any, open_connections: Connections, header_timeout: float, **kwargs: Any) -> None:
        """Serve one connection.

        Args:
            args: uvicorn's.
            open_connections: Of the server.
            header_timeout: Seconds that headers get; 0 for no limit.
            kwargs: uvicorn's.
        """
        super().__init__(*args, **kwargs)
        self._open_connections = open_connections
        self._header_timeout = header_timeout
        self._address: str | None = None
        self._is_counted = False
        self._is_refused = False
        self._in_head = False
        self._has_moved = False
        self._num_loose_bytes = 0
        self._data = memoryview(b"")
        self._waiting: list[memoryview] = []
        """What is being parsed, and behind that the next of it first at the end."""
        self._fault: Fault | None = None
        self._head_timer: asyncio.TimerHandle | None = None
        self._answered: RequestResponseCycle
        """The one that is being answered; others wait in the pipeline."""

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]  # as in uvicorn
        """Begin to wait for the first request, or refuse the connection."""
        peer = transport.get_extra_info("peername")
        self._address = str(peer[0]) if isinstance(peer, tuple) else None
        why = self._open_connections.open(self._address)
        if why is None:
            self._is_counted = True
            super().connection_made(transport)
            self._arm()
        else:
            self.transport = transport
            self._write(Fault(HTTPStatus.SERVICE_UNAVAILABLE, f"{why}; try again later", "too_many_connections"))

    def connection_lost(self, exc: Exception | None) -> None:
        """Stop waiting."""
        self._disarm()
        self._uncount()
        super().connection_lost(exc)

    def handle_websocket_upgrade(self) -> None:
        """Give the connection to the protocol for WebSockets; it stays one of those that the server may have."""
        self._disarm()
        super().handle_websocket_upgrade()
        self.transport.get_protocol().on_lost = self._uncount  # type: ignore[attr-defined]  # `BoundedWebSocket`

    def data_received(self, data: bytes) -> None:
        """Parse, and count what does not bring the request further."""
        if self._is_refused:
            return
        self._has_moved = False
        self._waiting = [memoryview(data)]
        while self._waiting and not self._is_refused:
            self._data = self._waiting.pop()
            super().data_received(self._data)  # type: ignore[arg-type]  # the parser takes any buffer
        self._num_loose_bytes = 0 if self._has_moved else self._num_loose_bytes + len(data)
        if self._num_loose_bytes > MAX_HEAD_BYTES and not self.transport.is_closing():
            self._refuse(LARGE_HEAD if self._in_head else LARGE_TRAILERS)
        if self._is_idle and self._head_timer is None and self.timeout_keep_alive_task is None:
            self._arm()  # blank lines between requests, which are none

    def _should_upgrade(self) -> bool:
        """Whether a request opens a WebSocket: a GET without a body, as RFC 6455 has it."""
        has_body = any(name in (b"content-length", b"transfer-encoding") for name, _ in self.headers)
        return self.parser.get_method() == b"GET" and not has_body and super()._should_upgrade()

    @property
    def _is_set_aside(self) -> bool:
        """Whether the parser takes a request for the last one in HTTP, as its `Upgrade` asks, which it is not."""
        return self.parser.should_upgrade() and self.parser.get_method() != b"CONNECT" and not self._should_upgrade()

    def _unsupported_upgrade_warning(self) -> None:
        """Read a request anew without its `Upgrade`, which a server may ignore: the parser would read no body."""
        if not self._is_set_aside:
            return
        [offset] = sys.exc_info()[1].args  # type: ignore[union-attr]  # where its head ends
        lines = [b"%b: %b" % header for header in self.headers if header[0] != b"upgrade"]
        line = b"%b %b HTTP/%b" % (self.parser.get_method(), self.url, self.parser.get_http_version().encode())
        self._waiting = [self._data[offset:], memoryview(b"\r\n".join([line, *lines, b"", b""]))]
        self.parser = httptools.HttpRequestParser(self)

    def on_message_complete(self) -> None:
        """A request is here, with its body."""
        if not self._is_set_aside:
            super().on_message_complete()

    @property
    def _is_idle(self) -> bool:
        is_answering = self.cycle is not None and not self.cycle.response_complete
        return not (is_answering or self._in_head or self._is_refused or self.transport.is_closing())

    def on_message_begin(self) -> None:
        """The first byte of a request is here."""
        self._in_head = self._has_moved = True
        if self._head_timer is None:
            self._arm()
        super().on_message_begin()

    def on_header(self, name: bytes, value: bytes) -> None:
        """Keep a header. A trailer is none: it would come after everybody has looked."""
        if self._in_head:
            super().on_header(name, value)

    def on_headers_complete(self) -> None:
        """All headers are here."""
        if self._is_set_aside:
            return
        self._in_head, self._has_moved = False, True
        self._disarm()
        self._fault = self._find_fault()
        if self._fault is not None:
            raise ValueError(self._fault.text)  # makes the parser stop; `send_400_response` follows
        super().on_headers_complete()

    def _find_fault(self) -> Fault | None:
        version = self.parser.get_http_version()
        if version not in VERSIONS:
            return VERSION
        codings = [value.strip().lower() for name, value in self.headers if name == b"transfer-encoding"]
        if codings and version == "1.0":
            return OLD_CHUNKS
        return None if codings in ([], [b"chunked"]) else CODING

    def on_chunk_header(self) -> None:
        """A chunk of the body begins."""
        self._has_moved = True

    def on_body(self, body: bytes) -> None:
        """Take a piece of the body."""
        self._has_moved = True
        super().on_body(body)

    def _start_asgi_task(self, cycle: RequestResponseCycle, app: Any) -> None:
        self._answered = cycle
        super()._start_asgi_task(cycle, app)

    def _arm(self) -> None:
        if self._header_timeout:
            self._head_timer = self.loop.call_later(self._header_timeout, self._give_up)

    def _disarm(self) -> None:
        if self._head_timer is not None:
            self._head_timer.cancel()
            self._head_timer = None

    def _uncount(self) -> None:
        if self._is_counted:
            self._is_counted = False
            self._open_connections.close(self._address)

    def _give_up(self) -> None:
        self._head_timer = None
        if not self.transport.is_closing():
            self.transport.close()

    def send_400_response(self, msg: str) -> None:
        """Answer what the parser refuses, or a fault, as every other error is answered."""
        is_other_version = str(sys.exc_info()[1]) in OTHER_VERSION
        self._refuse(self._fault or (VERSION if is_other_version else NO_HTTP))

    def _refuse(self, fault: Fault) -> None:
        """End the connection: behind the replies to earlier requests, or else with a reply to this one."""
        self._disarm()
        self._is_refused = True
        is_answering = self.cycle is not None and not self.cycle.response_complete
        if is_answering and self.pipeline and not self._is_before_body:
            self.pipeline.popleft()  # the request at fault, which waits behind earlier ones
            self._last_cycle.keep_alive = False
        elif is_answering and self._is_before_body:
            self._last_cycle.keep_alive = False
        elif is_answering and self.cycle.response_started:
            self.transport.close()
        else:
            self._write(fault)

    @property
    def _is_before_body(self) -> bool:
        """Whether the request that is being read has no cycle yet."""
        return self._in_head or self._fault is not None

    @property
    def _last_cycle(self) -> RequestResponseCycle:
        return self.pipeline[0][0] if self.pipeline else self._answered

    def _write(self, fault: Fault) -> None:
        """Write a reply, there being no request that could have one, and end the connection."""
        self._is_refused = True
        kind = "invalid_request_error" if fault.status < 500 else "server_error"
        body = msgspec.json.encode(ErrorBody(ErrorDetail(message=fault.text, type=kind, code=fault.code)))
        head = f"HTTP/1.1 {fault.status.value} {fault.status.phrase}\r\ncontent-type: application/json\r\n"
        head += "retry-after: 1\r\n" if fault.status == HTTPStatus.SERVICE_UNAVAILABLE else ""
        head += f"x-request-id: req_{uuid.uuid4().hex}\r\ncontent-length: {len(body)}\r\nconnection: close\r\n\r\n"
        self.transport.write(head.encode() + body)
        self.transport.close()
