"""Tokens of a vocabulary by their text, to find those that go on like an earlier item without looking at all."""

from __future__ import annotations

import re
from bisect import bisect_left
from collections.abc import Iterable, Iterator, Sequence
from functools import cached_property
from typing import cast

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
    """

    def __init__(self, vocabulary: Vocabulary) -> None:
        """Keep the tokens; they are sorted where an item has to be compared first, or by `prepare`."""
        self.tokens = vocabulary.tokens
        self.markers = {token_id: text.encode() for text, token_id in vocabulary.added.items()}
        self.mask_words, self._size, self._special_ids = vocabulary.mask_words, vocabulary.size, vocabulary.special_ids

    def prepare(self) -> None:
        """Sort the tokens now: a tenth of a second and more for a large vocabulary."""
        for name, value in vars(type(self)).items():
            if isinstance(value, cached_property):
                getattr(self, name)

    @cached_property
    def _texts(self) -> list[tuple[int, bytes]]:
        return [(i, token) for i, token in enumerate(self.tokens) if token and i not in self._special_ids]

    @cached_property
    def _as_is(self) -> _Sorted:
        return _Sorted(self._texts)

    @cached_property
    def _stripped(self) -> _Sorted:
        return _Sorted([(i, token.lstrip(SPACE)) for i, token in self._texts if token[0] in SPACE])

    @cached_property
    def across(self) -> Words:
        """A row of the tokens that may end a string and begin another item."""
        return self._row_of(_ACROSS)

    @cached_property
    def end(self) -> Words:
        """A row of the tokens that may end a string and what it stands in."""
        return self._row_of(_END)

    @cached_property
    def zeros(self) -> list[int]:
        """Tokens that may write 0 with a sign, or end that."""
        return [i for i, token in self._texts if _ZERO.search(token)]

    @cached_property
    def _closing(self) -> NDArray[np.bool_]:
        found = np.zeros(self._size, dtype=np.bool_)
        found[[i for i, token in self._texts if not token.isalnum() and _CLOSING.search(token)]] = True
        return found

    @cached_property
    def _lead(self) -> NDArray[np.uint8]:
        found = np.zeros(self._size, dtype=np.uint8)
        for i, token in self._texts:
            found[i] = (token.lstrip(SPACE) or token)[0]
        return found

    @cached_property
    def _bytes(self) -> NDArray[np.int64]:
        found = np.full(256, -1, dtype=np.int64)
        for i, token in self._texts:
            if len(token) == 1:
                found[token[0]] = i
        return found

    @cached_property
    def has_all_bytes(self) -> bool:
        """Whether each byte of a text is a token: then what bytes may follow says what text may."""
        return bool((self._bytes[list(_NEEDED)] >= 0).all())

    def _row_of(self, pattern: re.Pattern[bytes]) -> Words:
        return new_row(self._size, (i for i, token in self._texts if b'"' in token and pattern.search(token)))

    def next_tokens(self, row: Words) -> list[int]:
        """Return the allowed tokens that are bytes; where none is, all: a grammar may allow a forced one alone."""
        return cast(list[int], self._bytes[self.bytes_in(row)].tolist()) or ids_of(row)

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
