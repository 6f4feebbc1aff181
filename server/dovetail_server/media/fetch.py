"""Fetches images over HTTP, from public addresses of allowed hosts only.

A host is resolved once, all its addresses must be public, and the connection goes to one of these: a name that is
resolved again, as DNS rebinding needs it, never is. TLS and the `Host` header keep the name. Every redirect passes the
same checks. Proxies of the environment are not used: they would resolve the name themselves.
"""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Awaitable, Callable, Iterable, Sequence
from functools import cache
from typing import TYPE_CHECKING, Any
from urllib.parse import urljoin

import httpcore2

from dovetail_server.media.addresses import AllowedDomains, MediaUrl, is_public, parse_url
from dovetail_server.media.refusals import MAX_IMAGE_BYTES, MediaError, shown, too_large

if TYPE_CHECKING:
    import ssl

FETCH_S = 5.0
"""For all that one request has fetched."""
MAX_REDIRECTS = 3
MAX_AT_ONCE = 4
REDIRECTS = frozenset((301, 302, 303, 307, 308))
FAILED, ADDRESS = "failed_to_download_image", "invalid_image_url"
HEADERS = [("User-Agent", "dovetail"), ("Accept", "image/*"), ("Accept-Encoding", "identity")]
Resolve = Callable[[str, int], Awaitable[Sequence[str]]]


async def resolve(host: str, port: int) -> Sequence[str]:
    """Return the addresses of a host, in the system's order.

    Raises:
        OSError: It has none.
    """
    found = await asyncio.get_running_loop().getaddrinfo(host, port, type=socket.SOCK_STREAM)
    return list(dict.fromkeys(f"{at[0]}%{at[3]}" if len(at) == 4 and at[3] else str(at[0]) for *_, at in found))


@cache
def default_context() -> ssl.SSLContext:
    """Return what checks certificates by the system's authorities: reading these takes longer than most fetches."""
    return httpcore2.default_ssl_context()


class PublicNetwork(httpcore2.AsyncNetworkBackend):
    """Connects to public addresses only, to what a name was resolved to and was checked."""

    def __init__(self, resolver: Resolve, network: httpcore2.AsyncNetworkBackend) -> None:
        """Resolve by `resolver`, and have `network` connect to addresses."""
        self._resolve = resolver
        self._network = network

    async def connect_tcp(
        self,
        host: str,
        port: int,
        timeout: float | None = None,
        local_address: str | None = None,
        socket_options: Iterable[Any] | None = None,
    ) -> httpcore2.AsyncNetworkStream:
        """Resolve, check, and connect to the first address that answers.

        Raises:
            MediaError: The host has no address, or one that is not public.
            httpcore2.ConnectError: No address answers.
        """
        try:
            addresses = await self._resolve(host, port)
        except (OSError, UnicodeError):
            addresses = ()
        if not addresses:
            raise MediaError(f"host {shown(host)} has no address; check its name", FAILED)
        if not all(map(is_public, addresses)):
            text = f"host {shown(host)} has an address that is not public; images are fetched from the Internet only"
            raise MediaError(f"{text}; send the image as a data: URL", ADDRESS)
        failure: Exception = httpcore2.ConnectError("no address")
        for address in addresses:
            try:
                return await self._network.connect_tcp(address, port, timeout, local_address, socket_options)
            except (httpcore2.ConnectError, httpcore2.ConnectTimeout) as error:
                failure = error
        raise failure


class Fetcher:
    """Fetches images. Used by one request, in an event loop."""

    def __init__(
        self,
        allowed: AllowedDomains,
        *,
        resolver: Resolve = resolve,
        network: httpcore2.AsyncNetworkBackend | None = None,
        ssl_context: ssl.SSLContext | None = None,
        timeout_s: float = FETCH_S,
    ) -> None:
        """Fetch nothing yet.

        Args:
            allowed: The hosts.
            resolver: Returns a host's addresses.
            network: Connects to an address.
            ssl_context: Checks certificates. Default: the system's authorities.
            timeout_s: For all images together, however often they are asked for.
        """
        self._allowed = allowed
        self._network = PublicNetwork(resolver, network or httpcore2.AnyIOBackend())
        self._ssl_context = ssl_context or default_context()
        self._timeout_s = self._left_s = timeout_s

    async def fetch_all(self, urls: Sequence[str]) -> list[bytes | MediaError]:
        """Return the bytes behind each URL, or why there are none; a few are fetched at once."""
        places = asyncio.Semaphore(MAX_AT_ONCE)
        loop = asyncio.get_running_loop()
        began = loop.time()
        end = began + self._left_s

        async def one(url: str) -> bytes | MediaError:
            try:
                async with asyncio.timeout_at(end), places:
                    return await self._fetch(url)
            except TimeoutError:
                text = f"{shown(url)} was not fetched within {self._timeout_s:g} s, which all images of a request share"
                return MediaError(f"{text}; send the image as a data: URL", FAILED)
            except MediaError as error:
                return error

        found = await asyncio.gather(*map(one, urls))
        self._left_s -= loop.time() - began
        return found

    async def _fetch(self, url: str) -> bytes:
        given = url
        for _ in range(MAX_REDIRECTS + 1):
            parts = parse_url(url)
            self._allowed.check(parts)
            found = await self._get(parts, given)
            if isinstance(found, bytes):
                return found
            try:
                url = urljoin(url, found)
            except ValueError:
                raise _failed(given, f"it is redirected to {shown(found)}, which is no URL") from None
        text = f"{shown(given)} is redirected more than {MAX_REDIRECTS} times; send the address where the image is"
        raise MediaError(text, FAILED)

    async def _get(self, url: MediaUrl, given: str) -> bytes | str:
        """Return what an address holds, or where it redirects to."""
        host = f"[{url.host}]" if ":" in url.host else url.host
        target = httpcore2.URL(scheme=url.scheme, host=url.host, port=url.port, target=url.target)
        try:
            async with (
                httpcore2.AsyncConnectionPool(self._ssl_context, network_backend=self._network) as pool,
                pool.stream("GET", target, headers=[("Host", host), *HEADERS]) as reply,
            ):
                headers = {name.lower(): value for name, value in reply.headers}
                if reply.status in REDIRECTS:
                    return headers.get(b"location", b"").decode("latin-1")
                if reply.status != 200:
                    raise _failed(given, f"its server answered with status {reply.status}")
                if headers.get(b"content-encoding", b"identity").lower() != b"identity":
                    raise _failed(given, "its server sent it compressed, and was asked not to")
                return await _whole(reply, headers.get(b"content-length", b""), given)
        except httpcore2.NetworkError:
            raise _failed(given, "the connection failed") from None
        except (httpcore2.ProtocolError, httpcore2.UnsupportedProtocol, httpcore2.TimeoutException):
            raise _failed(given, "its server does not speak HTTP as it should") from None


async def _whole(reply: httpcore2.Response, length: bytes, given: str) -> bytes:
    if length.isdigit() and int(length[:20]) > MAX_IMAGE_BYTES:
        raise too_large(shown(given))
    body = bytearray()
    async for chunk in reply.aiter_stream():
        body += chunk
        if len(body) > MAX_IMAGE_BYTES:
            raise too_large(shown(given))
    return bytes(body)


def _failed(given: str, why: str) -> MediaError:
    return MediaError(f"{shown(given)} cannot be fetched: {why}; send the image as a data: URL", FAILED)
