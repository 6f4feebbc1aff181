"""HTTP/1.1 on a connection: uvicorn's fast protocol, with bounds on what comes before a request is complete."""

from __future__ import annotations

import asyncio
import uuid
from http import HTTPStatus
from typing import Any

import msgspec
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from dovetail_server.openai.errors import ErrorBody, ErrorDetail

MAX_HEAD_BYTES = 1 << 16
"""Request line and headers, beyond the first piece that is read."""
HEAD_S = 30.0
"""A connection gets so long to send them; what it does not send costs a file descriptor all the same."""


class BoundedHttp(HttpToolsProtocol):
    """Ends connections whose headers are too large or too slow; httptools keeps whatever comes until they end."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._in_head = False
        self._num_head_bytes = 0
        self._head_timer: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]  # as in uvicorn
        """Begin to wait for the first request."""
        super().connection_made(transport)
        self._arm()

    def connection_lost(self, exc: Exception | None) -> None:
        """Stop waiting."""
        self._disarm()
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        """Parse, and count what headers go on for."""
        was_in_head = self._in_head
        super().data_received(data)
        if was_in_head and self._in_head:
            self._num_head_bytes += len(data)
            if self._num_head_bytes > MAX_HEAD_BYTES and not self.transport.is_closing():
                self._refuse()

    def on_message_begin(self) -> None:
        """The first byte of a request is here."""
        self._in_head = True
        self._num_head_bytes = 0
        if self._head_timer is None:
            self._arm()
        super().on_message_begin()

    def on_headers_complete(self) -> None:
        """All headers are here."""
        self._in_head = False
        self._disarm()
        super().on_headers_complete()

    def _arm(self) -> None:
        self._head_timer = self.loop.call_later(HEAD_S, self._give_up)

    def _disarm(self) -> None:
        if self._head_timer is not None:
            self._head_timer.cancel()
            self._head_timer = None

    def _give_up(self) -> None:
        self._head_timer = None
        if not self.transport.is_closing():
            self.transport.close()

    def send_400_response(self, msg: str) -> None:
        """Answer what is no HTTP, as every other error is answered."""
        self._answer(HTTPStatus.BAD_REQUEST, "the request is no valid HTTP/1.1", "invalid_http")

    def _refuse(self) -> None:
        text = f"the request's headers have over {MAX_HEAD_BYTES} bytes"
        self._answer(HTTPStatus.REQUEST_HEADER_FIELDS_TOO_LARGE, text, "headers_too_large")

    def _answer(self, status: HTTPStatus, text: str, code: str) -> None:
        """Write a reply, there being no request that could have one, and end the connection."""
        body = msgspec.json.encode(ErrorBody(ErrorDetail(message=text, type="invalid_request_error", code=code)))
        head = f"HTTP/1.1 {status.value} {status.phrase}\r\ncontent-type: application/json\r\n"
        head += f"x-request-id: req_{uuid.uuid4().hex}\r\ncontent-length: {len(body)}\r\nconnection: close\r\n\r\n"
        self.transport.write(head.encode() + body)
        self.transport.close()
