"""Stop expressions: a reply ends at the first match of a regular expression, looked for after every token.

The `regex` package does the matching: it can say that a text may yet become a match, so that its beginning is held
back, and it gives up after a time, so that an expression of a request cannot hold up others.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from functools import lru_cache

import regex

from dovetail.contracts.errors import RequestError
from dovetail.sdk.formats.matcher import StopMatcher

MAX_LEN = 512
"""Characters of an expression."""
MAX_HELD = 4096
"""Characters in which a match is looked for; a longer one is not found."""
CREDIT_S = 0.02
"""Processor time that the expressions of a reply may take at once."""
EARN_S = 0.0005
"""What every piece of text adds to the credit, up to `CREDIT_S`."""
TIMEOUT_S = 0.005
"""For one look. The package's clock counts the time of every thread, so one that ran out is repeated."""


@lru_cache(maxsize=256)
def compile_stop(source: str) -> regex.Pattern[str]:
    """Compile a stop expression.

    Raises:
        RequestError: It is too long, not an expression, or matches the empty text.
    """
    why = None
    if len(source) > MAX_LEN:
        why = f"has {len(source)} characters, at most {MAX_LEN} are allowed"
    else:
        try:
            pattern = regex.compile(source)
            if pattern.match("", timeout=20 * TIMEOUT_S) is None:
                return pattern
            why = "matches the empty text, so it would end every reply at once"
        except (regex.error, TimeoutError, OverflowError) as error:
            why = f"is not a regular expression: {error}"
    raise RequestError(f"stop_regex {source[:80]!r} {why}", param="stop_regex", code="invalid_regex")


class TooSlowError(Exception):
    """An expression takes too long; the text says which."""


class Credit:
    """The processor time that a reply's expressions may take."""

    def __init__(self) -> None:
        self._left_s = CREDIT_S

    def earn(self, seconds: float = EARN_S) -> None:
        """More text came."""
        self._left_s = min(CREDIT_S, self._left_s + seconds)

    def search_all(
        self, patterns: Sequence[regex.Pattern[str]], text: str, *, partial: bool
    ) -> list[regex.Match[str] | None]:
        """Search for several at once; a match may be empty.

        Raises:
            TooSlowError: The credit is spent.
        """
        begin = time.thread_time()
        try:
            return [pattern.search(text, partial=partial, timeout=TIMEOUT_S) for pattern in patterns]
        except TimeoutError:
            return [self.search(pattern, text, partial=partial) for pattern in patterns]
        finally:
            self._left_s -= min(time.thread_time() - begin, len(patterns) * TIMEOUT_S)

    def search(self, pattern: regex.Pattern[str], text: str, *, partial: bool = False) -> regex.Match[str] | None:
        """Find the first match that is not empty.

        Raises:
            TooSlowError: The credit is spent.
        """
        while self._left_s > 0:
            begin = time.thread_time()
            try:
                matches = pattern.finditer(text, partial=partial, timeout=TIMEOUT_S)
                return next((match for match in matches if match.end() > match.start()), None)
            except TimeoutError:
                continue
            finally:
                # At most one limit a look: a garbage collection may have fallen into it.
                self._left_s -= min(time.thread_time() - begin, TIMEOUT_S)
        raise TooSlowError(f"{pattern.pattern[:80]!r} takes longer than {1000 * EARN_S:g} ms a token")


class RegexStopMatcher:
    """Cuts a text at the first match of several expressions, as `StopMatcher` does for strings.

    Attributes:
        matched: The text that matched, None before.
    """

    def __init__(self, sources: Sequence[str], *, keep_match: bool = False) -> None:
        """Prepare; `keep_match` keeps the match at the end of the text."""
        self._patterns = [compile_stop(source) for source in sources]
        self._keep_match = keep_match
        self._held = ""
        self._credit = Credit()
        self.matched: str | None = None

    def feed(self, text: str) -> str:
        """Take one token's text; return what is certain to stay. Nothing must be fed after a match.

        Raises:
            RequestError: An expression takes too long.
        """
        self._credit.earn()
        buffer = self._held + text
        found = self._search(buffer)
        if found is not None:
            self.matched, self._held = found.group(), ""
            return buffer[: found.end() if self._keep_match else found.start()]
        begins = [part.start() for pattern in self._patterns if (part := self._look(pattern, buffer, partial=True))]
        cut = max(min(begins, default=len(buffer)), len(buffer) - MAX_HELD)
        self._held = buffer[cut:]
        return buffer[:cut]

    def would_match(self, text: str) -> bool:
        """Say whether feeding `text` would find a match, without feeding it."""
        return self._search(self._held + text) is not None

    def flush(self) -> str:
        """Return what was held back and start afresh: what follows does not continue this text."""
        held, self._held = self._held, ""
        return held

    def _search(self, text: str) -> regex.Match[str] | None:
        """The match that begins first; of several that begin there, the longest."""
        found = [match for pattern in self._patterns if (match := self._look(pattern, text)) is not None]
        return min(found, key=lambda match: (match.start(), -match.end()), default=None)

    def _look(self, pattern: regex.Pattern[str], text: str, *, partial: bool = False) -> regex.Match[str] | None:
        try:
            return self._credit.search(pattern, text, partial=partial)
        except TooSlowError as error:
            why = f"stop_regex {error}; simplify it"
            raise RequestError(why, param="stop_regex", code="invalid_regex") from None


class ChainedStops:
    """Stop strings, then stop expressions in what they leave; used as `StopMatcher`."""

    def __init__(self, strings: StopMatcher, expressions: RegexStopMatcher) -> None:
        """Take over both."""
        self._strings, self._expressions = strings, expressions

    @property
    def matched(self) -> str | None:
        """What was found: an expression's match begins before the string that was found in the same text."""
        return self._expressions.matched or self._strings.matched

    def feed(self, text: str) -> str:
        """See `StopMatcher.feed`."""
        certain = self._expressions.feed(self._strings.feed(text))
        if self._strings.matched is not None and self._expressions.matched is None:
            certain += self._expressions.flush()
        return certain

    def would_match(self, text: str) -> bool:
        """See `StopMatcher.would_match`."""
        return self._strings.would_match(text) or self._expressions.would_match(text)

    def flush(self) -> str:
        """See `StopMatcher.flush`."""
        rest = self._strings.flush()
        certain = self._expressions.feed(rest) if rest else ""
        return certain + self._expressions.flush()


def make_stops(
    stop: Sequence[str], expressions: Sequence[str], *, keep_match: bool
) -> StopMatcher | RegexStopMatcher | ChainedStops | None:
    """Return what looks for the stops of a request, or None if it has none."""
    if not expressions:
        return StopMatcher(stop, keep_match=keep_match) if stop else None
    by_regex = RegexStopMatcher(expressions, keep_match=keep_match)
    return ChainedStops(StopMatcher(stop, keep_match=keep_match), by_regex) if stop else by_regex
