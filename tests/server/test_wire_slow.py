"""Slow clients: headers, bodies and idle connections have their time, counted from what the client does."""

from __future__ import annotations

import time
from collections.abc import Callable

import httpx
import pytest
from harness import Harness
from wire import CHUNKED, JSON_TYPE, Wire, request, still_answers

from dovetail_server.settings.serve import ServeSettings

POST = b"POST /tokenize HTTP/1.1"
BODY = b'{"prompt":"' + b"a" * 4000 + b'"}'
LENGTH = b"content-length: %d\r\n" % len(BODY)


def drip(wire: Wire, data: bytes, pause_s: float, *, limit_s: float = 200.0) -> None:
    """Send byte by byte until the server answers or ends the connection."""
    began = time.monotonic()
    wire.socket.settimeout(pause_s)
    for i in range(len(data)):
        try:
            wire.rest += wire.socket.recv(1 << 16)
            break
        except TimeoutError:
            assert time.monotonic() - began < limit_s, "it goes on for ever"
            if not wire.send(data[i : i + 1]):
                break
    wire.socket.settimeout(60)


@pytest.mark.parametrize("begin", [b"", b"\r\n", b"GET", b"GET /livez HTTP/1.1\r\n", b"GET /livez HTTP/1.1\r\nhost: l"])
def test_headers_have_their_time(make_harness: Callable[..., Harness], begin: bytes) -> None:
    """A connection that sends none, or does not end them, is closed."""
    harness = make_harness(header_timeout=0.4)
    with Wire.to(harness) as wire:
        wire.send(begin)
        assert wire.is_closed()
    assert still_answers(harness)


def test_dripping_headers_end_too(make_harness: Callable[..., Harness]) -> None:
    """The time is that of all headers, not of a pause between them."""
    harness = make_harness(header_timeout=0.5)
    with Wire.to(harness) as wire:
        drip(wire, b"GET /livez HTTP/1.1\r\n" + b"x-a: b\r\n" * 1000, 0.05)
        assert wire.is_closed()
    assert still_answers(harness)


@pytest.mark.parametrize("after", [b"", b"\r\n", b"\r\n\r\n", b"G", b"GET /livez HTTP/1.1\r\n"])
def test_idle_connections_end(make_harness: Callable[..., Harness], after: bytes) -> None:
    """Behind a reply a connection is kept for a while, and blank lines or half a request do not keep it longer."""
    harness = make_harness(header_timeout=0.4, keep_alive_timeout=1)
    with Wire.to(harness) as wire:
        assert wire.is_open()
        wire.send(after)
        assert wire.is_closed()
    assert still_answers(harness)


def test_idle_connections_outlive_those_of_clients_pools() -> None:
    """A client that sends just when the server gives a connection up meets a reset, though nothing has failed."""
    pools_s = [httpx.Limits().keepalive_expiry or 0.0, 60.0]  # and of load balancers
    assert ServeSettings.model_fields["keep_alive_timeout"].default > 1.2 * max(pools_s)


def test_a_connection_in_use_is_kept(make_harness: Callable[..., Harness]) -> None:
    """Requests one after the other, with pauses below the limit, share a connection."""
    harness = make_harness(header_timeout=1, keep_alive_timeout=2)
    with Wire.to(harness) as wire:
        for _ in range(4):
            assert wire.is_open()
            time.sleep(0.5)


@pytest.mark.parametrize("is_chunked", [False, True])
@pytest.mark.parametrize("key", [None, "secret"])
def test_a_body_of_one_byte_at_a_time_is_ended(
    make_harness: Callable[..., Harness], is_chunked: bool, key: str | None
) -> None:
    """However regularly it comes, a body below the least rate is a 408, and is not held any longer."""
    harness = make_harness(body_timeout=0.5, min_body_rate=1000, api_key=[key] if key else [])
    headers = JSON_TYPE + (CHUNKED if is_chunked else LENGTH)
    body = b"".join(b"1\r\n%c\r\n" % c for c in BODY) if is_chunked else BODY
    with Wire.to(harness) as wire:
        wire.send(request(POST, headers + (b"authorization: Bearer secret\r\n" if key else b"")))
        drip(wire, body, 0.05)
        reply = wire.reply()
        assert reply is not None
        assert (reply.status, reply.code, reply.headers["connection"]) == (408, "body_timeout", "close")
        assert b"--min-body-rate" in reply.body
    harness.eventually(lambda: harness.state.num_held_bytes == 0)
    assert still_answers(harness)


def test_a_body_has_its_time_in_all(make_harness: Callable[..., Harness]) -> None:
    """Without a least rate, too, a body that is held in memory is ended."""
    harness = make_harness(body_timeout=0.1, min_body_rate=0)
    with Wire.to(harness) as wire:
        wire.send(request(POST, JSON_TYPE + LENGTH))
        drip(wire, BODY, 0.02)
        reply = wire.reply()
        assert reply is not None
        assert reply.status == 408


def test_a_body_that_is_fast_enough_is_read(make_harness: Callable[..., Harness]) -> None:
    """The rate counts after the first seconds only, and over the whole body."""
    harness = make_harness(body_timeout=1, min_body_rate=1000)
    with Wire.to(harness) as wire:
        wire.send(request(POST, JSON_TYPE + LENGTH))
        for i in range(0, len(BODY), 1000):
            time.sleep(0.3)
            wire.send(BODY[i : i + 1000])
        reply = wire.reply()
        assert reply is not None
        assert reply.status == 200
        assert wire.is_open()


def test_slow_bodies_hold_nobody_up(make_harness: Callable[..., Harness]) -> None:
    """Forty of them wait at once, all end, and the server answers meanwhile."""
    harness = make_harness(body_timeout=1, min_body_rate=1000)
    wires = [Wire.to(harness) for _ in range(40)]
    for wire in wires:
        wire.send(request(POST, JSON_TYPE + LENGTH, b'{"prompt":'))
    harness.eventually(lambda: harness.state.num_held_bytes == 400)
    assert still_answers(harness)
    assert [reply.status for wire in wires if (reply := wire.reply()) is not None] == [408] * 40
    harness.eventually(lambda: harness.state.num_held_bytes == 0)
    for wire in wires:
        wire.socket.close()


def test_no_limits_where_none_are_wanted(make_harness: Callable[..., Harness]) -> None:
    """0 switches each limit off."""
    harness = make_harness(body_timeout=0, min_body_rate=0, header_timeout=0)
    with Wire.to(harness) as wire:
        whole = request(POST, JSON_TYPE + LENGTH, BODY)
        for start in range(0, len(whole), 1000):
            wire.send(whole[start : start + 1000])
            time.sleep(0.05)
        reply = wire.reply()
        assert reply is not None
        assert reply.status == 200
