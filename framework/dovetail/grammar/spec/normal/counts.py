"""How many properties there are, in terms of which: `minProperties` and `maxProperties` as alternatives.

Backends count keys by themselves only where no declared property may be missing. So each alternative says which of the
declared ones are there; what is left to count are keys that are not declared.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator
from math import comb
from typing import Any

Node = dict[str, Any]
COUNTS = ("minProperties", "maxProperties")
MAX_OPTIONS = 24
"""Alternatives that counts may become, …"""
MAX_SINGLE = 48
"""… and where each is about a single property."""


def ways_of(node: Node, key: str) -> tuple[list[Any], tuple[str, ...]] | None:
    """Return alternatives that say what a count says, and the keywords that they take the place of.

    Args:
        node: The schema.
        key: The count; where keys are open, the other one is said along with it.

    Returns:
        None where there would be too many. Without an alternative no object conforms; True alone is the count that
        says nothing.
    """
    required = set(node.get("required", ()))
    free = [name for name, part in node.get("properties", {}).items() if name not in required and part is not False]
    others = node.get("additionalProperties") is not False or "patternProperties" in node
    if others:
        return _open(node, free, len(required))
    if all(name in node for name in COUNTS) and (both := _between(node, free, len(required))) is not None:
        return both, COUNTS
    if key == "minProperties":
        return _at_least(free, node[key] - len(required))
    return _at_most(free, node[key] - len(required))


def _at_least(free: list[str], missing: int) -> tuple[list[Any], tuple[str, ...]] | None:
    """All keys are declared: so many of those that may be missing are there."""
    if missing <= 0:
        return [True], ("minProperties",)
    if not free or not _is_few(len(free), [missing]):
        return None
    if missing > len(free):
        return [], ("minProperties",)
    return [{"required": list(some)} for some in itertools.combinations(free, missing)], ("minProperties",)


def _at_most(free: list[str], room: int) -> tuple[list[Any], tuple[str, ...]] | None:
    """All keys are declared: all but so many of those that may be missing are absent."""
    if len(free) <= room:
        return [True], ("maxProperties",)
    if not free or room < 0 or not _is_few(len(free), [room]):
        return None
    return [_without(free, some) for some in itertools.combinations(free, room)], ("maxProperties",)


def _between(node: Node, free: list[str], num_required: int) -> list[Any] | None:
    """All keys are declared, and both counts given: which of those that may be missing are there."""
    least, most = max(node["minProperties"] - num_required, 0), node["maxProperties"] - num_required
    if least == 0 or least > most or most >= len(free) or not _is_few(len(free), range(least, most + 1)):
        return None
    return [{"required": list(some), **_without(free, some)} for some in _subsets(free, range(least, most + 1))]


def _open(node: Node, free: list[str], num_required: int) -> tuple[list[Any], tuple[str, ...]] | None:
    """Other keys may come: the declared ones that are there leave it to them to make up the numbers."""
    least, most = node.get("minProperties", 0), node.get("maxProperties")
    missing = least - num_required
    if most is None and missing <= 0:
        return [True], ("minProperties",)
    room = len(free) if most is None else min(most - num_required, len(free))
    if not free or room < 0:
        return None
    sizes = range((min(missing, room) if most is None else room) + 1)
    if not _is_few(len(free), sizes):
        return None
    ways = []
    for some in _subsets(free, sizes):
        if most is None and len(some) == missing:
            ways.append({"required": list(some)})
            continue
        way: Node = {"required": list(some), **_without(free, some)}
        way |= {"minProperties": least} if len(some) < missing else {}
        way |= {"maxProperties": most} if most is not None else {}
        ways.append({name: value for name, value in way.items() if value not in ({}, [])})
    return ways, tuple(name for name in COUNTS if name in node)


def _without(free: list[str], some: Iterable[str]) -> Node:
    return {"properties": {name: False for name in free if name not in set(some)}}


def _subsets(free: list[str], sizes: Iterable[int]) -> Iterator[tuple[str, ...]]:
    return itertools.chain.from_iterable(itertools.combinations(free, size) for size in sizes)


def _is_few(num: int, sizes: Iterable[int]) -> bool:
    sizes = list(sizes)
    total = sum(comb(num, size) for size in sizes)
    return total <= (MAX_SINGLE + 1 if max(sizes, default=0) <= 1 else MAX_OPTIONS)
