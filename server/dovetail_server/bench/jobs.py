"""What travels between the process that drives a run and its client processes: length, then msgpack."""

from __future__ import annotations

import struct

import msgspec

LENGTH = struct.Struct("<I")


class Shot(msgspec.Struct, frozen=True, array_like=True):
    """One request: its encoded body, when to send it (seconds after the start; None: when a place is free)."""

    index: int
    body: bytes
    counts_events: bool = False
    at: float | None = None


class ClientPlan(msgspec.Struct, frozen=True, kw_only=True):
    """All that one client process does."""

    url: str
    headers: dict[str, str]
    stream: bool
    slots: int
    """Requests in flight at once, where shots do not say when they are sent."""
    timeout_s: float
    warmup: list[Shot]
    shots: list[Shot]


class Record(msgspec.Struct, array_like=True, kw_only=True):
    """What became of one request. Times are of the system's monotonic clock; 0 where it did not come to that."""

    index: int
    start: float
    end: float = 0.0
    first: float = 0.0
    last: float = 0.0
    error: str | None = None
    prompt_tokens: int = 0
    completion_tokens: int = 0
    cached_tokens: int = 0
    num_events: int = 0
    tokens_at_first: int = 0
    gaps: list[float] = []
    gap_tokens: list[int] = []


class Warm(msgspec.Struct, frozen=True, tag=True):
    """A client process is ready to start; `errors` of its warm-up."""

    errors: list[str]


class Progress(msgspec.Struct, frozen=True, tag=True):
    """How many requests have ended."""

    done: int


class ClientResult(msgspec.Struct, frozen=True, tag=True):
    """The end of a client process; `busy` is the share of one core that it used."""

    records: list[Record]
    busy: float


Report = Warm | Progress | ClientResult
encode = msgspec.msgpack.Encoder().encode


def frame(message: object) -> bytes:
    """Encode a message with its length before it."""
    data = encode(message)
    return LENGTH.pack(len(data)) + data
