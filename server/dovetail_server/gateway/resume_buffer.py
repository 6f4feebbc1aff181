"""What is kept of a reply while it is relayed, so that another server can go on or be asked again.

Of a stream that is its journal, told from its events; any other reply is held as a whole where it is not too large.

What a server writes besides events is in `dovetail_server.http.journal`. Only whole events are passed on, so that it is
known which ones the client has. A stream keeps its journal and the event that is coming: `MAX_JOURNAL_BYTES`, and all
streams and held replies together `--max-queued-bytes`; one that would be over that goes on without, and ends with its
server.
"""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Protocol

import msgspec

from dovetail_server.http.journal import END, MAX_JOURNAL_BYTES, PREFIX

if TYPE_CHECKING:
    from dovetail_server.settings import ServeSettings

logger = logging.getLogger("dovetail.server")
MAX_EVENT_BYTES = 64 << 20
MAX_REPLY_BYTES = 32 << 20
"""Of a reply that is no stream: a larger one is sent as it comes."""


class Holder(Protocol):
    """Whose memory all journals and held replies are in."""

    num_kept_bytes: int
    """Of the journals of all streams, and of the replies that are held."""

    @property
    def settings(self) -> ServeSettings:
        """With `max_queued_bytes`."""


class StreamBuffer:
    """The events and the journal of one stream."""

    def __init__(self, holder: Holder, path: str, body: bytes, ends: Callable[[Exception], bytes]) -> None:
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
        from dovetail_server.errors import ServiceError

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

    def __init__(self, holder: Holder) -> None:
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
