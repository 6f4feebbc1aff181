"""Who may call: keys, checked in an ASGI layer before anything else reads a request.

Everything needs a key once `--api-key` is given, but for `OPEN`; there is no list of routes that ask for one, so a new
route, a plugin's too, is closed. What a caller may do afterwards hangs on its `Caller`: whose files and batches it
sees, which requests it may abort, and whether it may use the routes of `admin_only`.
"""

from __future__ import annotations

import base64
import binascii
import hashlib
import hmac
from collections.abc import Iterable, Sequence
from contextvars import ContextVar
from dataclasses import dataclass

from pydantic import SecretStr
from starlette.requests import Request
from starlette.types import ASGIApp, Receive, Scope, Send

from dovetail.errors import RequestError
from dovetail_server import playground
from dovetail_server.errors import reply
from dovetail_server.hosts import is_foreign
from dovetail_server.openai.errors import ErrorDetail
from dovetail_server.settings import ServeSettings

OPEN = frozenset({"/livez", "/"})
"""What always answers without a key: that the process lives, and where its page for people is."""
PROBES = frozenset({"/readyz", "/health", "/health_generate", "/ping"})
"""What answers without a key, for probes that cannot send one; without it they tell no reasons."""
BROWSED = ("/docs", "/docs/", "/openapi.json")
"""What people open in a browser, which sends a key as a password (`Basic`) only. Nothing here changes anything."""
READING = frozenset({"GET", "HEAD", "OPTIONS"})
MAX_KEY_BYTES = 4096
HOW = "send it in the header Authorization: Bearer KEY, or x-api-key: KEY"


@dataclass(frozen=True, slots=True)
class Caller:
    """Whom a request comes from.

    Attributes:
        owner: Whose files, batches and requests it may touch: derived from the key, "" without one.
        is_admin: Whether it may touch everybody's requests.
        may_admin: Whether the admin routes are open to it.
    """

    owner: str
    is_admin: bool
    may_admin: bool


NOBODY = Caller("", False, False)
CALLER: ContextVar[Caller] = ContextVar("dovetail_caller", default=NOBODY)
"""The caller that the present task works for. Tasks inherit it; what works for several callers sets it itself."""


def owner_name(key: str) -> str:
    """Return the name under which the files of a key are kept: the key cannot be read back from it."""
    return "key-" + hashlib.sha256(b"dovetail-owner:" + key.encode()).hexdigest()[:40]


def run_as(owner: str) -> None:
    """Let the present task work for an owner, with no further rights."""
    CALLER.set(Caller(owner, False, False))


@dataclass(frozen=True, slots=True)
class _Key:
    digest: bytes
    caller: Caller


class Keys:
    """The keys of one server. Only their SHA-256 is kept, and compared in constant time."""

    def __init__(self, users: Sequence[SecretStr] = (), admin: SecretStr | None = None) -> None:
        """Take the keys of users and, if there is one, of the admin."""
        self._keys = [_key(key.get_secret_value(), is_admin=False, may_admin=admin is None) for key in users]
        if admin is not None:
            self._keys.append(_key(admin.get_secret_value(), is_admin=True, may_admin=True))
        self._without_key = None if users else Caller("", admin is None, admin is None)

    @classmethod
    def of(cls, settings: ServeSettings) -> Keys:
        """Take the keys of the settings."""
        return cls(settings.api_key, settings.admin_api_key)

    def identify(self, presented: bytes | None) -> Caller | None:
        """Return the caller with this key; without a right one, what is open to everybody, or None."""
        found = self._without_key
        if presented is not None and len(presented) <= MAX_KEY_BYTES:
            digest = hashlib.sha256(presented).digest()
            for key in self._keys:  # all of them, so that the time does not tell which one it was
                if hmac.compare_digest(key.digest, digest):
                    found = key.caller
        return found


def _key(key: str, *, is_admin: bool, may_admin: bool) -> _Key:
    return _Key(hashlib.sha256(key.encode()).digest(), Caller(owner_name(key), is_admin, may_admin))


def presented_key(headers: Iterable[tuple[bytes, bytes]], *, allow_basic: bool = False) -> bytes | None:
    """Return the key that the headers carry.

    Two different ones are none: whoever stands in front of this server may have looked at the other.
    """
    found: set[bytes] = set()
    for name, value in headers:
        if name == b"x-api-key":
            found.add(value.strip())
        elif name == b"authorization":
            scheme, _, rest = value.strip().partition(b" ")
            if scheme.lower() == b"bearer":
                found.add(rest.strip())
            else:
                found.add(_password(rest) if allow_basic and scheme.lower() == b"basic" else b"")
    return found.pop() if len(found) == 1 else None


def _password(credentials: bytes) -> bytes:
    try:
        return base64.b64decode(credentials.strip(), validate=True).partition(b":")[2]
    except binascii.Error:
        return b""


def open_paths(settings: ServeSettings) -> frozenset[str]:
    """Return the paths that answer without a key."""
    probes = frozenset() if settings.closed_probes else PROBES
    metrics = frozenset({"/metrics"}) if settings.open_metrics else frozenset()
    return OPEN | probes | metrics | (frozenset() if settings.disable_playground else playground.paths())


class Auth:
    """Lets nobody pass without a key, and notes who it is in `scope["state"]`: `caller`, and `owner` for storage."""

    def __init__(
        self, app: ASGIApp, keys: Keys, origins: Sequence[str] = (), open_paths: frozenset[str] = OPEN
    ) -> None:
        """Wrap `app`; pages of `origins` may use it, "*" for all. `open_paths` need no key."""
        self.app = app
        self.keys = keys
        self.open_paths = open_paths
        self.origins = frozenset(origin.encode() for origin in origins)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve one connection's request."""
        kind = scope["type"]
        if kind == "lifespan":
            await self.app(scope, receive, send)
            return
        path = scope["path"]  # decoded, and what the router goes by: there is no second reading of it
        is_browsed = path == BROWSED[0] or path == BROWSED[2] or path.startswith(BROWSED[1])
        allow_basic = is_browsed and scope.get("method") in ("GET", "HEAD")
        presented = presented_key(scope["headers"], allow_basic=allow_basic)
        caller = self.keys.identify(presented)
        if caller is None and path in self.open_paths:
            caller = NOBODY
        if kind == "websocket" and is_foreign(scope["headers"], self.origins):
            caller = None
        if caller is not None:
            state = scope.setdefault("state", {})
            state["caller"], state["owner"] = caller, caller.owner
            state["is_foreign"] = is_foreign(scope["headers"], self.origins)
            if state["is_foreign"] and kind == "http" and scope["method"] not in READING:
                raise foreign_page()
            CALLER.set(caller)
            await self.app(scope, receive, send)
        elif kind == "websocket":  # also those of other sites' pages, which need no permission either
            await send({"type": "websocket.close", "code": 1008, "reason": "invalid_api_key"})
        else:
            text = "this server needs an API key: " + HOW if presented is None else "the API key is not valid: " + HOW
            detail = ErrorDetail(message=text, type="authentication_error", code="invalid_api_key")
            ask = 'Basic realm="dovetail: any name, the API key as password"' if allow_basic else "Bearer"
            await reply(401, detail, {"www-authenticate": ask})(scope, receive, send)


def foreign_page() -> RequestError:
    """Return the error for such a request."""
    text = "a page of another site sent this (its header Origin); --allow-origins names the sites that may"
    return RequestError(text, code="origin_not_allowed", status=403)


def check_admin(caller: Caller) -> None:
    """Raise unless the caller may use admin routes.

    Raises:
        RequestError: 403, or 401 without any key.
    """
    if caller.may_admin:
        return
    if not caller.owner:
        raise RequestError("this route needs the admin's API key: " + HOW, code="invalid_api_key", status=401)
    text = "this route needs the admin's API key (--admin-api-key), not that of a user"
    raise RequestError(text, code="admin_key_required", status=403)


async def admin_only(request: Request) -> None:
    """FastAPI dependency of the routes that need the admin's key where there is one, and are never a page's to call."""
    check_admin(request.scope["state"]["caller"])
    if request.scope["state"]["is_foreign"]:
        raise foreign_page()
