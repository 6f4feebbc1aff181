"""Of the grids of tests, few cases that have every value: what the marks `sampled` and `first` leave."""

from __future__ import annotations

from typing import Any

import pytest


def beyond_samples(items: list[pytest.Item]) -> set[pytest.Item]:
    """Of each test marked `sampled`, all but a part in which every value of each of its parameters stands.

    Arguments that the mark names are one parameter together: of their values every combination stays. Of a test marked
    `first`, or of that part of it, all but as many cases as the mark says.
    """
    grids: dict[str, list[Any]] = {}
    for item in items:
        is_left_out = item.get_closest_marker("full") is not None
        is_thinned = item.get_closest_marker("sampled") or item.get_closest_marker("first")
        if is_thinned and hasattr(item, "callspec") and not is_left_out:
            grids.setdefault(item.nodeid.partition("[")[0], []).append(item)
    left_out: set[pytest.Item] = set()
    for grid in grids.values():
        is_sampled, first = grid[0].get_closest_marker("sampled"), grid[0].get_closest_marker("first")
        kept = sorted(covering([values_of(item) for item in grid])) if is_sampled else list(range(len(grid)))
        kept = kept[: first.args[0] if first else None]
        left_out |= {item for number, item in enumerate(grid) if number not in kept}
    return left_out


def values_of(item: Any) -> tuple[Any, ...]:
    """Return a value for each `parametrize`, which may set several arguments, and for each fixture's parameter."""
    params = dict(item.callspec.params)
    rows = [tuple((name, id(params[name])) for name in mark.args) for mark in item.iter_markers("sampled")]
    for mark in item.iter_markers("parametrize"):
        names = mark.args[0].replace(",", " ").split() if isinstance(mark.args[0], str) else mark.args[0]
        rows.append(tuple((name, id(params.pop(name))) for name in names))
    return (*rows, *((name, id(value)) for name, value in params.items()))


def covering(rows: list[tuple[Any, ...]]) -> set[int]:
    """Choose few of some rows of values, the same each time, so that every value is in one.

    The row with the most new values is next; of equals, that whose values were taken least, so that they take turns.
    """
    missing = {value for row in rows for value in row}
    times = dict.fromkeys(missing, 0)
    kept: set[int] = set()
    while missing:
        best = max(
            (number for number in range(len(rows)) if number not in kept),
            key=lambda n: (len(missing.intersection(rows[n])), -sum(times[value] for value in rows[n]), -n),
        )
        kept.add(best)
        missing -= set(rows[best])
        for value in rows[best]:
            times[value] += 1
    return kept
