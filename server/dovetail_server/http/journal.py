"""What a stream has got from the engine, told beside it, so that another server can go on with it.

A gateway asks for a stream's journal by the header `x-dovetail-resume-key`. The reply's header `x-dovetail-journal` is
its identity, from which identifiers and draws follow; then, before the events that come of them, lines that clients of
server-sent events ignore, and that in a stream of JSON lines are no JSON:

    : dovetail [0,{"handle":7,"ids":[264],"prompt_tokens":11}]

each a choice and a `TokenDelta` as the engine sent it. When the server is gone, `POST /v1/resume` gives another one the
request, these lines, and the number of events that the client has. It makes the same events of the same deltas, leaves
out those, and has its engine go on behind the tokens: draws are keyed by seed and position, so they are the same, too.

The body of `/v1/resume` is one line of JSON, an `Envelope`, and behind its line feed the body of the request itself.
"""

from __future__ import annotations

import hmac
from contextvars import ContextVar

import msgspec
from pydantic import SecretStr
from starlette.datastructures import Headers, MutableHeaders
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from dovetail.base.identity import IDENTITY, Identity
from dovetail.contracts.errors import DovetailError, RequestError
from dovetail.messages import TokenDelta

KEY_HEADER = "x-dovetail-resume-key"
JOURNAL_HEADER = "x-dovetail-journal"
PATH = "/v1/resume"
PREFIX = b": dovetail "
END = b"\n\n"
ENDS = {"text/event-stream": END, "application/x-ndjson": b"\n"}
"""What ends an event, by the media type of streams that can go on elsewhere."""
MAX_JOURNAL_BYTES = 32 << 20
"""Of one stream."""
SECRET_BYTES = range(16, 65)

encode = msgspec.json.Encoder().encode


class MovedError(DovetailError):
    """The stream cannot go on here: its connection is broken off, so that the gateway takes it elsewhere."""


class Envelope(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """What another server has to know of a stream.

    Attributes:
        path: The request's.
        journal: The value of `JOURNAL_HEADER`.
        skip: Events that the client has.
        deltas: What the engine had sent, in its order: choices and deltas.
    """

    path: str
    journal: str
    skip: int
    deltas: list[tuple[int, TokenDelta]]


decode = msgspec.json.Decoder(Envelope).decode


def end_of(content_type: str) -> bytes | None:
    """Return what ends an event of a stream; None where its events have no place for a journal."""
    return ENDS.get(content_type.partition(";")[0].strip().lower())


class Journal:
    """Of one stream, on the server that makes it."""

    def __init__(self, identity: Identity, deltas: list[tuple[int, TokenDelta]] | None = None, skip: int = 0) -> None:
        """Begin, or go on behind what another server got and sent."""
        self.identity = identity
        self.is_resumed = deltas is not None
        """Another server began the stream: its client has been let in."""
        self.deltas = deltas or []
        self._skip = skip
        self._lines: list[bytes] = []
        self._has_generation = False

    @property
    def name(self) -> str:
        """The value of its header."""
        return f"{self.identity.secret.hex()}.{self.identity.began_ns}"

    def takes_generation(self) -> bool:
        """Whether a generation is the one that it is of: the first of its request."""
        is_first, self._has_generation = not self._has_generation, True
        return is_first

    def note(self, index: int, delta: TokenDelta) -> None:
        """Take down what the engine sent for a choice, before anything is made of it."""
        times, delta.times = delta.times, None
        self._lines.append(PREFIX + encode((index, delta)))
        delta.times = times

    def written(self, chunk: bytes, end: bytes = END) -> bytes:
        """Return a chunk of the stream as it is to be sent: behind its lines, and without what the client has."""
        if self._skip:
            chunk = self._without_sent(chunk, end)
        if self._lines:
            chunk = end.join((*self._lines, chunk))
            self._lines.clear()
        return chunk

    def _without_sent(self, chunk: bytes, end: bytes) -> bytes:
        *events, rest = chunk.split(end)
        left = []
        for event in events:
            if event.startswith(b":"):
                continue
            if self._skip:
                self._skip -= 1
            else:
                left.append(event + end)
        return b"".join((*left, rest))


JOURNAL: ContextVar[Journal | None] = ContextVar("dovetail_journal", default=None)
"""Of the stream that the present task makes."""


def identity_of(name: str) -> Identity | None:
    """Return the identity that a header names, or None if it names none."""
    secret, _, began = name.partition(".")
    try:
        found = Identity(bytes.fromhex(secret), int(began))
    except ValueError:
        return None
    return found if len(found.secret) in SECRET_BYTES and 0 <= found.began_ns < 1 << 63 else None


class Resumable:
    """ASGI layer behind the one that asks for keys: journals for gateways with the resume key, and `/v1/resume`."""

    def __init__(self, app: ASGIApp, key: SecretStr | None) -> None:
        """Wrap `app`; without a key there are no journals."""
        self.app = app
        self._key = None if key is None else key.get_secret_value().encode()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve one connection's request."""
        given = Headers(scope=scope).get(KEY_HEADER) if scope["type"] == "http" else None
        is_resume = scope["type"] == "http" and scope["path"] == PATH
        if (given is None and not is_resume) or (self._key is None and not is_resume):
            await self.app(scope, receive, send)
            return
        self._check(given)
        if is_resume:
            scope, receive, journal = await resumed(scope, receive)
        else:
            journal = Journal(Identity.new())
        JOURNAL.set(journal)
        IDENTITY.set(journal.identity)

        async def send_named(message: Message) -> None:
            if message["type"] == "http.response.start":
                MutableHeaders(scope=message)[JOURNAL_HEADER] = journal.name
            await send(message)

        await self.app(scope, receive, send_named)

    def _check(self, given: str | None) -> None:
        """Refuse who is no gateway of this server's.

        Raises:
            RequestError: 404 where there is none, 403 for a wrong key.
        """
        if self._key is None:
            text = f"{PATH} is for gateways, and this server has no --resume-key; give it and the gateway the same"
            raise RequestError(text, code="no_resume_key", status=404)
        if given is None or not hmac.compare_digest(self._key, given.encode("utf-8", "surrogateescape")):
            text = f"the header {KEY_HEADER} is not this server's --resume-key; give it and the gateway the same"
            raise RequestError(text, code="invalid_resume_key", status=403)


async def resumed(scope: Scope, receive: Receive) -> tuple[Scope, Receive, Journal]:
    """Read a body of `/v1/resume`; returns the request that it holds, and its journal.

    Raises:
        RequestError: It is none.
    """
    if scope["method"] != "POST":
        raise RequestError(f"{PATH} takes POST, not {scope['method']}", code="method_not_allowed", status=405)
    pieces = bytearray()
    more = True
    while more:
        message = await receive()
        if message["type"] == "http.disconnect":
            raise RequestError("the body of a resumed request ends early", code="invalid_json")
        pieces += message.get("body", b"")
        more = message.get("more_body", False)
    at = pieces.find(b"\n")
    try:
        envelope = decode(bytes(pieces[: at if at >= 0 else None]))
    except (msgspec.MsgspecError, UnicodeDecodeError) as error:
        raise RequestError(f"the first line of a resumed request: {error}", code="invalid_json") from None
    identity = identity_of(envelope.journal)
    if identity is None or envelope.skip < 0 or envelope.path == PATH or at < 0:
        raise RequestError("a resumed request needs its journal's name, its path, and its body", code="invalid_value")
    body: bytes | None = bytes(pieces[at + 1 :])
    del pieces

    async def receive_body() -> Message:
        nonlocal body
        if body is None:
            return await receive()
        message, body = {"type": "http.request", "body": body, "more_body": False}, None
        return message

    headers = [(name, value) for name, value in scope["headers"] if name != b"content-length"]
    inner = {**scope, "path": envelope.path, "raw_path": envelope.path.encode(), "headers": headers}
    return inner, receive_body, Journal(identity, envelope.deltas, envelope.skip)
