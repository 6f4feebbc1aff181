"""Images over HTTP: connections go where they were checked to go, and nowhere else."""

from __future__ import annotations

import asyncio
import ssl
from collections.abc import Awaitable
from pathlib import Path
from typing import Any

import pytest
from media_network import PUBLIC, Answer, Names, RecordedNetwork, response, serving

from dovetail_server.media.addresses import AllowedDomains
from dovetail_server.media.fetch import MAX_IMAGE_BYTES, Fetcher
from dovetail_server.media.refusals import MediaError

IMAGE = b"\x89PNG\r\n\x1a\n an image"
OTHER = "151.101.1.69"
CERTIFICATE = Path(__file__).parent / "localhost.pem"


def fetch(
    url: str,
    answer: Answer = lambda head: response(IMAGE),
    names: dict[str, Any] | None = None,
    allowed: tuple[str, ...] = ("*",),
    tls: bool = False,
    **options: Any,
) -> tuple[bytes | MediaError, Names, RecordedNetwork]:
    resolver = Names({"example.org": [PUBLIC], "localhost": [PUBLIC], **(names or {})})

    async def run() -> tuple[bytes | MediaError, RecordedNetwork]:
        serves: dict[str, Any] = {}
        if tls:
            serves["ssl"] = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
            serves["ssl"].load_cert_chain(CERTIFICATE)
            options["ssl_context"] = ssl.create_default_context(cafile=str(CERTIFICATE))
        async with serving(answer, **serves) as port:
            network = RecordedNetwork(port)
            fetcher = Fetcher(AllowedDomains(allowed), resolver=resolver, network=network, **options)
            [found] = await fetcher.fetch_all([url])
            return found, network

    found, network = asyncio.run(run())
    return found, resolver, network


def refused(url: str, *args: Any, **options: Any) -> tuple[str, list[tuple[str, int]]]:
    found, _, network = fetch(url, *args, **options)
    assert isinstance(found, MediaError), found
    assert "\n" not in found.message
    return found.message, network.connected


def test_an_image() -> None:
    """The name is resolved once, the connection goes to its address, and the server sees the name."""
    heads: list[bytes] = []

    def answer(head: bytes) -> bytes:
        heads.append(head)
        return response(IMAGE)

    found, names, network = fetch("http://Example.org/a%20b?c=d#e", answer)
    assert found == IMAGE
    assert (names.asked, network.connected) == (["example.org"], [(PUBLIC, 80)])
    [head] = heads
    assert head.startswith(b"GET /a%20b?c=d HTTP/1.1\r\nHost: example.org\r\n")
    assert b"Accept-Encoding: identity" in head


def test_an_address_of_ipv6() -> None:
    """A public one that the operator allows is fetched from, and stands in brackets where HTTP wants them."""
    heads: list[bytes] = []

    def answer(head: bytes) -> bytes:
        heads.append(head)
        return response(IMAGE)

    address = "2606:4700:4700::1111"
    found, _, network = fetch(f"http://[{address}]/", answer, {address: [address]}, (f"[{address}]",))
    assert (found, network.connected) == (IMAGE, [(address, 80)])
    assert f"Host: [{address}]\r\n".encode() in heads[0]


def test_tls_keeps_the_name() -> None:
    """The certificate is checked for the URL's name, while the connection goes to the address."""
    found, _, network = fetch("https://localhost/x", tls=True)
    assert found == IMAGE
    assert network.connected == [(PUBLIC, 443)]
    message, _ = refused("https://example.org/x", tls=True)  # the server's certificate is another's
    assert "cannot be fetched" in message


@pytest.mark.parametrize(
    "addresses",
    [["127.0.0.1"], ["10.0.0.1"], ["169.254.169.254"], ["::1"], ["::ffff:93.184.216.34"], ["fe80::1%2"], ["64:ff9b::1"],
     [PUBLIC, "127.0.0.1"], [PUBLIC, "2002:7f00:1::"], ["100.64.0.1", PUBLIC]],
)  # fmt: skip
def test_private_addresses(addresses: list[str]) -> None:
    """One address that is not public refuses the host, and no packet goes anywhere."""
    message, connected = refused("http://example.org/x", names={"example.org": addresses})
    assert "not public" in message
    assert all(address not in message for address in addresses)  # what names of a network mean is nobody's business
    assert connected == []


@pytest.mark.parametrize("host", ["127.0.0.1", "[::1]", "[::ffff:7f00:1]", "169.254.169.254", "10.1.2.3"])
def test_private_literals(host: str) -> None:
    """An address in the URL is resolved to itself, and checked as one of a name."""
    bare = host.strip("[]")
    names = {bare: [bare], "::ffff:127.0.0.1": ["::ffff:127.0.0.1"]}
    message, connected = refused(f"http://{host}/x", names=names)
    assert "not public" in message
    assert connected == []


def test_rebinding() -> None:
    """A name whose address changes behind the check is not asked again within a fetch."""
    found, names, network = fetch("http://example.org/x", names={"example.org": [[PUBLIC], ["127.0.0.1"]]})
    assert found == IMAGE
    assert (len(names.asked), network.connected) == (1, [(PUBLIC, 80)])


def test_rebinding_on_redirect() -> None:
    """A redirect to the same name is checked anew, and its new address is refused."""
    answers = [response(status="302 Found", location="/y"), response(IMAGE)]
    message, connected = refused(
        "http://example.org/x", lambda head: answers.pop(0), {"example.org": [[PUBLIC], ["127.0.0.1"]]}
    )
    assert "not public" in message
    assert connected == [(PUBLIC, 80)]


@pytest.mark.parametrize(
    ("location", "why"),
    [
        ("http://internal.example/x", "not public"),
        ("http://127.0.0.1/x", "not public"),
        ("http://example.org:8080/x", "port 8080"),
        ("file:///etc/passwd", "scheme 'file'; possible: http, https"),
        ("gopher://example.org/x", "scheme"),
        ("http://2130706433/", "IPv4"),
        ("http://user@example.org/", "user name"),
        ("//internal.example/x", "not public"),
        ("http://gone.example/", "no address"),
    ],
)
def test_redirects_are_checked(location: str, why: str) -> None:
    """Each hop passes the rules of the first."""
    names = {"internal.example": ["10.0.0.1"], "127.0.0.1": ["127.0.0.1"]}
    message, connected = refused(
        "http://example.org/x", lambda head: response(status="301 Moved", location=location), names
    )
    assert why in message
    assert connected == [(PUBLIC, 80)]


def test_redirects_to_other_hosts() -> None:
    """A redirect leads where the operator allows it, and no further than three times."""
    answers = [response(status=f"{code} X", location=f"http://b.example/{code}") for code in (301, 302, 307)]
    left = [*answers, response(IMAGE)]
    found, _, network = fetch("http://example.org/", lambda head: left.pop(0), {"b.example": [OTHER]})
    assert found == IMAGE
    assert network.connected == [(PUBLIC, 80), *[(OTHER, 80)] * 3]
    message, _ = refused("http://example.org/", lambda head: response(status="308 X", location="/again"))
    assert "more than 3 times" in message
    message, connected = refused(
        "http://example.org/", lambda head: answers[0], {"b.example": [OTHER]}, allowed=("example.org",)
    )
    assert "--allowed-media-domains" in message
    assert connected == [(PUBLIC, 80)]


def test_what_is_not_allowed_is_not_resolved() -> None:
    """Without the flag no name is asked for."""
    found, names, network = fetch("http://example.org/x", allowed=())
    assert isinstance(found, MediaError)
    assert (names.asked, network.connected) == ([], [])


def test_a_dead_address() -> None:
    """The next of the host's addresses is tried."""

    async def run() -> tuple[bytes | MediaError, list[tuple[str, int]]]:
        async with serving(lambda head: response(IMAGE)) as port:
            network = RecordedNetwork(port)
            network.dead = {OTHER}
            names = Names({"example.org": [OTHER, PUBLIC]})
            fetcher = Fetcher(AllowedDomains(["*"]), resolver=names, network=network)
            [found] = await fetcher.fetch_all(["http://example.org/"])
            return found, network.connected

    assert asyncio.run(run()) == (IMAGE, [(OTHER, 80), (PUBLIC, 80)])


@pytest.mark.parametrize(
    ("reply", "why"),
    [
        (response(status="404 Not Found"), "status 404"),
        (response(status="204 No Content"), "status 204"),
        (response(status="302 Found"), "redirected more than"),
        (response(b"x", content_encoding="gzip"), "compressed"),
        (response(b"x", content_length=str(MAX_IMAGE_BYTES + 1)), "more than 20 MiB"),
        (response(b"x", content_length="9" * 4000), "HTTP"),
        (response(b"x" * (MAX_IMAGE_BYTES + 1)), "more than 20 MiB"),
        (b"HTTP/1.1 200 OK\r\nContent-Length: 5\r\n\r\nab", "HTTP"),
        (b"SSH-2.0-OpenSSH_9.9\r\n", "HTTP"),
        (b"HTTP/1.1 200 OK\r\nA: " + b"x" * 200_000 + b"\r\n\r\n", "HTTP"),
        (b"", "HTTP"),
    ],
)
def test_replies_that_are_none(reply: bytes, why: str) -> None:
    """Whatever a server sends is a line."""
    message, _ = refused("http://example.org/x", lambda head: reply)
    assert why in message


def test_slow_servers() -> None:
    """All images of a request share one time, and one that is slow says so."""

    async def never() -> bytes:
        await asyncio.sleep(60)
        return b""

    def answer(head: bytes) -> bytes | Awaitable[bytes]:
        return never() if b"/slow" in head else response(IMAGE)

    async def run() -> list[bytes | MediaError]:
        async with serving(answer) as port:
            names = Names({"example.org": [PUBLIC]})
            fetcher = Fetcher(AllowedDomains(["*"]), resolver=names, network=RecordedNetwork(port), timeout_s=0.3)
            return await fetcher.fetch_all([f"http://example.org/{at}" for at in ("slow", "fast", "slow", "fast")])

    found = asyncio.run(run())
    assert (found[1], found[3]) == (IMAGE, IMAGE)
    assert all(isinstance(found[at], MediaError) and "within 0.3 s" in found[at].message for at in (0, 2))
