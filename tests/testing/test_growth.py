"""What the kit counts as kept, and what it leaves as it was."""

from __future__ import annotations

import gc
from itertools import count

import pytest

from dovetail_testing.conformance.growth import _keeps_frozen, bytes_kept


def test_a_number_for_each_request_is_seen() -> None:
    """A list that gets a number with each request is named, with the bytes of it."""
    numbers, kept = count(1 << 20), []
    assert bytes_kept(lambda: kept.append(next(numbers)), 12) >= 24


def test_what_the_interpreter_remembers_is_no_growth() -> None:
    """Names that were looked up stay in the interpreter's cache for a while, and are not counted."""
    numbers = count()

    def serve() -> None:
        number = next(numbers)
        for made in (0, "", [], {}, ()):  # and of many lengths: the cache is filled by class and address
            getattr(made, f"no_{number:0{number % 80}}", None)

    assert bytes_kept(serve, 12) == 0


@pytest.mark.parametrize("is_frozen", [True, False])
def test_what_was_out_of_the_collectors_rounds_stays_so(is_frozen: bool) -> None:
    """Where a process froze its objects they are frozen afterwards, else none are."""
    before = gc.get_freeze_count() > 0
    gc.collect()
    (gc.freeze if is_frozen else gc.unfreeze)()
    _keeps_frozen.cache_clear()
    try:
        bytes_kept(lambda: None, 2)
        assert (gc.get_freeze_count() > 0) is is_frozen
    finally:
        _keeps_frozen.cache_clear()
        (gc.freeze if before else gc.unfreeze)()
