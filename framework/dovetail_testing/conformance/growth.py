"""Whether work grows in proportion to the output, and whether any is left of it when it is done.

Operations and bytes are counted, and only processor time is measured.
"""

from __future__ import annotations

import gc
import sys
import time
import tracemalloc
from collections.abc import Callable
from functools import cache
from itertools import pairwise
from types import FrameType
from typing import Any


def operations(work: Callable[[], object]) -> int:
    """Count the lines of Python that `work` runs. The same on every machine."""
    count = 0

    def line(frame: FrameType, event: str, arg: object) -> Any:
        nonlocal count
        count += 1
        return line

    before = sys.gettrace()
    sys.settrace(line)
    try:
        work()
    finally:
        sys.settrace(before)
    return count


def grows_linearly(work: Callable[[int], object], size: int, slack: int = 200) -> tuple[bool, int, int]:
    """Say whether twice the size costs at most about twice the lines, and both counts.

    Where it costs more, the next doubling is looked at, and the one after it: text that is given up at some length is
    read in another way behind it, which is no growth. What grows faster than the text does so at every doubling.
    """
    work(size)  # what is made at first use is not counted
    one = operations(lambda: work(size))
    two = one
    for doublings in (1, 2, 3):
        one, two = two, operations(lambda: work(size << doublings))  # noqa: B023 - called at once
        if two <= 2.3 * one + slack:
            return True, one, two
    return False, one, two


def time_grows_linearly(work: Callable[[int], object], size: int, tries: int = 5) -> tuple[bool, float, float]:
    """Say whether four times the size takes clearly less than the sixteenfold time of quadratic work.

    Lines do not show a search or a copy inside one call. Processor time of this thread is compared with itself, the
    best of several tries without the garbage collector, so that a busy machine does not matter; a single good try is
    enough. Other threads of the machine share its caches, which alone makes linear work up to seven times as slow.
    """
    one = four = float("inf")
    for _ in range(tries):
        one, four = min(one, _seconds(work, size)), min(four, _seconds(work, 4 * size))
        if four <= 8 * one + 0.02:
            return True, one, four
    return False, one, four


def _seconds(work: Callable[[int], object], size: int) -> float:
    is_collecting = gc.isenabled()
    gc.disable()
    try:
        begin = time.thread_time()
        work(size)
        return time.thread_time() - begin
    finally:
        if is_collecting:
            gc.enable()


def bytes_kept(work: Callable[[], object], times: int, *, each: int = 1) -> int:
    """Return how many bytes each request leaves behind, 0 if they leave nothing; `work` serves `each` of them.

    What fills up (a cache, a buffer of bounded size, the interpreter's own free lists) stops growing; what leaks grows
    by every round. So where a few rounds grow, as many longer ones decide. Python's own allocations are counted, text
    included, which no garbage collector lists.
    """
    was_tracing, was_frozen = tracemalloc.is_tracing(), _keeps_frozen()
    gc.collect()
    gc.freeze()  # what is there already is not looked through again in each round
    tracemalloc.start()
    try:
        return _rounds(work, times, each) and _rounds(work, 8 * times, each)
    finally:
        if not was_tracing:
            tracemalloc.stop()
        if not was_frozen:  # else what the process keeps for good would be looked through in all its rounds from now on
            gc.unfreeze()


@cache
def _keeps_frozen() -> bool:
    """Whether this process had taken objects out of the collector's rounds at the first count; that looks at each."""
    return gc.get_freeze_count() > 0


_LEAST_BYTES = 24
"""A number in a list, and the place for it."""


def _rounds(work: Callable[[], object], times: int, each: int) -> int:
    """Return what each request of six rounds left behind; other threads come and go as well, so four decide."""
    counts = [_held(work, times) for _ in range(8)][1:]
    grown = [later - earlier for earlier, later in pairwise(counts) if later - earlier >= _LEAST_BYTES * times * each]
    return max(grown) // (times * each) if len(grown) >= 4 else 0


_forget_lookups: Callable[[], None] = getattr(sys, "_clear_internal_caches", None) or sys._clear_type_cache
"""Empties the interpreter's cache of attributes that were looked up, which keeps their names.

It has 4096 places. Functions in C that look one up by its name, such as `re.sub`, make a new text for it each time, and
that comes into a place by its address: new places fill for thousands of requests, or none does.
"""


def _held(work: Callable[[], object], times: int) -> int:
    for _ in range(times):
        work()
    gc.collect()
    _forget_lookups()
    return tracemalloc.get_traced_memory()[0]
