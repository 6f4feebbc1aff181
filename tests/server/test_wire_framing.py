"""Framing, byte by byte: where a request ends is never in doubt, and where it is, the connection ends."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from harness import Harness
from wire import CHUNKED, HOST, JSON_TYPE, Wire, post, request, still_answers

TOKENIZE = b"POST /tokenize HTTP/1.1"
BODY = b'{"prompt":"abc"}'
SMUGGLED = request(b"GET /v1/models HTTP/1.1")


def tokenize(headers: bytes, body: bytes) -> bytes:
    return request(TOKENIZE, JSON_TYPE + headers, body)


def chunks(*sizes_and_data: bytes, end: bytes = b"0\r\n\r\n") -> bytes:
    return b"".join(b"%x\r\n%b\r\n" % (len(data), data) for data in sizes_and_data) + end


GOOD = {
    "length": tokenize(b"content-length: 16\r\n", BODY),
    "chunks": tokenize(CHUNKED, chunks(BODY[:3], BODY[3:])),
    "chunks of one byte": tokenize(CHUNKED, chunks(*(BODY[i : i + 1] for i in range(len(BODY))))),
    "chunk extensions": tokenize(CHUNKED, b'10;a=b;c="d"\r\n' + BODY + b"\r\n0;e\r\n\r\n"),
    "capital chunk size": tokenize(CHUNKED, b"010\r\n" + BODY + b"\r\n000\r\n\r\n"),
    "trailers": tokenize(CHUNKED, chunks(BODY, end=b"0\r\nx-a: 1\r\nx-b: 2\r\n\r\n")),
    "blank lines before": b"\r\n\r\n" + tokenize(b"content-length: 16\r\n", BODY),
    "leading zeros": tokenize(b"content-length: 0016\r\n", BODY),
    "capitals": request(TOKENIZE, b"CONTENT-TYPE: application/json\r\nTransfer-Encoding: Chunked\r\n", chunks(BODY)),
    "expect": tokenize(b"content-length: 16\r\nexpect: 100-continue\r\n", BODY),
    "a header's obs-text": tokenize(b"content-length: 16\r\nx-name: \xe9\r\n", BODY),
}


@pytest.mark.parametrize("name", GOOD)
def test_what_is_well_framed_is_served(harness: Harness, name: str) -> None:
    """Every form that HTTP allows is read, and the connection goes on."""
    with Wire.to(harness) as wire:
        wire.send(GOOD[name])
        if name == "expect":
            assert wire.socket.recv(25) == b"HTTP/1.1 100 Continue\r\n\r\n"
        reply = wire.reply()
        assert reply is not None
        assert (reply.status, b'"count":3' in reply.body) == (200, True), reply
        assert wire.is_open()


UPGRADE = b"connection: keep-alive, Upgrade, HTTP2-Settings\r\nupgrade: %b\r\nhttp2-settings: AAMAAABkAAQ\r\n"


@pytest.mark.parametrize("to", [b"h2c", b"websocket", b"WebSocket", b"TLS/1.0, h2c"])
def test_an_upgrade_that_is_not_served_is_ignored(harness: Harness, to: bytes) -> None:
    """Java's and curl's clients ask for HTTP/2 so: a body is read, in any pieces, and the connection goes on."""
    whole = tokenize(UPGRADE % to + b"content-length: 16\r\n", BODY)
    chunked = tokenize(UPGRADE % to + CHUNKED, chunks(BODY[:3], BODY[3:]))
    for sent in ([whole], [whole[:-16], whole[-16:]], [whole[:50], whole[50:-5], whole[-5:]], [chunked], [whole * 9]):
        with Wire.to(harness) as wire:
            wire.socket.settimeout(3)
            for piece in sent:
                wire.send(piece)
            for _ in range(9 if sent == [whole * 9] else 1):
                reply = wire.reply()
                assert reply is not None
                assert (reply.status, b'"count":3' in reply.body) == (200, True), reply
            if to == b"h2c":
                wire.send(request(headers=UPGRADE % to))  # a GET has no body
                assert (reply := wire.reply()) is not None
                assert reply.status == 200
            assert wire.is_open()


def test_a_thousand_upgrades_in_one_packet_are_read_one_by_one(harness: Harness) -> None:
    """Each costs what its head does."""
    with Wire.to(harness) as wire:
        wire.send(request(headers=UPGRADE % b"h2c") * 1000)
        assert all((reply := wire.reply()) is not None and reply.status == 200 for _ in range(1000))


BAD: dict[str, tuple[bytes, int]] = {
    "CL and TE": (tokenize(b"content-length: 16\r\n" + CHUNKED, chunks(BODY) + SMUGGLED), 400),
    "TE and CL": (tokenize(CHUNKED + b"content-length: 16\r\n", chunks(BODY) + SMUGGLED), 400),
    "two lengths": (tokenize(b"content-length: 16\r\ncontent-length: 0\r\n", BODY + SMUGGLED), 400),
    "two equal lengths": (tokenize(b"content-length: 16\r\ncontent-length: 16\r\n", BODY), 400),
    "a list of lengths": (tokenize(b"content-length: 16, 16\r\n", BODY), 400),
    "negative length": (tokenize(b"content-length: -1\r\n", BODY), 400),
    "signed length": (tokenize(b"content-length: +16\r\n", BODY), 400),
    "hex length": (tokenize(b"content-length: 0x10\r\n", BODY), 400),
    "empty length": (tokenize(b"content-length: \r\n", BODY), 400),
    "huge length": (tokenize(b"content-length: 99999999999999999999999\r\n", BODY), 400),
    "length over the limit": (tokenize(b"content-length: 9999999999\r\n", BODY), 413),
    "no number as chunk size": (tokenize(CHUNKED, b"xyz\r\nabc\r\n"), 400),
    "negative chunk size": (tokenize(CHUNKED, b"-1\r\nabc\r\n"), 400),
    "huge chunk size": (tokenize(CHUNKED, b"fffffffffffffffff\r\nabc\r\n"), 400),
    "empty chunk size": (tokenize(CHUNKED, b"\r\nabc\r\n"), 400),
    "chunk longer than said": (tokenize(CHUNKED, b"2\r\nabc\r\n0\r\n\r\n"), 400),
    "bare LF behind a chunk size": (tokenize(CHUNKED, b"10\n" + BODY + b"\r\n0\r\n\r\n"), 400),
    "bare LF behind a chunk": (tokenize(CHUNKED, b"10\r\n" + BODY + b"\n0\r\n\r\n"), 400),
    "a length in a trailer": (tokenize(CHUNKED, chunks(BODY, end=b"0\r\ncontent-length: 5\r\n\r\n")), 400),
    "other transfer coding": (tokenize(b"transfer-encoding: gzip, chunked\r\n", chunks(BODY)), 501),
    "chunked is not last": (tokenize(b"transfer-encoding: chunked, gzip\r\n", chunks(BODY)), 400),
    "no chunked": (tokenize(b"transfer-encoding: gzip\r\n", BODY), 501),
    "chunked twice": (tokenize(CHUNKED * 2, chunks(chunks(BODY))), 400),
    "chunked of HTTP/1.0": (request(b"POST /tokenize HTTP/1.0", JSON_TYPE + CHUNKED, chunks(BODY)), 400),
    "hidden transfer coding": (tokenize(b"transfer-encoding : chunked\r\ncontent-length: 16\r\n", BODY), 400),
    "tab in a coding": (tokenize(b"transfer-encoding: \x0bchunked\r\n", chunks(BODY)), 400),
    "folded header": (request(headers=b"x-a: b\r\n c\r\n"), 400),
    "folded with a tab": (request(headers=b"x-a: b\r\n\tc\r\n"), 400),
    "first header folded": (b"GET /livez HTTP/1.1\r\n host: localhost\r\n\r\n", 400),
    "NUL in a name": (request(headers=b"x\0a: b\r\n"), 400),
    "NUL in a value": (request(headers=b"x-a: b\0c\r\n"), 400),
    "CR in a value": (request(headers=b"x-a: b\rc: d\r\n"), 400),
    "header without colon": (request(headers=b"x-a\r\n"), 400),
    "header without name": (request(headers=b": b\r\n"), 400),
    "space in a name": (request(headers=b"x a: b\r\n"), 400),
    "bare LF lines": (b"GET /livez HTTP/1.1\nhost: localhost\n\n", 400),
    "bare LF behind a header": (b"GET /livez HTTP/1.1\r\nhost: localhost\nx-a: b\r\n\r\n", 400),
    "space in the target": (request(b"GET /liv ez HTTP/1.1"), 400),
    "no target": (request(b"GET HTTP/1.1"), 400),
    "no known method": (request(b"BREW /livez HTTP/1.1"), 400),
    "small letters": (request(b"get /livez HTTP/1.1"), 400),
    "TLS": (b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03" + b"a" * 99, 400),
    "another protocol": (request(b"GET /livez FTP/1.1"), 400),
    "HTTP/2.0": (request(b"GET /livez HTTP/2.0"), 505),
    "HTTP/2's preface": (b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + b"\0" * 18, 505),
    "HTTP/3.0": (request(b"GET /livez HTTP/3.0"), 505),
    "HTTP/1.2": (request(b"GET /livez HTTP/1.2"), 505),
    "HTTP/9.9": (request(b"POST /tokenize HTTP/9.9", JSON_TYPE + b"content-length: 16\r\n", BODY), 505),
    "HTTP/0.9": (b"GET /livez\r\n\r\n", 505),
}


@pytest.mark.parametrize("name", BAD)
def test_what_is_badly_framed_ends_the_connection(harness: Harness, name: str) -> None:
    """One reply in OpenAI's form, never one to what was smuggled behind, and then the end."""
    sent, status = BAD[name]
    with Wire.to(harness) as wire:
        wire.send(sent)
        reply = wire.reply()
        assert reply is not None
        assert (reply.status, reply.headers.get("connection")) == (status, "close"), reply
        assert reply.code
        assert reply.headers["x-request-id"].startswith("req_")
        assert wire.is_closed()
        assert len(wire.log) == 1
    assert still_answers(harness)


@pytest.mark.parametrize("name", BAD)
def test_what_is_badly_framed_behind_a_request_is_not_mixed_up_with_it(harness: Harness, name: str) -> None:
    """The first request of a pipeline gets its own reply, and the second's fault does not come before it."""
    sent, _ = BAD[name]
    with Wire.to(harness) as wire:
        wire.send(request(b"GET /v1/models HTTP/1.1") + sent)
        first = wire.reply()
        assert first is not None
        assert (first.status, b"tiny" in first.body) == (200, True)
        second = wire.reply()
        assert second is None or second.status >= 400
        assert wire.is_closed()
    assert still_answers(harness)


def test_a_pipeline_is_answered_in_order(harness: Harness) -> None:
    """A hundred requests in one piece get a hundred replies, in their order."""
    paths = [b"/livez", b"/v1/models", b"/nothing"]
    with Wire.to(harness) as wire:
        wire.send(b"".join(request(b"GET %b HTTP/1.1" % paths[i % 3]) for i in range(100)))
        statuses = [reply.status for _ in range(100) if (reply := wire.reply()) is not None]
        assert statuses == [(200, 200, 404)[i % 3] for i in range(100)]
        assert wire.is_open()


def test_bodies_in_a_pipeline_stay_apart(harness: Harness) -> None:
    """A refusal in the middle leaves what follows whole."""
    with Wire.to(harness) as wire:
        wire.send(post(b"/tokenize", {"prompt": "abc"}) + post(b"/tokenize", {"x": 1}) + GOOD["chunks"])
        assert [reply.status for _ in range(3) if (reply := wire.reply()) is not None] == [200, 400, 200]
        assert wire.is_open()


@pytest.mark.parametrize("at", range(0, 130, 13))
def test_a_client_that_leaves_anywhere(harness: Harness, at: int) -> None:
    """Closing after any part of a request leaves nothing behind."""
    with Wire.to(harness) as wire:
        wire.send(GOOD["trailers"][:at])
    assert still_answers(harness)
    harness.eventually(lambda: harness.state.num_held_bytes == 0)


def test_a_request_may_come_byte_by_byte(harness: Harness) -> None:
    """Wherever TCP cuts it, it is the same request."""
    with Wire.to(harness) as wire:
        for i in range(len(GOOD["trailers"])):
            wire.send(GOOD["trailers"][i : i + 1])
        reply = wire.reply()
        assert reply is not None
        assert reply.status == 200
        assert wire.is_open()


def test_a_reply_before_the_body_ends_the_connection(harness: Harness) -> None:
    """What is still to come of a refused body is never read as the next request."""
    with Wire.to(harness) as wire:
        wire.send(request(b"POST /nothing HTTP/1.1", b"content-length: 1000\r\n", SMUGGLED))
        reply = wire.reply()
        assert reply is not None
        assert (reply.status, reply.headers["connection"]) == (404, "close")
        assert wire.is_closed()
        assert len(wire.log) == 1


ENDLESS: dict[str, tuple[bytes, bytes]] = {
    "headers": (b"GET /livez HTTP/1.1\r\n" + HOST, b"x-a: " + b"b" * 990 + b"\r\n"),
    "one header": (b"GET /livez HTTP/1.1\r\n" + HOST + b"x-a: ", b"b" * 1000),
    "small headers": (b"GET /livez HTTP/1.1\r\n" + HOST, b"a: b\r\n" * 150),
    "a header's name": (b"GET /livez HTTP/1.1\r\n" + HOST, b"b" * 1000),
    "the target": (b"GET /", b"b" * 1000),
    "trailers": (tokenize(CHUNKED, chunks(BODY, end=b"0\r\n")), b"x-a: " + b"b" * 990 + b"\r\n"),
    "one trailer": (tokenize(CHUNKED, chunks(BODY, end=b"0\r\nx-a: ")), b"b" * 1000),
    "small trailers": (tokenize(CHUNKED, chunks(BODY, end=b"0\r\n")), b"a: b\r\n" * 150),
    "a trailer's name": (tokenize(CHUNKED, chunks(BODY, end=b"0\r\n")), b"b" * 1000),
    "a chunk's extension": (tokenize(CHUNKED, b"10;"), b"b" * 1000),
    "blank lines": (b"", b"\r\n" * 500),
}


@pytest.mark.parametrize("key", [None, "secret"])
@pytest.mark.parametrize("name", ENDLESS)
def test_what_is_no_body_is_bounded(make_harness: Callable[..., Harness], name: str, key: str | None) -> None:
    """Whatever goes on and on beside a body is cut off after some 64 KiB, without a key, too, and nothing is kept."""
    begin, more = ENDLESS[name]
    harness = make_harness(api_key=[key] if key else [])
    with Wire.to(harness) as wire:
        wire.send(begin)
        while wire.sent < 1 << 26 and wire.send(more * 20):
            pass
        assert wire.sent < 1 << 26
        assert wire.is_closed() or {reply.status for reply in iter(wire.reply, None)} <= {401, 400, 431}
    assert still_answers(harness)
    harness.eventually(lambda: harness.state.num_held_bytes == 0)


def test_a_trailer_is_no_header(harness: Harness) -> None:
    """Names that mean something in a header mean nothing behind the body."""
    end = b"0\r\nhost: evil\r\nauthorization: Bearer x\r\norigin: http://evil\r\n\r\n"
    with Wire.to(harness) as wire:
        wire.send(tokenize(CHUNKED, chunks(BODY, end=end)))
        reply = wire.reply()
        assert reply is not None
        assert reply.status == 200
        assert wire.is_open()
