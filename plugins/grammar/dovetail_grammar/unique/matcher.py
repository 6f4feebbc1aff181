"""`UniqueGrammar`: another grammar's texts, but for those in which an array repeats an item that it must not.

Of what the other grammar allows, the mask leaves out tokens that would end an item equal to an earlier one, and those
after which every way leads there: the item goes on otherwise, or the array ends. Only where the text so far begins an
earlier item, too, is there anything to look at.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any

import numpy as np

from dovetail.contracts.grammar import CompiledGrammar, GrammarMatcher
from dovetail.sdk.masks import Words, clear_bit, has_bit, ids_of
from dovetail_grammar.unique.locations import shape_of
from dovetail_grammar.unique.scan import Mode, Scan, ScanFrame
from dovetail_grammar.unique.tags import TaggedScan, tags_of
from dovetail_grammar.unique.tokens import SPACE, TokenTexts

MAX_LISTED = 512
"""So many allowed tokens are looked at one by one."""
MAX_NEAR = 4096
"""Earlier items that are compared with what goes on."""
NUM_WIDE = 64
"""Ways to go on that are many: more than earlier items that begin alike."""
MAX_TRIES = 200
"""Masks that one search for a way may take."""
NUM_STATES = 32
"""States that are kept to go back to; behind them the text is read again."""
NUM_BYTES = 16
"""Length of a token that ends a string and what it stands in."""
REPEATED = "an item of an array that must differ from the others repeats one"


class UniqueGrammar:
    """A compiled grammar, and where in its texts items differ."""

    def __init__(self, inner: CompiledGrammar, watched: Mapping[str, Any] | Sequence[Any], texts: TokenTexts) -> None:
        """Keep what `unique_places` returned of a schema, or `watched_tags` of a structural grammar."""
        self.inner = inner
        if isinstance(watched, Mapping):
            self._start: Callable[[], Scan] = partial(Scan, shape_of(watched))
        else:
            self._start = partial(TaggedScan, tags_of(watched))
        self._texts = texts

    @property
    def num_bytes(self) -> int:
        """The other grammar's."""
        return self.inner.num_bytes

    def matcher(self) -> UniqueMatcher:
        """Return a matcher at the start."""
        return UniqueMatcher(self.inner.matcher(), self._start, self._texts)


class UniqueMatcher:
    """One request's state: the other grammar's, and what was read."""

    def __init__(self, inner: GrammarMatcher, start: Callable[[], Scan], texts: TokenTexts) -> None:
        self.inner = inner
        self._start = start
        self._texts = texts
        self._error: str | None = None
        self._ids: list[int] = []
        self._scan = start()
        self._before: deque[tuple[Scan, dict[int, int]]] = deque(maxlen=NUM_STATES)
        self._banned: set[int] = set()

    @property
    def terminated(self) -> bool:
        """An end has been accepted."""
        return self.inner.terminated

    @property
    def accepting(self) -> bool:
        """The text is complete; a number alone ends with it."""
        return self.inner.accepting

    @property
    def error(self) -> str | None:
        """The other grammar's, or that there is no way on without repeating an item."""
        return self._error or self.inner.error

    def fill(self, mask: Words, row: int) -> bool:
        """Fill the other grammar's mask, and narrow it."""
        written = self.inner.fill(mask, row)
        if written:
            self.narrow(mask[row])
        return written

    def accept(self, token_ids: Sequence[int]) -> int:
        """Advance; a token that ends a repeated item is refused."""
        for count, token_id in enumerate(token_ids):
            if self.inner.accept([token_id]) != 1:
                return count
            scan = self._scan
            if not self.inner.terminated:
                scan = scan.copy()
                scan.feed(self._text_of(token_id))
            if scan.repeats:
                self.inner.rollback(1)
                if token_id not in self._banned:
                    self._error = REPEATED  # no mask had foreseen it
                return count
            self._before.append((self._scan, self._scan.num_items()))
            self._scan = scan
            self._ids.append(token_id)
            self._banned = set()
        return len(token_ids)

    def rollback(self, num_tokens: int) -> None:
        """Go back to a state that is kept, or read the text again."""
        if not num_tokens:
            return
        self.inner.rollback(num_tokens)
        del self._ids[len(self._ids) - num_tokens :]
        self._banned, self._error = set(), None
        if num_tokens > len(self._before):
            self._before.clear()
            self._scan = self._start()
            self._scan.feed(b"".join(map(self._text_of, self._ids)))
            return
        for _ in range(num_tokens):
            scan, num_items = self._before.pop()
        self._scan = scan.copy()
        self._scan.own(num_items)
        self._before.clear()  # older states hold the same items

    def forced(self) -> list[int]:
        """Return what the other grammar forces, up to where an item would be repeated."""
        forced = self.inner.forced()
        if not forced or not self._scan.is_watched:
            return forced
        scan = self._scan.copy(is_trial=True)
        for place, token_id in enumerate(forced):
            scan.feed(self._text_of(token_id))
            if scan.repeats:
                return forced[:place]
        return forced

    def fork(self) -> UniqueMatcher:
        """Copy."""
        made = UniqueMatcher(self.inner.fork(), self._start, self._texts)
        made._ids, made._error = self._ids[:], self._error
        made._scan = self._scan.copy()
        made._scan.own(made._scan.num_items())
        return made

    def narrow(self, row: Words) -> None:
        """Take tokens out of a row that the other grammar has filled."""
        self._banned = set()
        scan = self._scan
        if not scan.is_watched or self.inner.terminated:
            return
        self._note_continuations(row)
        search = _MaskSearch(self._texts, self.inner)
        found: dict[bytes, bool] = {}
        for token_id in {*self._candidates(row), *self._zeros()}:
            if not has_bit(row, token_id):
                continue
            text = _effect(self._texts.tokens[token_id], scan.mode)
            if text and text not in found:
                found[text] = search.may_take(scan, token_id)
            if text and not found[text]:
                clear_bit(row, token_id)
                self._banned.add(token_id)
        if self._banned and not row.any():
            self._error = REPEATED

    def _note_continuations(self, row: Words) -> None:
        """Remember where there are many ways to go on: what follows earlier items cannot be all of them."""
        if self._scan.mode is Mode.STRING and len(self._texts.bytes_in(row)) >= NUM_WIDE:
            self._scan.wide = len(self._scan.text)

    def _candidates(self, row: Words) -> Iterator[int]:
        """Yield tokens of a row that may end in a repeated item."""
        scan, texts = self._scan, self._texts
        if int(np.bitwise_count(row.view(np.uint32)).sum()) <= MAX_LISTED:
            yield from texts.ending(row, {byte for frame, text in scan.items() for byte in frame.next_bytes(text)})
            return
        if scan.mode is Mode.STRING:
            yield from self._in_string(row)
        for frame, text in scan.items():
            if frame.items is None:
                continue
            for place in frame.items.beginning(text)[:MAX_NEAR]:
                item = frame.items.sorted[place]
                rest = _up_to_quote(item[len(text) :], in_string=scan.mode is Mode.STRING)
                least = frame.items.wide[item] - len(text) if _is_wide(frame, item) else 0
                if rest:
                    yield from texts.like(rest, max(0, least), spaced=scan.mode is not Mode.STRING)

    def _zeros(self) -> Sequence[int]:
        """Return tokens that may write `-0`, which is the 0 of an earlier item."""
        scan = self._scan
        is_signed = scan.mode is Mode.PLAIN and scan.text.endswith(b"-")
        return self._texts.zeros if is_signed or (scan.mode is Mode.VALUE and scan.is_near()) else ()

    def _in_string(self, row: Words) -> Iterator[int]:
        """Yield tokens that end a string and more, unless they can be known to do no harm."""
        frame = self._scan.frame
        if frame is None:
            return
        if frame.items is not None:
            if not any(frame.items.wide.values()):  # else there are always other strings to begin
                yield from ids_of(row & self._texts.across)
        elif any(_may_end(frame, text) for frame, text in self._scan.items()):
            yield from ids_of(row & self._texts.end)

    def _text_of(self, token_id: int) -> bytes:
        texts = self._texts
        return (texts.tokens[token_id] if token_id < len(texts.tokens) else b"") or texts.markers.get(token_id, b"")


class _MaskSearch:
    """Whether a token leaves a way on."""

    def __init__(self, texts: TokenTexts, inner: GrammarMatcher) -> None:
        self._texts = texts
        self._inner = inner
        self._tries = 0
        self._row = np.zeros((1, texts.mask_words), dtype=np.int32)
        self._known: dict[tuple[bytes, Mode], bool] = {}

    def may_take(self, scan: Scan, token_id: int) -> bool:
        """Try a token out."""
        trial = scan.copy(is_trial=True)
        trial.feed(self._texts.tokens[token_id])
        if trial.repeats:
            return False
        if not trial.is_zero() and all(_has_continuation(frame, text) for frame, text in trial.items()):
            return True
        key = trial.text, trial.mode
        if key not in self._known:
            fork = self._inner.fork()
            self._known[key] = fork.accept([token_id]) != 1 or self._goes_on(fork, trial)
        return self._known[key]

    def _goes_on(self, matcher: GrammarMatcher, scan: Scan) -> bool:
        """Look for bytes, or forced tokens, that lead away from earlier items.

        What is found is remembered with the items. Without time or all bytes for the search there is a way.
        """
        texts = self._texts
        if self._tries >= MAX_TRIES or not texts.has_all_bytes:
            return True
        self._tries += 1
        if not matcher.fill(self._row, 0):
            return True
        near = []
        for token_id in texts.next_tokens(self._row[0]):
            text = texts.tokens[token_id]
            if text in SPACE and scan.mode is not Mode.STRING:
                continue
            trial = scan.copy(is_trial=True)
            trial.feed(text)
            if trial.repeats:
                continue
            if not trial.is_near():
                _remember(scan, trial)
                return True
            near.append((token_id, trial))
        for token_id, trial in near:
            fork = matcher.fork()
            if fork.accept([token_id]) == 1 and self._goes_on(fork, trial):
                _remember(scan, trial)
                return True
        return False


def _effect(token: bytes, mode: Mode) -> bytes:
    """Return the same for tokens that do the same: outside of strings, whitespace at most ends a number."""
    if mode is Mode.STRING:
        return token
    text = token.lstrip(SPACE) if b'"' in token else token.translate(None, SPACE)
    return b" " + text if mode is Mode.PLAIN and token[0] in SPACE else text


def _is_wide(frame: ScanFrame, item: bytes) -> bool:
    """Whether more ways went on from within an item than there are items that begin so."""
    items = frame.items
    return items is not None and len(items.beginning(item[: items.wide[item]])) + len(frame.tried) < NUM_WIDE


def _has_continuation(frame: ScanFrame, text: bytes) -> bool:
    """Whether an item that begins like this is known to have a way to become none of the earlier ones."""
    if frame.items is None or not frame.is_near(text):
        return True
    continuation = frame.items.continuations.get(text)
    if continuation is not None and not frame.is_near(continuation):
        return True
    for place in frame.items.beginning(text)[:NUM_WIDE]:
        item = frame.items.sorted[place]
        if frame.items.wide[item] >= max(1, len(text)) and _is_wide(frame, item):
            return True
    return False


def _remember(scan: Scan, trial: Scan) -> None:
    """Note how items go on, where the trial is still within them."""
    continuations = {frame.depth: text for frame, text in trial.items()}
    for frame, text in scan.items():
        continuation = continuations.get(frame.depth)
        if frame.items is None or frame.items.is_mixed:
            continue
        if continuation is not None and continuation.startswith(text) and len(continuation) > len(text):
            frame.items.continuations[text] = frame.items.continuations.get(continuation, continuation)


def _may_end(frame: ScanFrame, text: bytes) -> bool:
    """Whether a few bytes more could make an item as long as an earlier one, in another order of keys."""
    return frame.items is not None and any(len(text) + more in frame.items.lengths for more in range(1, NUM_BYTES))


def _up_to_quote(rest: bytes, *, in_string: bool) -> bytes:
    """Return how an item goes on, in a string up to its end: what stands behind it may be spaced."""
    if not in_string and rest[:1] != b'"':
        return rest[:1]
    at = 0 if in_string else 1
    while at < len(rest) and rest[at] != 0x22:
        at += 2 if rest[at] == 0x5C else 1
    return rest[: at + 1]
