"""A resolver and a network that record what is asked of them; connections end at a server of the test."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Mapping, Sequence
from contextlib import asynccontextmanager
from typing import Any

import httpcore2

PUBLIC = "93.184.216.34"
Answer = Callable[[bytes], bytes | Awaitable[bytes]]
"""Makes a whole response of a request's head."""


class RecordedNetwork(httpcore2.AsyncNetworkBackend):
    """Connects to a port of this machine, whatever the address; `connected` says what was asked for."""

    def __init__(self, port: int) -> None:
        self.port = port
        self.connected: list[tuple[str, int]] = []
        self.dead: set[str | int] = set()
        """Addresses and ports where nobody answers."""
        self._real = httpcore2.AnyIOBackend()

    async def connect_tcp(
        self,
        host: str,
        port: int,
        timeout: float | None = None,
        local_address: str | None = None,
        socket_options: Iterable[Any] | None = None,
    ) -> httpcore2.AsyncNetworkStream:
        self.connected.append((host, port))
        if host in self.dead or port in self.dead:
            raise httpcore2.ConnectError("dead")
        return await self._real.connect_tcp("127.0.0.1", self.port, timeout)


class Names:
    """A resolver: each name has addresses, or a list of answers that are given one after the other."""

    def __init__(self, names: Mapping[str, Sequence[Any]]) -> None:
        self.names = {name: list(answers) for name, answers in names.items()}
        self.asked: list[str] = []

    async def __call__(self, host: str, port: int) -> Sequence[str]:
        self.asked.append(host)
        found = self.names.get(host)
        if found is None:
            raise OSError("no such name")
        if isinstance(found[0], list):
            return found.pop(0) if len(found) > 1 else found[0]
        return found


def response(body: bytes = b"", status: str = "200 OK", **headers: str) -> bytes:
    """Return a response; headers with `_` for `-`."""
    lines = [f"HTTP/1.1 {status}", "Connection: close"]
    if "content_length" not in headers:
        lines.append(f"Content-Length: {len(body)}")
    lines += [f"{name.replace('_', '-')}: {value}" for name, value in headers.items()]
    return "\r\n".join(lines).encode("latin-1") + b"\r\n\r\n" + body


@asynccontextmanager
async def serving(answer: Answer, **options: Any) -> AsyncIterator[int]:
    """Serve one response per connection on a port of this machine."""

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            found = answer(await reader.readuntil(b"\r\n\r\n"))
            writer.write(found if isinstance(found, bytes) else await found)
            await writer.drain()
        except (ConnectionError, asyncio.IncompleteReadError, asyncio.CancelledError):
            pass
        finally:
            writer.close()

    server = await asyncio.start_server(serve, "127.0.0.1", 0, **options)
    try:
        yield server.sockets[0].getsockname()[1]
    finally:
        server.close()
