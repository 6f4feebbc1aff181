"""Tokens of a vocabulary by their text, to find those that go on like an earlier item without looking at all."""

from __future__ import annotations

import re
from bisect import bisect_left
from collections.abc import Iterable, Iterator, Sequence

import numpy as np
from numpy.typing import NDArray

from dovetail.contracts.grammar import Vocabulary
from dovetail.sdk.masks import Words, ids_of, new_row

SPACE = b" \t\r\n"
_ACROSS = re.compile(rb'"\s*,\s*\S')
_END = re.compile(rb'"\s*[\]}]')
_CLOSING = re.compile(rb'[",\]}\s]')
_ZERO = re.compile(rb"(?:-|^)0(?![0-9.eE])")
_NEEDED = (*range(0x20, 0x7F), *range(0x80, 0xC0), *range(0xC2, 0xF5))
"""Bytes that JSON's strings are made of."""


class TokenTexts:
    """One per vocabulary.

    Attributes:
        tokens: Bytes by id.
        markers: Texts of added tokens, by id.
        mask_words: W.
        across: A row of the tokens that may end a string and begin another item.
        end: A row of the tokens that may end a string and what it stands in.
        zeros: Tokens that may write 0 with a sign, or end that.
        has_all_bytes: Whether each byte of a text is a token: then what bytes may follow says what text may.
    """

    def __init__(self, vocabulary: Vocabulary) -> None:
        """Sort the tokens."""
        self.tokens = vocabulary.tokens
        self.markers = {token_id: text.encode() for text, token_id in vocabulary.added.items()}
        self.mask_words = vocabulary.mask_words
        texts = [(i, token) for i, token in enumerate(vocabulary.tokens) if token and i not in vocabulary.special_ids]
        self._as_is = _Sorted(texts)
        self._stripped = _Sorted([(i, token.lstrip(SPACE)) for i, token in texts if token[0] in SPACE])
        quoted = [(i, token) for i, token in texts if b'"' in token]
        self.across = new_row(vocabulary.size, (i for i, token in quoted if _ACROSS.search(token)))
        self.end = new_row(vocabulary.size, (i for i, token in quoted if _END.search(token)))
        self.zeros = [i for i, token in texts if _ZERO.search(token)]
        self._closing = np.zeros(vocabulary.size, dtype=np.bool_)
        self._closing[[i for i, token in texts if not token.isalnum() and _CLOSING.search(token)]] = True
        self._lead = np.zeros(vocabulary.size, dtype=np.uint8)
        for i, token in texts:
            self._lead[i] = (token.lstrip(SPACE) or token)[0]
        self._bytes = np.full(256, -1, dtype=np.int64)
        for i, token in texts:
            if len(token) == 1:
                self._bytes[token[0]] = i
        self.has_all_bytes = bool((self._bytes[list(_NEEDED)] >= 0).all())

    def byte_id(self, byte: int) -> int:
        """Return the token that is a byte."""
        return int(self._bytes[byte])

    def ending(self, row: Words, leads: Iterable[int]) -> list[int]:
        """Return the tokens of a row that may end a value, or begin with one of some bytes, behind whitespace."""
        ids = np.asarray(ids_of(row), dtype=np.int64)
        wanted = self._closing[ids] | np.isin(self._lead[ids], np.fromiter(leads, dtype=np.uint8))
        found: list[int] = ids[wanted].tolist()
        return found

    def bytes_in(self, row: Words) -> NDArray[np.int64]:
        """Return the bytes whose tokens a row allows."""
        ids = np.maximum(self._bytes, 0)
        allowed = (row.view(np.uint32)[ids >> 5] >> (ids & 31).astype(np.uint32)) & 1
        return np.flatnonzero((self._bytes >= 0) & (allowed == 1))

    def like(self, text: bytes, least: int, *, spaced: bool) -> Iterator[int]:
        """Yield the tokens that are beginnings of a text, of more than `least` bytes, or begin with all of it.

        Args:
            text: How an item goes on; not empty.
            least: See above.
            spaced: Whitespace may stand in front.
        """
        yield from self._as_is.like(text, least)
        if spaced:
            yield from self._stripped.like(text, least)


class _Sorted:
    def __init__(self, texts: Sequence[tuple[int, bytes]]) -> None:
        self._texts = sorted((text, i) for i, text in texts if text)

    def like(self, text: bytes, least: int) -> Iterator[int]:
        texts = self._texts
        for size in range(least + 1, len(text) + 1):
            start = text[:size]
            place = bisect_left(texts, (start, -1))
            if place >= len(texts) or not texts[place][0].startswith(start):
                return  # nor does any begin with more of it
            while place < len(texts) and (texts[place][0] == start or (size == len(text))):
                if not texts[place][0].startswith(start):
                    return
                yield texts[place][1]
                place += 1
