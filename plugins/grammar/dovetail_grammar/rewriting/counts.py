"""How many properties there are, in terms of which: `minProperties` as alternatives.

Backends count keys by themselves only where no declared property may be missing. So each alternative says which of the
declared ones are there; what is left to count are keys that are not declared.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable
from math import comb
from typing import Any

Node = dict[str, Any]
MAX_OPTIONS = 24
"""Alternatives that counts may become, …"""
MAX_SINGLE = 48
"""… and where each is about a single property."""


def alternatives_of(node: Node) -> list[Any] | None:
    """Return alternatives that say what a schema's `minProperties` says.

    Returns:
        None where there would be too many. Without an alternative no object conforms; True alone is the count that
        says nothing.
    """
    required = set(node.get("required", ()))
    free = [name for name, part in node.get("properties", {}).items() if name not in required and part is not False]
    least = node["minProperties"]
    missing = least - len(required)
    if missing <= 0:
        return [True]
    if node.get("additionalProperties") is not False or "patternProperties" in node:
        return None if "maxProperties" in node else _open(free, missing, least)
    if missing > len(free):
        return [] if free else None
    if not _is_few(len(free), [missing]):
        return None
    return [{"required": list(some)} for some in itertools.combinations(free, missing)]


def _open(free: list[str], missing: int, least: int) -> list[Any] | None:
    """Other keys may come: the declared ones that are there leave it to them to make up the numbers."""
    sizes = range(min(missing, len(free)) + 1)
    if not free or not _is_few(len(free), sizes):
        return None
    alternatives: list[Any] = []
    for some in itertools.chain.from_iterable(itertools.combinations(free, size) for size in sizes):
        if len(some) == missing:
            alternatives.append({"required": list(some)})
            continue
        option: Node = {"required": list(some), "minProperties": least, **_without(free, some)}
        alternatives.append({name: value for name, value in option.items() if value not in ({}, [])})
    return alternatives


def _without(free: list[str], some: Iterable[str]) -> Node:
    return {"properties": {name: False for name in free if name not in set(some)}}


def _is_few(num: int, sizes: Iterable[int]) -> bool:
    sizes = list(sizes)
    total = sum(comb(num, size) for size in sizes)
    return total <= (MAX_SINGLE + 1 if max(sizes, default=0) <= 1 else MAX_OPTIONS)
