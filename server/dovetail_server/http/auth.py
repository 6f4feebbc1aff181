"""Who may call: keys, checked in an ASGI layer before anything else reads a request.

Everything needs a key once `--api-key` is given, but for `OPEN`; there is no list of routes that ask for one, so a new
route, a plugin's too, is closed. What a caller may do afterwards hangs on its `Caller`: whose files and batches it
sees, which requests it may abort, and whether it may use the routes of `admin_only`.
"""

from __future__ import annotations

import base64
import binascii
import re
from collections.abc import Iterable, Sequence
from contextvars import ContextVar
from dataclasses import dataclass, replace
from pathlib import Path

from pydantic import SecretStr
from starlette.requests import Request
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from dovetail.contracts.errors import RequestError
from dovetail_server import playground
from dovetail_server.errors.body import ErrorDetail
from dovetail_server.errors.catalogue import refuse_websocket, reply
from dovetail_server.http.hosts import is_foreign, is_preflight
from dovetail_server.http.origin import ORIGIN
from dovetail_server.settings.serve import ServeSettings
from dovetail_server.tenants.keys_file import KeyEntry, KeysFileWatch, Limits, key_hash
from dovetail_server.tenants.tenant import Grant, Tenant

OPEN = frozenset({"/livez", "/"})
"""What always answers without a key: that the process lives, and where its page for people is."""
PROBES = frozenset({"/readyz", "/health", "/health_generate", "/ping"})
"""What answers without a key, for probes that cannot send one; without it they tell no reasons."""
BROWSED = ("/docs", "/docs/", "/openapi.json")
"""What people open in a browser, which sends a key as a password (`Basic`) only. Nothing here changes anything."""
PLUGINS = "/x/"
"""Routes of plugins, which may have an answer of their own for pages."""
READING = frozenset({"GET", "HEAD", "OPTIONS"})
MAX_KEY_BYTES = 4096
TIMEOUT = re.compile(rb"\d{1,6}(\.\d{1,3})?")
SHARED = Grant(limits=Limits())
"""What a key of `--api-key` has beside others: it does not pass them by its `priority`."""
KEY_HEADERS = frozenset((b"x-api-key", b"api-key"))
"""Anthropic's, and that of Azure's clients."""
HOW = "send it in the header Authorization: Bearer KEY, or x-api-key: KEY"


@dataclass(frozen=True, slots=True)
class Caller:
    """Whom a request comes from.

    Attributes:
        owner: Whose files, batches and requests it may touch: derived from the key, "" without one.
        is_admin: Whether it may touch all requests.
        may_admin: Whether the admin routes are open to it.
        tenant: Its rights, limits and use.
        cache_root: Requests with different ones share no cached prefix.
    """

    owner: str
    is_admin: bool
    may_admin: bool
    tenant: Tenant
    cache_root: str = ""


NO_CALLER = Caller("", False, False, Tenant(""))
CALLER: ContextVar[Caller] = ContextVar("dovetail_caller", default=NO_CALLER)
"""The caller that the present task works for. Tasks inherit it; what works for several callers sets it itself."""


def owner_name(key: str) -> str:
    """Return the name under which the files of a key are kept: the key cannot be read back from it."""
    return owner_of(key_hash(key))


def owner_of(digest: str) -> str:
    """As `owner_name`, of a key's hash."""
    return "key-" + digest[:40]


class Keys:
    """The keys of one server, by their hashes: neither they nor the time that a look-up takes tell a key.

    What each owner uses is counted in `tenants`, also of those whose batches go on after their key is gone.
    """

    def __init__(
        self,
        users: Sequence[SecretStr] = (),
        admin: SecretStr | None = None,
        file: Path | None = None,
        *,
        isolates: bool = False,
        counts: bool = True,
    ) -> None:
        """Take the keys of users, of the admin and of a file.

        Args:
            users: Keys of `--api-key`.
            admin: Key of `--admin-api-key`.
            file: Path of `--keys-file`.
            isolates: Root each owner's cached prefixes apart.
            counts: Whether use is counted in this process. A gateway leaves it to its workers.

        Raises:
            ConfigError: The file cannot be used.
        """
        self.tenants: dict[str, Tenant] = {}
        self.counts = counts
        self._isolates = isolates
        self._users = [key_hash(key.get_secret_value()) for key in users]
        self._admin = None if admin is None else key_hash(admin.get_secret_value())
        self._has_file = file is not None
        self._callers: dict[str, Caller] = {}
        self._grants: dict[str, Grant] = {}
        self._use(())
        self.watch = None if file is None else KeysFileWatch(file, self._use)

    @classmethod
    def of(cls, settings: ServeSettings, *, counts: bool = True) -> Keys:
        """Take the keys of the settings; `counts` as for the class.

        Raises:
            ConfigError: The file of `--keys-file` cannot be used.
        """
        isolates = settings.isolate_prefix_cache == "key"
        return cls(settings.api_key, settings.admin_api_key, settings.keys_file, isolates=isolates, counts=counts)

    @property
    def num_keys(self) -> int:
        """Different keys of users and admins."""
        return len(self._callers)

    @property
    def are_needed(self) -> bool:
        """Whether nothing is open to those who have no key."""
        return bool(self._users) or self._has_file

    def _use(self, entries: Sequence[KeyEntry]) -> None:
        """Put the keys of a file in force, beside the others: a key that is in both is the file's."""
        users = [digest for digest in self._users if digest != self._admin]
        admins = {entry.digest for entry in entries if "admin" in entry.roles}
        admins |= set() if self._admin is None else {self._admin}
        is_alone = len({*users, *(entry.digest for entry in entries)}) < 2
        self._grants = {owner_of(digest): Grant() if is_alone else SHARED for digest in users}
        self._grants |= {owner_of(e.digest): Grant(name=e.name, weight=e.weight, limits=e.limits) for e in entries}
        for owner, tenant in self.tenants.items():
            tenant.take(self._grants.get(owner, Grant()))
        may_all = not admins and not self._has_file
        self._callers = {}
        for digest in {*users, *admins, *(entry.digest for entry in entries)}:
            caller = self.caller(owner_of(digest))
            self._callers[digest] = replace(caller, is_admin=digest in admins, may_admin=may_all or digest in admins)
        self._without_key = None
        if not self.are_needed:
            self._without_key = replace(self.caller(""), is_admin=self._admin is None, may_admin=self._admin is None)

    def caller(self, owner: str) -> Caller:
        """Return whom work is done for that an owner asked for before, with no further rights."""
        return Caller(owner, False, False, self.tenant(owner), (owner or "-") if self._isolates else "")

    def tenant(self, owner: str) -> Tenant:
        """Return what an owner may use and has used."""
        tenant = self.tenants.get(owner)
        if tenant is None:
            tenant = self.tenants[owner] = Tenant(owner)
            tenant.take(self._grants.get(owner, Grant()))
        return tenant

    def identify(self, presented: bytes | None) -> Caller | None:
        """Return the caller with this key; without a valid key, the caller for open access, or None."""
        if presented is not None and len(presented) <= MAX_KEY_BYTES:
            return self._callers.get(key_hash(presented.decode("latin-1")), self._without_key)
        return self._without_key


def presented_key(headers: Iterable[tuple[bytes, bytes]], *, allow_basic: bool = False) -> bytes | None:
    """Return the key that the headers carry.

    Two different keys count as none: a proxy in front of this server may have checked the other.
    """
    found: set[bytes] = set()
    for name, value in headers:
        if name in KEY_HEADERS:
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


def may_be_open() -> frozenset[str]:
    """Return the paths that some servers answer without a key."""
    return OPEN | PROBES | {"/metrics"} | playground.paths()


class Auth:
    """Rejects requests without a key, and notes in `scope["state"]` the `caller`, and the `owner` for storage."""

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
            caller = NO_CALLER
        if kind == "websocket" and is_foreign(scope["headers"], self.origins):  # which needs no permission either
            await refuse_websocket(foreign_page(), scope, receive, send)
            return
        if scope.get("method") == "OPTIONS" and is_preflight(scope["headers"]) and not path.startswith(PLUGINS):
            raise foreign_page()  # a browser asks without a key, and shows the reply to its user
        if caller is not None:
            state = scope.setdefault("state", {})
            state["caller"], state["owner"] = caller, caller.owner
            state["is_foreign"] = is_foreign(scope["headers"], self.origins)
            if state["is_foreign"] and kind == "http" and scope["method"] not in READING:
                raise foreign_page()
            CALLER.set(caller)
            if kind == "http" and (origin := ORIGIN.get()) is not None:
                origin.timeout_s = timeout_of(scope["headers"])
            sends_rates = kind == "http" and self.keys.counts and caller.tenant.has_rates
            await self.app(scope, receive, with_headers(send, caller.tenant) if sends_rates else send)
        else:
            text = "this server needs an API key: " + HOW if presented is None else "the API key is not valid: " + HOW
            if kind == "websocket":
                error = RequestError(text, code="invalid_api_key", status=401)
                await refuse_websocket(error, scope, receive, send)
                return
            detail = ErrorDetail(message=text, type="authentication_error", code="invalid_api_key")
            ask = 'Basic realm="dovetail: any name, the API key as password"' if allow_basic else "Bearer"
            await reply(401, detail, {"www-authenticate": ask})(scope, receive, send)


def timeout_of(headers: Iterable[tuple[bytes, bytes]]) -> float | None:
    """Return the seconds of the header `x-request-timeout`, None without it.

    Raises:
        RequestError: It is no number of seconds.
    """
    given = next((value for name, value in headers if name == b"x-request-timeout"), None)
    if given is None:
        return None
    if not TIMEOUT.fullmatch(given) or not float(given):
        text = "the header x-request-timeout is no number of seconds from 0.001 to 999999.999"
        raise RequestError(text, param="x-request-timeout", code="invalid_value")
    return float(given)


def with_headers(send: Send, tenant: Tenant) -> Send:
    """Return what sends a reply with its caller's rate limits."""

    async def send_rates(message: Message) -> None:
        if message["type"] == "http.response.start":
            message["headers"] = [*message.get("headers", ()), *tenant.headers()]
        await send(message)

    return send_rates


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
