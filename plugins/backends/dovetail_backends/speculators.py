"""The speculators that Dovetail brings.

`ngram` drafts what followed the last few tokens where they stood before, in the prompt or in what was said: prompt
lookup decoding (Apoorv Saxena, 2023; in vLLM and transformers under that name). It knows no model, costs a few
microseconds, and pays where replies repeat: summaries, edits of code, retrieval, JSON of one shape after another.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import cycle, islice
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from dovetail.contracts.errors import ConfigError
from dovetail.contracts.speculation import DraftRequest, Speculator

Ids = npt.NDArray[np.int32]
FIRST = 8
"""Drafts of a request at first, if it may have so many."""
NEAR = 8
"""Places that are compared one by one, before all of them are at once: what repeats has mostly just been said."""


@dataclass
class NgramOptions:
    """Settings: `--ngram.max-drafts 15`."""

    max_drafts: int = field(default=15, metadata={"help": "Most drafts of a request in a step."})
    min_match: int = field(default=2, metadata={"help": "Fewest last tokens that have to have stood there before."})
    max_match: int = field(default=6, metadata={"help": "Most last tokens that are compared; the longest match wins."})
    lookback: int = field(default=32768, metadata={"help": "Tokens of a request that are searched, the last ones."})


class Last(NamedTuple):
    """What was drafted in the step before: how many tokens the request had, the drafts, and how many were tried."""

    length: int
    drafts: list[int]
    width: int


class Ngram(Speculator):
    """Looks the last tokens up in the request itself.

    How many it drafts follows what came of them: twice as many where all held, half as many where none did.
    """

    Options = NgramOptions

    def __init__(self) -> None:
        """Check the options.

        Raises:
            ConfigError: They do not go together.
        """
        own = self.options
        if not (1 <= own.min_match <= own.max_match and own.max_drafts >= 1 and own.lookback > own.max_match):
            raise ConfigError(
                f"ngram: max_drafts {own.max_drafts}, min_match {own.min_match}, max_match {own.max_match}, lookback "
                f"{own.lookback}: give 1 or more drafts, and 1 <= min_match <= max_match < lookback"
            )

    def draft(self, requests: Sequence[DraftRequest]) -> Sequence[Sequence[int]]:
        """Return what followed the last match of each."""
        return [self._draft(request) for request in requests]

    def _draft(self, request: DraftRequest) -> list[int]:
        own, length = self.options, len(request.ids)
        width = min(FIRST, own.max_drafts)
        if isinstance(request.memo, Last):
            width = self._width(request.memo, request.ids)
        known = np.asarray(request.ids[max(0, length - own.lookback) :], dtype=np.int32)
        place = last_match(known, own.min_match, own.max_match)
        drafts = [] if place is None else continued(known, place, min(width, request.most_drafts))
        request.memo = Last(length, drafts, width)
        return drafts

    def _width(self, last: Last, ids: Sequence[int]) -> int:
        """How many to draft, after what the request has said since."""
        if not last.drafts:
            return last.width
        said = list(ids[last.length : last.length + len(last.drafts)])
        if said == last.drafts:
            return min(2 * last.width, int(self.options.max_drafts))
        return last.width if said[:1] == last.drafts[:1] else max(1, last.width // 2)


def last_match(known: Ids, least: int, most: int) -> int | None:
    """Return where the last tokens stood before, the longest run of up to `most`, the last of its places.

    Returns:
        The place behind that run, or None where not even `least` tokens stood there.
    """
    ends = np.flatnonzero(known[:-1] == known[-1])
    if not ends.size:
        return None
    tail = known[-most:].tolist()
    near = _longest_near(known, tail, ends[-NEAR:].tolist())
    if near[0] < len(tail) and ends.size > NEAR:
        return _last_of_many(known, ends, least, most)
    return near[1] if near[0] >= least else None


def _longest_near(known: Ids, tail: list[int], ends: list[int]) -> tuple[int, int]:
    """Compare what stands before each of a few places, the last one first; return the longest match, and behind it."""
    found = (0, 0)
    for end in reversed(ends):
        before = known[max(0, end + 1 - len(tail)) : end + 1].tolist()
        matched = 1
        while matched < len(before) and before[-1 - matched] == tail[-1 - matched]:
            matched += 1
        if matched > found[0]:
            found = matched, end + 1
            if matched == len(tail):
                break
    return found


def _last_of_many(known: Ids, ends: npt.NDArray[np.intp], least: int, most: int) -> int | None:
    """As `last_match`, given all places of the last token."""
    matched = 1
    while ends.size and matched < most:
        longer = ends[ends >= matched]
        longer = longer[known[longer - matched] == known[-1 - matched]] if matched < len(known) else longer[:0]
        if not longer.size:
            break
        ends, matched = longer, matched + 1
    return int(ends[-1]) + 1 if matched >= least else None


def continued(known: Ids, place: int, num: int) -> list[int]:
    """Return the `num` tokens that follow from a place on; behind the end, those that were just taken go on."""
    ids: list[int] = known[place : place + num].tolist()
    return ids if len(ids) == num else list(islice(cycle(ids), num))
