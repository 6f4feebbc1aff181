"""A reply on its way through a front: a stream goes on with another server, any other reply is held until it is whole.

The gateway gets pieces over HTTP, Ray's front over Ray's handles. Both raise `CutError` where a server's reply breaks
off. What a server writes besides events is in `dovetail_server.http.journal`. Only whole events are passed on, so that
it is known which ones the client has. A stream keeps its journal and the event that is coming: `MAX_JOURNAL_BYTES`, and
all streams and held replies together `--max-queued-bytes`; one that would be over that goes on without, and ends with
its server.
"""

from __future__ import annotations

import logging
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import AsyncGenerator, Awaitable, Callable, Iterator
from contextlib import aclosing

import msgspec

from dovetail_server.http.journal import END, MAX_JOURNAL_BYTES, PREFIX, end_of
from dovetail_server.relay.places import Places, RelayState

logger = logging.getLogger("dovetail.server")
Pieces = AsyncGenerator[bytes, None]
STILL = 2
"""Servers that a request may lose without a new token between: what ends every server is the request itself."""
MAX_EVENT_BYTES = 64 << 20
MAX_REPLY_BYTES = 32 << 20
"""Of a reply that is no stream: a larger one is sent as it comes."""


class StreamBuffer:
    """The events and the journal of one stream."""

    def __init__(self, holder: RelayState, path: str, body: bytes, ends: Callable[[Exception], bytes]) -> None:
        """Begin; `path` and `body` are those of the request, `ends` writes the end of a stream that cannot go on."""
        self.end = END
        """Of an event."""
        self.holder = holder
        self.path = path
        self._body = body
        self._ends = ends
        self.name: str | None = None
        """Of the journal; None where there is none, or no more."""
        self.rest = bytearray()
        """The beginning of an event."""
        self.num_still = 0
        """Servers that were lost without a new token between; whoever moves the stream counts them."""
        self.lines: list[bytes] = []
        self.num_events = 0
        self._num_bytes = 0

    def take(self, piece: bytes) -> bytes:
        """Add a piece; returns the events that are whole now, without the journal's lines."""
        rest = self.rest
        searched = max(0, len(rest) + 1 - len(self.end))
        rest += piece
        at = rest.rfind(self.end, searched)
        if at < 0:
            if len(rest) > MAX_EVENT_BYTES:
                self._stop_journal("one event is too large")
                events = bytes(rest)
                rest.clear()
                return events
            return b""
        whole = bytes(rest[:at])
        del rest[: at + len(self.end)]
        passed = []
        for event in whole.split(self.end):
            if event.startswith(PREFIX):
                self._note(event[len(PREFIX) :])
                continue
            self.num_events += not event.startswith(b":")
            passed.append(event)
        return self.end.join((*passed, b"")) if passed else b""

    def resume_body(self) -> bytes:
        """Return the body of `/v1/resume` with which another server goes on behind what the client has."""
        self.rest.clear()  # the beginning of an event: it is made again, whole
        head = {"path": self.path, "journal": self.name, "skip": self.num_events}
        deltas = b'"deltas":[' + b",".join(self.lines) + b"]}\n"
        return msgspec.json.encode(head)[:-1] + b"," + deltas + self._body

    def forget(self) -> None:
        """Give the journal's memory back."""
        self.holder.num_kept_bytes -= self._num_bytes
        self._num_bytes = 0
        self.lines = []

    def final_events(self, why: str) -> bytes:
        """Return the end of a stream that cannot go on, in its own way."""
        from dovetail_server.errors.catalogue import ServiceError

        error = ServiceError(f"{why}; try again", code="stream_lost", retry_after_s=1)
        return self.end + self._ends(error) if self.rest else self._ends(error)

    def _note(self, line: bytes) -> None:
        if self.name is None:
            return
        self.num_still = 0
        self.lines.append(line)
        self._num_bytes += len(line)
        self.holder.num_kept_bytes += len(line)
        if self._num_bytes > MAX_JOURNAL_BYTES:
            self._stop_journal(f"its journal is over {MAX_JOURNAL_BYTES} bytes")
        elif self.holder.num_kept_bytes > self.holder.settings.max_queued_bytes:
            self._stop_journal("what is kept of all replies is over --max-queued-bytes")

    def _stop_journal(self, why: str) -> None:
        logger.warning("A stream would end with its worker from now on: %s.", why)
        self.name = None
        self.forget()


class ResponseBuffer:
    """The pieces of a reply that is held until it is whole."""

    def __init__(self, holder: RelayState) -> None:
        """Hold nothing yet."""
        self._holder = holder
        self._pieces: deque[bytes] = deque()
        self._num_bytes = 0

    def add(self, piece: bytes) -> bool:
        """Add a piece; returns whether more may be added."""
        self._pieces.append(piece)
        self._num_bytes += len(piece)
        self._holder.num_kept_bytes += len(piece)
        is_small = self._num_bytes < MAX_REPLY_BYTES
        return is_small and self._holder.num_kept_bytes < self._holder.settings.max_queued_bytes

    def pieces(self) -> Iterator[bytes]:
        """Yield the pieces, none of which is held any more."""
        while self._pieces:
            piece = self._pieces.popleft()
            self._num_bytes -= len(piece)
            self._holder.num_kept_bytes -= len(piece)
            yield piece

    def forget(self) -> None:
        """Give the memory of what is left back."""
        self._holder.num_kept_bytes -= self._num_bytes
        self._num_bytes = 0
        self._pieces.clear()


class CutError(Exception):
    """A server's reply has broken off, or the server does not go on."""


class RelayedStream(ABC):
    """One stream, on its way from one server after the other to its client."""

    successor = "another replica"
    """What the log calls the server that goes on."""

    def __init__(self, holder: RelayState, places: Places, path: str, body: bytes, request_id: str) -> None:
        """Begin; `path` and `body` are the request's, memory is `holder`'s."""
        self.kept = StreamBuffer(holder, path, body, places.ending(path, request_id))

    @abstractmethod
    async def send(self, data: bytes) -> None:
        """Send a piece of the body to the client."""

    @abstractmethod
    def lost(self, why: str) -> str:
        """Note that the server's reply broke off; returns what the log calls the server."""

    @abstractmethod
    async def another(self) -> Pieces | str:
        """Return what another server makes behind what the client has, or why none does."""

    async def pass_on(self, pieces: Pieces, journal: str | None, media_type: str) -> None:
        """Send a stream's events, and those that other servers make where it breaks off.

        Args:
            pieces: Of the first server's body; raises `CutError`.
            journal: Its name, without which the stream cannot be moved.
            media_type: The reply's, which says how events end.
        """
        self.kept.name, self.kept.end = journal, end_of(media_type) or END
        try:
            while (why := await self._pass_pieces(pieces)) is not None:
                server = self.lost(why)
                self.kept.num_still += 1
                if self.kept.name is None or self.kept.num_still > STILL:
                    cause = "it cannot be moved" if self.kept.name is None else f"{self.kept.num_still} ended on it"
                    logger.error("A stream of %s broke off (%s), and %s.", server, why, cause)
                    await self.send(self.kept.final_events(f"the stream broke off: {why}"))
                    return
                found = await self.another()
                if isinstance(found, str):
                    await self.send(self.kept.final_events(found))
                    return
                logger.warning("Moved a stream of %s to %s: %s.", server, self.successor, why)
                pieces = found
        finally:
            self.kept.forget()

    async def _pass_pieces(self, pieces: Pieces) -> str | None:
        """Send the events of one server; returns why they broke off, None where they came to their end."""
        try:
            async with aclosing(pieces):
                async for piece in pieces:
                    if events := self.kept.take(piece):
                        await self.send(events)
        except CutError as error:
            return str(error)
        if self.kept.rest:
            await self.send(bytes(self.kept.rest))
        return None


async def pass_whole(
    holder: RelayState,
    pieces: Pieces,
    begin: Callable[[], Awaitable[None]] | None,
    send: Callable[[bytes], Awaitable[None]],
    *,
    is_held: bool,
) -> None:
    """Send a reply's body.

    Args:
        holder: Whose memory it is in.
        pieces: Of the body.
        begin: Sends the head, behind the first piece of the body; None where the client has it.
        send: Sends a piece.
        is_held: The head waits until the body is whole, or too large to be held: until then another server can be
            asked without the client's notice.
    """
    held = ResponseBuffer(holder)
    try:
        if begin is not None:
            async for piece in pieces:
                if not held.add(piece) or not is_held:
                    break
            await begin()
        for piece in held.pieces():
            await send(piece)
        async for piece in pieces:
            await send(piece)
    finally:
        held.forget()
