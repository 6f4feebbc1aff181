"""Addresses that images may be fetched from."""

from __future__ import annotations

import pytest

from dovetail_server.media.addresses import AllowedDomains, is_public, parse_url
from dovetail_server.media.refusals import MediaError

PRIVATE = [
    *("127.0.0.1", "127.1.2.3", "0.0.0.0", "10.0.0.1", "172.16.9.9", "192.168.1.1", "169.254.169.254", "100.64.0.1"),
    *("100.100.100.200", "192.0.0.8", "192.0.2.1", "198.18.0.1", "203.0.113.7", "224.0.0.1", "239.1.1.1", "240.0.0.1"),
    *("255.255.255.255", "168.63.129.16", "::", "::1", "fe80::1", "fe80::1%2", "fe80::1%eth0", "fc00::1"),
    *("fd00:ec2::254", "fec0::1", "ff02::1", "ff0e::1", "2001:db8::1", "::ffff:127.0.0.1", "::ffff:93.184.216.34"),
    *("::93.184.216.34", "::127.0.0.1", "64:ff9b::7f00:1", "64:ff9b::5db8:d822", "64:ff9b:1::1", "2002:7f00:1::"),
    *("2002:5db8:d822::1", "2001:0:4136:e378::1", "::ffff:0:127.0.0.1", "2606:4700::5efe:10.0.0.1"),
    *("2606:4700::200:5efe:7f00:1", "2606:4700::1%3", "", "example.org", "1", "0x7f.1"),
    *("192.88.99.1", "3fff::1", "3fff:fff::1"),
]
PUBLIC = ["93.184.216.34", "8.8.8.8", "1.1.1.1", "2606:4700:4700::1111", "2a00:1450:4001:800::200e"]


@pytest.mark.parametrize("address", PRIVATE)
def test_private(address: str) -> None:
    """No address of this machine, its network or a cloud's, in any form, counts as public."""
    assert not is_public(address)


@pytest.mark.parametrize("address", PUBLIC)
def test_public(address: str) -> None:
    """Those of the Internet do."""
    assert is_public(address)


@pytest.mark.parametrize(
    ("url", "host", "target"),
    [
        ("https://Example.ORG/a/b.png?x=1#top", "example.org", "/a/b.png?x=1"),
        ("http://example.org", "example.org", "/"),
        ("https://example.org:443/x", "example.org", "/x"),
        ("http://example.org.:80/x", "example.org", "/x"),
        ("https://xn--bcher-kva.example/ü".replace("ü", "%C3%BC"), "xn--bcher-kva.example", "/%C3%BC"),
        ("http://93.184.216.34/x", "93.184.216.34", "/x"),
        ("http://[2606:4700:4700::1111]/x", "2606:4700:4700::1111", "/x"),
        ("https://a_b.example.org/%2e%2e/x", "a_b.example.org", "/%2e%2e/x"),
    ],
)
def test_parsed(url: str, host: str, target: str) -> None:
    """A URL is its host in lower case and its target; a fragment is nobody's business but the client's."""
    found = parse_url(url)
    assert (found.host, found.target) == (host, target)


@pytest.mark.parametrize(
    "url",
    [
        *("ftp://example.org/x", "gopher://example.org/", "javascript:1", "//example.org/x", "example.org/x", "http:x"),
        *("http://", "http:///x", "https://example.org:8443/x", "http://example.org:443/", "https://example.org:80/"),
        *("http://example.org:22/", "http://example.org:0/", "http://example.org:99999/", "http://example.org:x/"),
        *("http://user@example.org/", "http://user:pw@example.org/", "http://a@b@c/", "http://example.org\\@evil/"),
        *("http://127.1/", "http://0177.0.0.1/", "http://2130706433/", "http://0x7f000001/", "http://0x7f.0.0.1/"),
        *("http://127.0.0.0x1/", "http://1.2.3/", "http://1.2.3.4.5/", "http://256.1.1.1/", "http://127.0.0.01/"),
        *("http://[fe80::1%25eth0]/", "http://[fe80::1%eth0]/", "http://[::1/", "http://[v1.x]/", "http://[x]/"),
        *("http://exam ple.org/", "http://example.org/\r\nHost: x", "http://ex\tample.org/", "http://bücher.example/"),
        *("http://①②⑦.0.0.1/", "http://a..b/", "http://-a.example/", "http://a-.example/", f"http://{'a' * 64}.b/"),
        *("http://" + "a." * 127 + "example", "http://%31%32%37.0.0.1/", "http://a%00b/", "http://a,b/"),
        "http://example.org/" + "x" * 9000,
    ],
)
def test_refused(url: str) -> None:
    """Other schemes, ports and forms are refused with one line."""
    with pytest.raises(MediaError) as found:
        parse_url(url)
    assert "\n" not in found.value.message
    assert len(found.value.message) < 300


@pytest.mark.parametrize("text", ["iVBORw0KGgo" * 1000, "example.org/cat.png", "//example.org/x"])
def test_what_has_no_scheme(text: str) -> None:
    """Bare base64 is told what it lacks, however long it is."""
    with pytest.raises(MediaError, match=r"no scheme.*data:image/png;base64"):
        parse_url(text)


def test_allowed() -> None:
    """A name allows itself, one with a star those below it."""
    allowed = AllowedDomains(["example.org", "*.cdn.example", "[2606:4700:4700::1111]"])
    for url in (
        "http://example.org/x",
        "https://a.cdn.example/x",
        "http://a.b.cdn.example/",
        "http://[2606:4700:4700::1111]/",
    ):
        allowed.check(parse_url(url))
    for url in (
        "http://www.example.org/",
        "http://cdn.example/",
        "http://evilcdn.example/",
        "http://example.org.evil/",
    ):
        with pytest.raises(MediaError, match="--allowed-media-domains"):
            allowed.check(parse_url(url))
    AllowedDomains(["*"]).check(parse_url("http://anything.example/"))
    with pytest.raises(MediaError, match=r"--allowed-media-domains example\.org"):
        AllowedDomains([]).check(parse_url("http://example.org/"))
    for url in ("http://93.184.216.34/", "http://[2606:4700:4700::1111]/"):
        with pytest.raises(MediaError, match=r"--allowed-media-domains (93\.184\.216\.34|2606:4700:4700::1111)\)"):
            AllowedDomains([]).check(parse_url(url))


@pytest.mark.parametrize("host", ["127.0.0.1", "10.0.0.1", "[::1]", "[::ffff:127.0.0.1]", "[fd00:ec2::254]"])
def test_no_flag_allows_a_private_address(host: str) -> None:
    """An address that is never fetched is refused without advice to allow it."""
    with pytest.raises(MediaError, match=r"not fetched here; send the image as a data: URL$"):
        AllowedDomains([]).check(parse_url(f"http://{host}/"))


@pytest.mark.parametrize(
    "url",
    [
        *("http://u:s3cret@example.org/", "https://s3cret@example.org/", "http://:s3cret@a@example.org/x@y"),
        *("ftp://u:s3cret@example.org/", "//u:s3cret@example.org/", "http://u:s3cret@[::1/", "http://u:s3cret@a b/"),
        f"http://u:s3cret{'x' * 80}@example.org/",
    ],
)
def test_no_password_is_repeated(url: str) -> None:
    """Whatever is wrong with a URL, its refusal shows neither user name nor password."""
    with pytest.raises(MediaError, match="…@") as found:
        parse_url(url)
    assert "s3cret" not in found.value.message
