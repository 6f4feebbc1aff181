"""Names and origins: a page that points its own name at this machine, or that is another site's, is refused."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from harness import Harness
from pydantic import SecretStr, ValidationError
from wire import JSON_TYPE, Wire, still_answers

from dovetail_server.http.hosts import HostRules
from dovetail_server.settings.serve import ServeSettings


def ask(
    harness: Harness, hosts: list[bytes], extra: bytes = b"", line: bytes = b"GET /v1/models HTTP/1.1"
) -> tuple[int, str | None]:
    """Send a request with these `Host` headers; return the status and an error's code."""
    with Wire.to(harness) as wire:
        wire.send(line + b"\r\n" + b"".join(b"host: %b\r\n" % host for host in hosts) + extra + b"\r\n")
        reply = wire.reply()
        assert reply is not None
        assert wire.is_open()  # a wrong name is no reason to end a connection
        return reply.status, None if reply.status == 200 else reply.code


LOCAL = [
    b"localhost", b"localhost:30000", b"LOCALHOST", b"localhost.", b"127.0.0.1", b"127.0.0.1:1", b"127.8.9.10:65535",
    b"[::1]", b"[::1]:30000", b" localhost ",
]  # fmt: skip
FOREIGN = [
    b"evil.example", b"evil.example:30000", b"localhost.evil.example", b"127.0.0.1.evil.example", b"10.0.0.1",
    b"192.168.1.5:30000", b"[2001:db8::1]", b"0.0.0.0", b"127.1", b"my-laptop", b"evil-localhost",
]  # fmt: skip
INVALID = [
    b"", b" ", b"local host", b"localhost:", b"localhost:port", b"localhost:99999", b"localhost:-1", b"localhost/path",
    b"user@localhost", b"localhost, evil.example", b"http://localhost", b"[::1", b"::1", b"[localhost]:x", b"\xe9",
    b"localhost:80:80", b"a" * 300,
]  # fmt: skip


@pytest.mark.parametrize("host", LOCAL)
def test_names_of_this_machine_are_answered_to(harness: Harness, host: bytes) -> None:
    """With any port, in any case."""
    assert ask(harness, [host]) == (200, None)


@pytest.mark.parametrize("host", FOREIGN)
def test_other_names_are_refused_by_a_local_server_without_keys(harness: Harness, host: bytes) -> None:
    """DNS rebinding gives a page's name this machine's address; the name still tells."""
    assert ask(harness, [host]) == (403, "host_not_allowed")
    assert ask(harness, [host], line=b"GET /livez HTTP/1.1")[0] == 200, "a probe says that the process lives"


@pytest.mark.parametrize("host", INVALID)
def test_what_is_no_name_is_refused(harness: Harness, host: bytes) -> None:
    """On every path."""
    assert ask(harness, [host]) == (400, "invalid_host")
    assert ask(harness, [host], line=b"GET /livez HTTP/1.1") == (400, "invalid_host")


def test_a_missing_or_second_host_is_refused(harness: Harness) -> None:
    """As HTTP/1.1 wants it; HTTP/1.0, which health checks speak, needs none."""
    for hosts in ([], [b"localhost", b"localhost"], [b"localhost", b"evil.example"], [b"evil.example", b"localhost"]):
        assert ask(harness, hosts) == (400, "invalid_host")
    with Wire.to(harness) as wire:
        wire.send(b"GET /v1/models HTTP/1.0\r\n\r\n")
        reply = wire.reply()
        assert reply is not None
        assert reply.status == 200
        assert wire.is_closed()
    assert still_answers(harness)


def test_the_refusal_says_what_to_do(harness: Harness) -> None:
    """It names the flag, and comes before anything else, on Anthropic's routes in their form."""
    reply = harness.post("/v1/messages", {}, headers={"host": "evil.example"})
    assert (reply.status_code, reply.json()["type"]) == (403, "error")
    assert "--allowed-hosts" in reply.text
    assert "'evil.example'" in reply.text


def test_a_server_with_keys_answers_to_any_name(make_harness: Callable[..., Harness]) -> None:
    """A page has no key to send."""
    harness = make_harness(api_key=["secret"])
    assert ask(harness, [b"evil.example"], b"authorization: Bearer secret\r\n")[0] == 200
    assert ask(harness, [b"evil.example"]) == (401, "invalid_api_key")


def test_allowed_hosts(make_harness: Callable[..., Harness]) -> None:
    """Names and endings that are given are answered to, and this machine's own; with keys, too."""
    harness = make_harness(allowed_hosts=["chat.example.org", "*.LAN", "[2001:db8::1]", "10.0.0.1"])
    for host in (b"chat.example.org", b"Chat.Example.Org:443", b"a.lan", b"a.b.lan", b"[2001:DB8::1]:80", b"10.0.0.1"):
        assert ask(harness, [host])[0] == 200
    for host in (b"example.org", b"x.chat.example.org", b"lan", b"evil-lan", b"a.lan.evil.example"):
        assert ask(harness, [host])[0] == 403
    assert ask(harness, [b"localhost"])[0] == 200
    keyed = make_harness(allowed_hosts=["chat.example.org"], api_key=["secret"])
    assert ask(keyed, [b"evil.example"], b"authorization: Bearer secret\r\n") == (403, "host_not_allowed")
    anybody = make_harness(allowed_hosts=["*"])
    assert ask(anybody, [b"evil.example"])[0] == 200


@pytest.mark.parametrize(
    ("settings", "is_limited"),
    [
        ({"host": "127.0.0.1"}, True),
        ({"host": "127.0.0.5"}, True),
        ({"host": "localhost"}, True),
        ({"host": "::1"}, True),
        ({"host": "0.0.0.0"}, False),
        ({"host": "::"}, False),
        ({"host": "192.168.1.5"}, False),
        ({"host": "127.0.0.1", "api_key": [SecretStr("k")]}, False),
        ({"host": "0.0.0.0", "allowed_hosts": ["a"]}, True),
        ({"host": "127.0.0.1", "allowed_hosts": ["*"]}, False),
    ],
)
def test_when_names_are_limited(settings: dict[str, Any], is_limited: bool) -> None:
    """On this machine's own addresses without a key, and wherever names are given."""
    assert HostRules.of(ServeSettings(**settings)).is_limited is is_limited


@pytest.mark.parametrize("name", ["a b", "http://a", "a:80", "*a", "a*", "*.", "a/b"])
def test_names_that_no_header_has(name: str) -> None:
    """They are a mistake of the command line."""
    with pytest.raises(ValidationError, match="no name such as"):
        ServeSettings(allowed_hosts=[name])


def upload(harness: Harness, headers: bytes, host: bytes = b"localhost:30000") -> tuple[int, str | None]:
    """Send what changes something."""
    body = b'{"prompt":"a"}'
    with Wire.to(harness) as wire:
        head = b"POST /tokenize HTTP/1.1\r\nhost: %b\r\n" % host + JSON_TYPE
        wire.send(head + b"content-length: %d\r\n" % len(body) + headers + b"\r\n" + body)
        reply = wire.reply()
        assert reply is not None
        return reply.status, None if reply.status == 200 else reply.code


OWN = [b"http://localhost:30000", b"https://localhost:30000", b"HTTP://LOCALHOST:30000"]
OTHERS = [
    b"http://evil.example", b"https://evil.example:30000", b"null", b"http://localhost", b"http://localhost:3000",
    b"http://127.0.0.1:30000", b"file://", b"app://localhost:30000", b"chrome-extension://abc", b"", b"localhost:30000",
    b"http://localhost:30000, http://evil.example",
]  # fmt: skip


@pytest.mark.parametrize("origin", OTHERS)
def test_other_origins_change_nothing(harness: Harness, origin: bytes) -> None:
    """Whether or not the browser says `Sec-Fetch-Site`; reading needs no permission, for nobody can read the reply."""
    assert upload(harness, b"origin: %b\r\n" % origin) == (403, "origin_not_allowed")
    assert upload(harness, b"origin: %b\r\nsec-fetch-site: cross-site\r\n" % origin) == (403, "origin_not_allowed")
    assert ask(harness, [b"localhost:30000"], b"origin: %b\r\n" % origin)[0] == 200


@pytest.mark.parametrize("origin", OWN)
def test_the_servers_own_pages_work(harness: Harness, origin: bytes) -> None:
    """`/docs` sends its own origin."""
    assert upload(harness, b"origin: %b\r\n" % origin)[0] == 200


def test_default_ports_are_left_out(harness: Harness) -> None:
    """An origin names its port only where it is not the scheme's."""
    assert upload(harness, b"origin: https://localhost\r\n", b"localhost")[0] == 200
    assert upload(harness, b"origin: http://localhost\r\n", b"localhost:80")[0] == 200
    assert upload(harness, b"origin: http://localhost\r\n", b"localhost:81")[0] == 403


def test_what_is_no_browser_works(harness: Harness) -> None:
    """Clients without either header, and a browser's address bar."""
    assert upload(harness, b"")[0] == 200
    assert upload(harness, b"sec-fetch-site: none\r\n")[0] == 200
    assert upload(harness, b"sec-fetch-site: same-origin\r\norigin: https://behind.a.proxy\r\n")[0] == 200
    assert upload(harness, b"sec-fetch-site: something-new\r\n")[0] == 403


def test_origins_that_are_allowed(make_harness: Callable[..., Harness]) -> None:
    """Web pages and desktop applications by their name; without one (`null`) only where all are allowed."""
    harness = make_harness(allow_origins=["https://chat.example.org", "app://obsidian.md"])
    for origin in (b"https://chat.example.org", b"app://obsidian.md"):
        assert upload(harness, b"origin: %b\r\n" % origin)[0] == 200
    assert upload(harness, b"origin: null\r\n")[0] == 403
    assert upload(make_harness(allow_origins=["*"]), b"origin: null\r\n")[0] == 200
