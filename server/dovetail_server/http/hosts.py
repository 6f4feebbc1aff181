"""Which names this server answers to, and which web pages it takes requests from.

A page may give its own name the address of this machine once it is loaded (DNS rebinding), and then asks the local
server as if it were the page's own. Only the `Host` header tells: a browser writes the page's name there. So a server
without keys that listens on this machine only answers to names of this machine, and any server to `--allowed-hosts`.
"""

from __future__ import annotations

import ipaddress
import re
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING

from starlette.types import ASGIApp, Receive, Scope, Send

from dovetail.contracts.errors import RequestError
from dovetail_server.errors.catalogue import refuse_websocket

if TYPE_CHECKING:
    from dovetail_server.settings.serve import ServeSettings

HOST = re.compile(r"(\[[0-9A-Fa-f:.]{2,45}\]|[A-Za-z0-9._-]{1,255})(?::([0-9]{1,5}))?")
DEFAULT_PORTS = {"http": ":80", "https": ":443"}
Headers = Iterable[tuple[bytes, bytes]]


def is_loopback(name: str) -> bool:
    """Tell whether a name, or an address with or without brackets, is always this machine's own."""
    if name.lower() == "localhost":
        return True
    try:
        return ipaddress.ip_address(name.strip("[]")).is_loopback
    except ValueError:
        return False


def host_of(headers: Headers, *, is_optional: bool) -> str | None:
    """Return the name in the `Host` header, in lower case and without its port.

    Args:
        headers: The request's.
        is_optional: HTTP/1.0 needs none; None is returned where there is none.

    Raises:
        RequestError: It is missing, there are several, or it is none.
    """
    found = [value for name, value in headers if name == b"host"]
    if not found and is_optional:
        return None
    if len(found) != 1:
        text = "the Host header is missing" if not found else f"there are {len(found)} Host headers; send one"
        raise RequestError(text, code="invalid_host")
    match = HOST.fullmatch(found[0].decode("latin-1").strip(" \t"))
    if match is None or int(match[2] or 0) > 65535:
        raise RequestError("the Host header is no name or address with an optional port", code="invalid_host")
    return match[1].lower().removesuffix(".")


class HostRules:
    """The names that are answered to."""

    def __init__(self, allowed: Sequence[str], *, is_limited: bool) -> None:
        """Allow names as in `--allowed-hosts`; without `is_limited`, any."""
        self.is_limited = is_limited and "*" not in allowed
        self.names = frozenset(name.lower() for name in allowed if not name.startswith("*"))
        self.suffixes = tuple(name[1:].lower() for name in allowed if name.startswith("*."))

    @classmethod
    def of(cls, settings: ServeSettings) -> HostRules:
        """Take the rules of the settings."""
        is_open = is_loopback(settings.host) and not settings.api_key
        return cls(settings.allowed_hosts, is_limited=is_open or bool(settings.allowed_hosts))

    def check(self, name: str) -> None:
        """Raise unless the server answers to a name; this machine's own are always answered to.

        Raises:
            RequestError: 403, naming the flag.
        """
        if not self.is_limited or is_loopback(name) or name in self.names or name.endswith(self.suffixes):
            return
        text = f"this server does not answer to the name {name!r}; --allowed-hosts names those that it does"
        raise RequestError(text, code="host_not_allowed", status=403)


class Hosts:
    """Rejects requests for other host names, before keys are checked."""

    def __init__(self, app: ASGIApp, rules: HostRules, exempt: frozenset[str]) -> None:
        """Wrap `app`; paths of `exempt` are answered under any name."""
        self.app = app
        self.rules = rules
        self.exempt = exempt

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve one connection's request.

        Raises:
            RequestError: The name is missing, malformed or not allowed.
        """
        if scope["type"] in ("http", "websocket"):
            try:
                name = host_of(scope["headers"], is_optional=scope.get("http_version") == "1.0")
                if name is not None and scope["path"] not in self.exempt:
                    self.rules.check(name)
            except RequestError as error:
                if scope["type"] == "http":
                    raise
                await refuse_websocket(error, scope, receive, send)
                return
        await self.app(scope, receive, send)


def is_foreign(headers: Headers, origins: frozenset[bytes]) -> bool:
    """Return whether a browser sends the request for a page of another site that is not allowed.

    A form or an image there needs no permission to send one, and a server without keys would take it for its user's.
    Browsers say what the page is to this server (`Sec-Fetch-Site`), older ones only whose it is (`Origin`). What is no
    browser sends neither.
    """
    if b"*" in origins:
        return False
    found = {name: value for name, value in headers if name in (b"sec-fetch-site", b"origin", b"host")}
    origin, site = found.get(b"origin"), found.get(b"sec-fetch-site")
    if origin in origins:
        return False
    if site is not None:
        return site not in (b"same-origin", b"none")
    return origin is not None and not _is_own(origin, found.get(b"host", b""))


def is_preflight(headers: Headers) -> bool:
    """Tell whether an OPTIONS is a browser's question whether a page may send what it wants to."""
    return {b"origin", b"access-control-request-method"} <= {name for name, _ in headers}


def _is_own(origin: bytes, host: bytes) -> bool:
    """Whether an origin is this server as the request names it; its scheme may be that of a proxy in front."""
    scheme, _, place = origin.decode("latin-1").lower().partition("://")
    port = DEFAULT_PORTS.get(scheme)
    if port is None:
        return False
    return place.removesuffix(port) == host.decode("latin-1").strip(" \t").lower().removesuffix(port)
