"""Connections are bounded, from one address and in all, and those that are refused are told so."""

from __future__ import annotations

import asyncio
import contextlib
import resource
import socket
from collections.abc import Callable

import pytest
import uvicorn
from harness import Harness
from wire import Wire, request

from dovetail_server.http.connections import Connections, most_connections, network_of, raise_file_limit
from dovetail_server.settings.serve import ServeSettings
from dovetail_server.start import preflight
from dovetail_server.start.lifecycle import ACCEPTED_AT_ONCE, DrainingServer
from dovetail_server.start.run import new_event_loop


def refused(harness: Harness, address: str = "127.0.0.1") -> str | None:
    """Connect, and return why the server does not want that; None where it does."""
    with Wire.to(harness, address) as wire:
        wire.send(request())
        reply = wire.reply()
        assert reply is not None
        if reply.status == 200:
            return None
        assert (reply.status, reply.code, reply.headers["connection"]) == (503, "too_many_connections", "close")
        assert int(reply.headers["retry-after"]) >= 1
        assert wire.is_closed()
        return reply.body.decode()


def test_the_limit_in_all(make_harness: Callable[..., Harness]) -> None:
    """The next one is a 503 that names the flag; once one has ended there is room."""
    harness = make_harness(max_connections=4, max_connections_per_address=4)
    wires = [Wire.to(harness) for _ in range(4)]
    assert all(wire.is_open() for wire in wires)
    for _ in range(3):
        assert "--max-connections" in (refused(harness) or "")
    assert all(wire.is_open() for wire in wires)
    wires[0].socket.close()
    harness.eventually(lambda: refused(harness) is None)
    for wire in wires:
        wire.socket.close()


def test_the_limit_of_an_address(make_harness: Callable[..., Harness]) -> None:
    """Whoever has many leaves room for others."""
    harness = make_harness(max_connections=100, max_connections_per_address=3)
    wires = [Wire.to(harness) for _ in range(3)]
    assert all(wire.is_open() for wire in wires)
    assert "--max-connections-per-address" in (refused(harness) or "")
    assert refused(harness, "127.0.0.2") is None
    for wire in wires:
        wire.socket.close()
    harness.eventually(lambda: refused(harness) is None)


def test_a_flood_is_refused_and_leaves_nothing(make_harness: Callable[..., Harness]) -> None:
    """Five hundred connections that come and go are counted down to none."""
    harness = make_harness(max_connections=20)
    for _ in range(5):
        wires = [Wire.to(harness) for _ in range(100)]
        for wire in wires:
            wire.socket.close()
    harness.eventually(lambda: refused(harness) is None)
    harness.eventually(lambda: not harness.server.server_state.connections)


def test_what_the_limits_are_by_default() -> None:
    """As many as files may be open, and three quarters of them for one address, which may be a gateway."""
    found = Connections(ServeSettings())
    assert found.most == most_connections() < resource.getrlimit(resource.RLIMIT_NOFILE)[0]
    assert found.most_per_address == found.most * 3 // 4
    assert Connections(ServeSettings(max_connections=1)).most_per_address == 1


def test_opening_and_closing_are_counted() -> None:
    """By address, an IPv6 network being one; what has no address counts in all only."""
    found = Connections(ServeSettings(max_connections=5, max_connections_per_address=2))
    for address in ("2001:db8::1", "2001:db8::2"):
        assert found.open(address) is None
    assert "2001:db8::/64" in (found.open("2001:db8::3") or "")
    assert found.open("2001:db8:0:1::3") is None
    assert found.open(None) is None
    assert found.open("10.0.0.1") is None
    assert "--max-connections" in (found.open(None) or "")
    for given in ("2001:db8::1", "2001:db8::2", "2001:db8:0:1::3", None, "10.0.0.1"):
        found.close(given)
    assert (found.num_open, dict(found._by_network), found.num_refused) == (0, {}, 2)


@pytest.mark.parametrize(
    ("address", "network"),
    [
        ("10.0.0.1", "10.0.0.1"),
        ("::1", "::/64"),
        ("::ffff:10.0.0.1", "10.0.0.1"),
        ("fe80::1%eth0", "fe80::/64"),
    ],
)
def test_networks(address: str, network: str) -> None:
    """What one client has all of."""
    assert network_of(address) == network


def test_the_limit_of_open_files_is_raised() -> None:
    """To what the user may have, and never lowered."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    try:
        resource.setrlimit(resource.RLIMIT_NOFILE, (min(soft, 300), hard))
        assert most_connections() == 150
        raise_file_limit()
        raised, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
        assert raised == min(hard, 1 << 16)
        raise_file_limit()
        assert resource.getrlimit(resource.RLIMIT_NOFILE)[0] == raised
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


class Counted(asyncio.Protocol):
    """A connection that is counted, and does nothing."""

    num = 0

    def __init__(self, **_: object) -> None:
        """Take what uvicorn gives."""

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Count it, and end."""
        Counted.num += 1
        transport.close()


class CountingServer(DrainingServer):
    """Accepts connections as all servers do, and counts them."""

    def __init__(self) -> None:
        """Serve nothing."""
        config = uvicorn.Config(no_app, http=Counted, lifespan="off", log_config=None)
        uvicorn.Server.__init__(self, config)


async def no_app(scope: object, receive: object, send: object) -> None:
    """Answer nothing."""


def test_a_round_of_the_event_loop_accepts_many() -> None:
    """Clients that come at once do not wait a round each, which takes milliseconds beside running streams."""
    listener, num, rounds = preflight.bind("127.0.0.1", 0), 8 * ACCEPTED_AT_ONCE, 0
    server = CountingServer()

    async def main() -> None:
        nonlocal rounds
        server.config.load()
        server.lifespan = server.config.lifespan_class(server.config)
        await server.startup([listener])
        for each in clients:
            each.connect(listener.getsockname())
        Counted.num = 0
        async with asyncio.timeout(60):
            while Counted.num < num:
                await asyncio.sleep(0)
                rounds += 1
        await server.shutdown([listener])

    with contextlib.ExitStack() as stack:
        clients = [stack.enter_context(socket.socket()) for _ in range(num)]
        with asyncio.Runner(loop_factory=new_event_loop) as runner:
            runner.run(main())
    assert rounds <= num // 8
