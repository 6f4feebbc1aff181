"""Which addresses images may be fetched from: URLs of allowed hosts, and of those only public addresses.

A URL is taken apart once, here; what is fetched is built from these parts. So no two parsers read one address.
"""

from __future__ import annotations

import ipaddress
import re
from collections.abc import Sequence
from dataclasses import dataclass
from urllib.parse import urlsplit

from dovetail_server.media.refusals import MediaError, shown

MAX_URL = 8192
"""Characters of an address."""
PORTS = {"http": 80, "https": 443}
_SCHEME = re.compile(r"[A-Za-z][A-Za-z0-9+.-]*:")
_PRINTABLE = re.compile(r"[!-~]+")
_LABEL = re.compile(r"[a-z0-9_]([a-z0-9_-]{0,61}[a-z0-9_])?")
_CARRIERS = tuple(
    ipaddress.IPv6Network(net)
    for net in ("::/96", "::ffff:0:0/96", "::ffff:0:0:0/96", "64:ff9b::/96", "64:ff9b:1::/48", "2002::/16", "2001::/32")
)
"""IPv6 that stands for an IPv4 address: compatible, mapped, translated, NAT64 (both), 6to4, Teredo."""
_ISATAP = (0x00005EFE, 0x02005EFE)
_RESERVED = tuple(map(ipaddress.ip_network, ("192.0.0.0/24", "168.63.129.16/32", "192.88.99.0/24", "3fff::/20")))
"""No host of the Internet, though `is_global`: protocol assignments, Azure's own, 6to4 relays, RFC 9637's examples."""
Address = ipaddress.IPv4Address | ipaddress.IPv6Address


@dataclass(frozen=True, slots=True)
class MediaUrl:
    """An `http` or `https` URL, taken apart: the host in lower case, and path with query as sent."""

    scheme: str
    host: str
    target: str

    @property
    def port(self) -> int:
        """The scheme's own."""
        return PORTS[self.scheme]


def parse_url(url: str) -> MediaUrl:
    """Take a URL apart.

    Raises:
        MediaError: It is not one that is fetched.
    """
    if not _SCHEME.match(url):
        why = "has no scheme; send one such as https://example.org/cat.png, or base64 as data:image/png;base64,…"
        raise _invalid(f"{shown(url)} {why}")
    if len(url) > MAX_URL:
        raise _invalid(f"the address has {len(url)} characters; at most {MAX_URL} are possible; send a shorter one")
    if not _PRINTABLE.fullmatch(url) or "\\" in url:
        raise _invalid(f"{shown(url)} is no URL: write other characters than ASCII, spaces and \\ percent-encoded")
    try:
        parts = urlsplit(url)
        host, port = parts.hostname or "", parts.port
    except ValueError:
        raise _invalid(f"{shown(url)} is no URL; send one such as https://example.org/cat.png") from None
    scheme = parts.scheme.lower()
    if scheme not in PORTS:
        # Of `data:` and `file:`, only those come here that a URL is redirected to.
        possible = "http, https" if scheme in ("data", "file") else "data, http, https, file"
        raise _invalid(f"{shown(url)} has the scheme {shown(scheme)}; possible: {possible}")
    if "@" in parts.netloc:
        raise _invalid(f"{shown(url)} holds a user name or password; send the URL without them, or the image as data:")
    if port not in (None, PORTS[scheme]):
        raise _invalid(f"{shown(url)} names port {port}; possible: {PORTS[scheme]} for {scheme}; leave the port out")
    path = parts.path or "/"
    return MediaUrl(scheme, _host(host, url), f"{path}?{parts.query}" if parts.query else path)


def _host(host: str, url: str) -> str:
    """Return a host's name or address, checked.

    Systems read `0x7f.1`, `017700000001` and `2130706433` as IPv4 addresses, so a last part that looks like a number
    has to belong to an address as everybody writes it.
    """
    text = host.lower().removesuffix(".")
    if ":" in text or "[" in url.split("://", 1)[-1].split("/", 1)[0]:
        if "%" in text:
            raise _invalid(f"{shown(url)} names an IPv6 zone; send the URL without it")
        try:
            return str(ipaddress.IPv6Address(text))
        except ValueError:
            raise _invalid(f"{shown(url)} has no valid IPv6 address; send the host's name") from None
    labels = text.split(".")
    if re.fullmatch(r"[0-9]+|0x[0-9a-f]*", labels[-1]):
        try:
            return str(ipaddress.IPv4Address(text))
        except ValueError:
            raise _invalid(f"{shown(url)} has no IPv4 address of four decimal parts; send the host's name") from None
    if len(text) > 253 or not all(map(_LABEL.fullmatch, labels)):
        raise _invalid(f"{shown(url)} has no valid host name; send one such as example.org (IDNA: xn--…)")
    return text


def _invalid(message: str) -> MediaError:
    return MediaError(message, "invalid_image_url")


class AllowedDomains:
    """Hosts that images may be fetched from, as `--allowed-media-domains` has them."""

    def __init__(self, names: Sequence[str]) -> None:
        """Take names: `example.org` is that host alone, `*.example.org` those below it, `*` any."""
        self._any = "*" in names
        self._names = frozenset(name.lower().strip("[]") for name in names if not name.startswith("*"))
        self._suffixes = tuple(name[1:].lower() for name in names if name.startswith("*."))

    def __bool__(self) -> bool:
        """Whether anything is fetched at all."""
        return bool(self._any or self._names or self._suffixes)

    def check(self, url: MediaUrl) -> None:
        """Refuse a host that is not allowed.

        Raises:
            MediaError: It names the flag.
        """
        if not self:
            text = f"{url.scheme}:// addresses are not fetched here; send the image as a data: URL"
            if is_public(url.host) or not _is_address(url.host):
                text += f", or have the operator allow the host (--allowed-media-domains {url.host})"
        elif self._any or url.host in self._names or (self._suffixes and url.host.endswith(self._suffixes)):
            return
        else:
            text = (
                f"images are not fetched from {shown(url.host)}; possible: hosts that the operator allows "
                "(--allowed-media-domains); send the image as a data: URL"
            )
        raise MediaError(text, "invalid_image_url")


def _is_address(host: str) -> bool:
    return ":" in host or host.replace(".", "").isdigit()  # `parse_url` refuses names whose last part is a number


def is_public(address: str) -> bool:
    """Tell whether a resolved address is one of the public Internet, of no form that hides another address.

    Args:
        address: As `getaddrinfo` returns it; with a zone it is link-local.
    """
    try:
        found = ipaddress.ip_address(address)
    except ValueError:
        return False
    if not found.is_global or found.is_multicast or found.is_reserved:
        return False
    if any(found in net for net in _RESERVED):
        return False
    if isinstance(found, ipaddress.IPv4Address):
        return True
    if found.scope_id is not None or found.is_site_local or any(found in net for net in _CARRIERS):
        return False
    return (int(found) >> 32) & 0xFFFFFFFF not in _ISATAP
