"""The client's side of a relayed reply: what is sent, and what happens to a client that takes nothing."""

from __future__ import annotations

import asyncio
import functools
import logging
import time
from typing import TYPE_CHECKING

import aiohttp
from starlette.requests import Request
from starlette.types import Send

from dovetail_server.errors.catalogue import ClientGoneError, ServiceError
from dovetail_server.http.journal import end_of
from dovetail_server.relay.replies import MAX_REPLY_BYTES, Pieces, pass_whole

if TYPE_CHECKING:
    from dovetail_server.gateway.state import GatewayState

logger = logging.getLogger("dovetail.server")
HOP = frozenset(
    (
        *("connection", "keep-alive", "proxy-authenticate", "proxy-authorization", "te", "trailer", "upgrade"),
        *("transfer-encoding", "host", "content-length", "date", "server", "x-request-id", "x-dovetail-journal"),
        "x-dovetail-resume-key",
    )
)
"""Headers that belong to one connection, that each server writes itself, or that gateways and workers alone use."""


class UnreachableError(Exception):
    """A worker gave no reply: another one may be asked. `was_taken`: it had the request, which may be why it ended."""

    def __init__(self, message: str, *, was_taken: bool = False) -> None:
        super().__init__(message)
        self.was_taken = was_taken


class DownstreamResponse:
    """Sends workers' replies to one client."""

    def __init__(self, state: GatewayState, request: Request, send: Send, *, is_asked_again: bool) -> None:
        """Send through `send`; `is_asked_again` says that another worker may be asked where a reply breaks off."""
        self.state = state
        self.scope = request.scope
        self.has_begun = False
        """The client has the head of a reply."""
        self.num_sent = 0
        """Bytes of its body."""
        self.etag: str | None = None
        """Of a file, of which another worker can send what is behind these."""
        self._send = send
        self._is_asked_again = is_asked_again
        self._wants_all = request.method == "GET" and "range" not in request.headers

    async def head(self, reply: aiohttp.ClientResponse) -> None:
        """Send status and headers."""
        headers = [(n.lower(), v) for n, v in reply.raw_headers if n.lower().decode("latin-1") not in HOP]
        if (length := reply.headers.get("content-length")) is not None:
            headers.append((b"content-length", length.encode()))
        await self._send({"type": "http.response.start", "status": reply.status, "headers": headers})
        self.has_begun = True

    async def body(self, data: bytes, *, more: bool = True) -> None:
        """Send a piece; a client that does not take it is cut off.

        Raises:
            ClientGoneError: It was.
        """
        limit = self.state.settings.stream_write_timeout
        began = time.monotonic()
        try:
            async with asyncio.timeout(limit or None):
                await self._send({"type": "http.response.body", "body": data, "more_body": more})
        except TimeoutError:
            logger.warning("Disconnected a client that read nothing for %.0f s.", time.monotonic() - began)
            self.state.cut_off(self.scope)
            raise ClientGoneError("the client takes nothing") from None
        self.num_sent += len(data)

    async def send_all(self, reply: aiohttp.ClientResponse) -> None:
        """Send a whole reply, or of a file what is behind the bytes that were sent.

        One that another worker may be asked for is held until it is whole, so that a client never has the beginning of
        one that broke off. What is too large for that, or lasts, is sent as it comes.

        Raises:
            UnreachableError: The worker broke off, and another one can be asked for all of it, or for what is left.
            ServiceError: It broke off, and nobody can.
        """
        begin = None
        if not self.has_begun:
            self.etag = file_tag(reply) if self._wants_all and self._is_asked_again else None
            begin = functools.partial(self.head, reply)
        is_held = self._is_asked_again and self.etag is None and is_small(reply)
        await pass_whole(self.state, self._pieces(reply), begin, self.body, is_held=is_held)
        await self.body(b"", more=False)

    async def _pieces(self, reply: aiohttp.ClientResponse) -> Pieces:
        try:
            async for piece in reply.content.iter_any():
                yield piece
        except (aiohttp.ClientError, OSError) as error:
            if self.has_begun and self.etag is None:
                raise ServiceError(f"a reply broke off: {reason(error)}", code="reply_lost") from None
            raise UnreachableError(reason(error), was_taken=True) from None

    def lost(self, error: ServiceError) -> Exception:
        """Return what to raise for a request that is not answered: where a reply has begun, the connection ends."""
        if not self.has_begun:
            return error
        logger.error("A client has %d bytes of a reply and gets no more of it: %s", self.num_sent, error.message)
        self.state.cut_off(self.scope)
        return ClientGoneError("its reply broke off")


def file_tag(reply: aiohttp.ClientResponse) -> str | None:
    """Return the tag of a file that can be had from any byte on; None of anything else."""
    tag = reply.headers.get("etag")
    is_file = reply.status == 200 and reply.headers.get("accept-ranges") == "bytes"
    return tag if is_file and tag is not None and not tag.startswith("W/") else None


def is_small(reply: aiohttp.ClientResponse) -> bool:
    """Whether a reply can be held, as far as its head says: it is no stream, which may last, and not too large."""
    return end_of(reply.content_type) is None and (reply.content_length or 0) <= MAX_REPLY_BYTES


def reason(error: Exception) -> str:
    """Say in a few words why a worker's reply did not come, or not to its end."""
    if isinstance(error, aiohttp.ClientConnectorError):
        return f"it cannot be reached: {error.os_error.strerror or error}"
    if isinstance(error, aiohttp.ClientPayloadError | aiohttp.ServerDisconnectedError | ConnectionResetError):
        return "its connection broke off"
    return str(error) or type(error).__name__
