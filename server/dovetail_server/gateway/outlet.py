"""The client's side of a relayed reply: what is sent, and what happens to a client that takes nothing."""

from __future__ import annotations

import asyncio
import logging
import time
from typing import TYPE_CHECKING

import aiohttp
from starlette.types import Scope, Send

from dovetail_server.errors import ClientGoneError

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


class Outlet:
    """Sends a worker's reply to the client."""

    def __init__(self, state: GatewayState, scope: Scope, send: Send) -> None:
        """Send through `send`."""
        self.state = state
        self.scope = scope
        self._send = send

    async def head(self, reply: aiohttp.ClientResponse) -> None:
        """Send status and headers."""
        headers = [(n.lower(), v) for n, v in reply.raw_headers if n.lower().decode("latin-1") not in HOP]
        if (length := reply.headers.get("content-length")) is not None:
            headers.append((b"content-length", length.encode()))
        await self._send({"type": "http.response.start", "status": reply.status, "headers": headers})

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
            logger.warning("A client took nothing for %.0f s and was cut off.", time.monotonic() - began)
            self.state.cut_off(self.scope)
            raise ClientGoneError("the client takes nothing") from None

    async def send_all(self, reply: aiohttp.ClientResponse) -> None:
        """Send the whole reply as it comes.

        Raises:
            UnreachableError: The worker broke off before the first byte of a reply's body.
        """
        pieces = reply.content.iter_any()
        try:
            first = await anext(pieces, b"")
        except (aiohttp.ClientError, OSError) as error:
            raise UnreachableError(reason(error), was_taken=True) from None
        await self.head(reply)
        await self.body(first)
        async for piece in pieces:
            await self.body(piece)
        await self.body(b"", more=False)


def reason(error: Exception) -> str:
    """Say in a few words why a worker's reply did not come, or not to its end."""
    if isinstance(error, aiohttp.ClientConnectorError):
        return f"it cannot be reached: {error.os_error.strerror or error}"
    if isinstance(error, aiohttp.ClientPayloadError | aiohttp.ServerDisconnectedError | ConnectionResetError):
        return "its connection broke off"
    return str(error) or type(error).__name__
