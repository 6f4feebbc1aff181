"""In which order decode rows stand, so that a backend can read what they have in common once, and whether that pays.

This is an estimate on the host: what rows share is found again on the device, exactly (`ForwardBatch.shares_prefixes`).
A page stands at one place of one prefix for as long as somebody holds it. So two requests with the same page at some
place have the same pages before it too, and the length of what they share is found by bisection.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

from dovetail.engine.request import EngineRequest

MIN_SAVED_TOKENS = 4096
"""Tokens that need not be read in a layer; below that the two extra kernels cost more."""
MIN_SAVED_SHARE = 1 / 3
"""And their share of all tokens that the batch would read."""
SORT_STEP = 64
"""Requests are sorted by the page of every so many tokens."""
SORT_KEYS = 16
"""And by so many pages at most: of long prefixes, fewer are looked at."""

Pages = list[int]


class PrefixOrder:
    """Finds the order for one engine; looks again only when the batch is another one."""

    def __init__(self, group: int, page_size: int) -> None:
        """`group` is the backend's `prefix_group`, 2 or more."""
        self._group, self._page_size = group, page_size
        self._pages: list[Pages] = []
        self._order: list[int] | None = None

    def order(self, requests: Sequence[EngineRequest]) -> list[EngineRequest] | None:
        """Return the requests of a decode step in the order that saves most, or None where it does not pay.

        The answer stays while the requests are the same and keep their pages: those only grow at their end. A request
        that was retracted comes back with another list of pages.
        """
        pages = [request.pages[0] for request in requests]
        if pages != self._pages:  # lists that are the same object are not looked into
            self._pages, self._order = pages, self._find(requests, pages)
        return None if self._order is None else [requests[i] for i in self._order]

    def _find(self, requests: Sequence[EngineRequest], pages: list[Pages]) -> list[int] | None:
        if len({own[0] for own in pages if own}) == len(pages):
            return None
        step = max(1, SORT_STEP // self._page_size, max(map(len, pages), default=0) // SORT_KEYS)
        keys = [own[::step] for own in pages]
        by_pages = sorted(range(len(pages)), key=keys.__getitem__)
        common = [common_pages(pages[a], pages[b]) for a, b in pairwise(by_pages)]
        saved = sum(saved_pages(common[i : i + self._group - 1]) for i in range(0, len(common), self._group))
        saved_tokens, all_tokens = saved * self._page_size, sum(request.computed_len for request in requests)
        return by_pages if saved_tokens >= max(MIN_SAVED_TOKENS, MIN_SAVED_SHARE * all_tokens) else None


def saved_pages(common: Sequence[int]) -> int:
    """Return how many pages need not be read in a group, where one run of rows reads what all of it share once.

    Args:
        common: Pages that each row and the next share.

    Returns:
        The area of the largest rectangle under `common`: all rows of the run but one save as many as its lowest place.
    """
    best = 0
    rising: list[tuple[int, int]] = []  # where a height that still goes on began
    for place, height in enumerate((*common, 0)):
        start = place
        while rising and rising[-1][1] >= height:
            start, above = rising.pop()
            best = max(best, above * (place - start))
        rising.append((start, height))
    return best


def common_pages(one: Pages, other: Pages) -> int:
    """Return how many leading pages two requests share."""
    low, high = 0, min(len(one), len(other))
    if not high or one[0] != other[0]:
        return 0
    while low < high:
        middle = (low + high) // 2
        if one[middle] == other[middle]:
            low = middle + 1
        else:
            high = middle
    return low
