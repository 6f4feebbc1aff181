"""Rows of a token mask on the host: setting, testing and listing bits. W = ceil(V / 32) words of int32 per row."""

from __future__ import annotations

import random
from collections.abc import Iterable

import numpy as np
from numpy.typing import NDArray

Words = NDArray[np.int32]


def new_row(size: int, ids: Iterable[int] = ()) -> Words:
    """Return a row for V = `size` with the given bits set."""
    flags = np.zeros((size + 31) // 32 * 32, dtype=np.uint8)
    flags[list(ids)] = 1
    return np.packbits(flags, bitorder="little").view(np.int32)


def full_row(size: int) -> Words:
    """Return a row that allows all `size` tokens, and nothing behind them."""
    return new_row(size, range(size))


def set_bit(row: Words, token_id: int) -> None:
    """Allow one token."""
    row.view(np.uint32)[token_id >> 5] |= np.uint32(1 << (token_id & 31))


def clear_bit(row: Words, token_id: int) -> None:
    """Forbid one token."""
    row.view(np.uint32)[token_id >> 5] &= np.uint32(~(1 << (token_id & 31)) & 0xFFFFFFFF)


def is_only(row: Words, token_id: int) -> bool:
    """Whether an allowed token is the only one; its word alone says no nearly always."""
    word = int(row[token_id >> 5]) & 0xFFFFFFFF
    return word & (word - 1) == 0 and np.count_nonzero(row) == 1


def the_only(row: Words) -> int:
    """Return the one token that is allowed; -1 where there are more, or none."""
    if np.count_nonzero(row) != 1:
        return -1
    place = int(np.flatnonzero(row)[0])
    word = int(row[place]) & 0xFFFFFFFF
    return -1 if word & (word - 1) else 32 * place + word.bit_length() - 1


def has_bit(row: Words, token_id: int) -> bool:
    """Whether a token is allowed."""
    return bool(int(row[token_id >> 5]) >> (token_id & 31) & 1)


def draw_ids(row: Words, num: int, rng: random.Random) -> list[int]:
    """Draw `num` allowed tokens, with repeats, without listing them all: first a word of the row, then a bit of it.

    Empty where nothing is allowed.
    """
    places = np.flatnonzero(row)
    if not len(places):
        return []
    drawn = []
    for _ in range(num):
        place = int(places[rng.randrange(len(places))])
        word = int(row[place]) & 0xFFFFFFFF
        for _ in range(rng.randrange(word.bit_count())):
            word &= word - 1
        drawn.append(32 * place + (word & -word).bit_length() - 1)
    return drawn


def ids_of(row: Words) -> list[int]:
    """Return the allowed tokens in ascending order."""
    return np.flatnonzero(np.unpackbits(row.view(np.uint8), bitorder="little")).tolist()
