"""Reads a stream of server-sent events with as little work per event as gives exact counts.

At tens of thousands of events a second, decoding each would make the client the slowest part. The events that matter
in detail are the first ones, until a token is there, and the last ones. Those between are counted by their ends; that
they are ordinary is known by each carrying `"finish_reason":null`, which cannot occur inside a JSON string unescaped.
"""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from typing import Any

from dovetail_server.bench.wire import UsageCounts, counts_of, error_of, has_tokens, is_finish

PLAIN = (b'"finish_reason":null', b'"finish_reason": null')
COUNT = b'"completion_tokens":'
DONE = b"[DONE]"


@dataclass(slots=True)
class StreamScan:
    """One stream. Times are whatever clock `feed` is given; all events of one read share a time.

    Attributes:
        counts_events: The server was asked to say in every event how many tokens there are so far.
        first: When the first token came; 0 before.
        last: When the last token came.
        tokens_at_first: Tokens that came at `first`; where events are not counted, the events.
        num_events: Events that brought tokens.
        gaps: Seconds between events that brought tokens, if they are counted.
        gap_tokens: How many tokens came after each gap.
    """

    counts_events: bool
    first: float = 0.0
    last: float = 0.0
    tokens_at_first: int = 0
    num_events: int = 0
    gaps: list[float] = field(default_factory=list)
    gap_tokens: list[int] = field(default_factory=list)
    counts: UsageCounts | None = None
    error: str | None = None
    is_done: bool = False
    _tokens: int = 0
    _pending: bytes = b""
    _end: bytes = b"\n\n"
    _plain: bytes = PLAIN[0]

    def feed(self, data: bytes, now: float) -> None:
        """Take what was read at `now`, however it is cut."""
        if self._pending:
            data, self._pending = self._pending + data, b""
        end = self._end
        if not data.endswith(end):
            if not self.first and b"\r\n\r\n" in data:
                self._end = end = b"\r\n\r\n"
            cut = data.rfind(end)
            if cut < 0:
                self._pending = data
                return
            data, self._pending = data[: cut + len(end)], data[cut + len(end) :]
        num = data.count(end)
        if self.first and data.count(self._plain) == num:
            self._arrive(num, self._tokens_so_far(data), now)
        elif num:
            self._read(data.split(end), now)

    def _tokens_so_far(self, data: bytes) -> int:
        """Find the last count in the events; without one, what was known."""
        if not self.counts_events:
            return self._tokens
        start = data.rfind(COUNT)
        if start < 0:
            return self._tokens
        digits = data[start + len(COUNT) : start + len(COUNT) + 12].lstrip()
        stop = next((i for i, byte in enumerate(digits) if not 48 <= byte <= 57), len(digits))
        return int(digits[:stop] or self._tokens)

    def _arrive(self, num_events: int, tokens: int, now: float) -> None:
        if not self.first:
            self.first = self.last = now
            self.tokens_at_first = tokens or num_events
        elif self.counts_events and tokens > self._tokens:
            self.gaps.append(now - self.last)
            self.gap_tokens.append(tokens - self._tokens)
        self.num_events += num_events
        self._tokens = tokens
        self.last = now

    def _read(self, events: list[bytes], now: float) -> None:
        """Decode events one by one."""
        num, tokens, ended = 0, self._tokens, False
        for raw in events:
            text = b"".join(line[5:].strip() for line in raw.splitlines() if line.startswith(b"data:"))
            if not text:
                continue
            if text == DONE:
                self.is_done = True
                continue
            if PLAIN[1] in text:
                self._plain = PLAIN[1]
            event = _decode(text)
            if not isinstance(event, dict) or (problem := error_of(event)) is not None:
                self.error = problem if isinstance(event, dict) else f"an event that is no JSON object: {text[:80]!r}"
                continue
            self.counts = counts_of(event) or self.counts
            if self.counts_events and self.counts is not None:
                tokens = max(tokens, self.counts.completion)
            num += has_tokens(event) or (is_finish(event) and tokens > self._tokens and not num)
            ended = ended or is_finish(event)
        if num:
            self._arrive(num, tokens, now)
        elif ended and self.first:
            self.last = now
        elif ended:
            self._arrive(1, tokens, now)

    def close(self) -> str | None:
        """Say why the stream counts as failed, None if it does not."""
        if self.error is not None:
            return self.error
        if self.counts is None:
            return "the stream ended without usage" if not self.is_done else "the server reports no usage"
        if self.counts.completion and not self.first:
            return "the stream ended without a token"
        return None


def _decode(text: bytes) -> Any:
    try:
        return json.loads(text)
    except ValueError:
        return None
