"""Which of a call's arguments must stand in it together, and which must not: for formats that write each by itself.

JSON schemas say so with `required`, `minProperties`, `dependentRequired`, `not`, `if` and more. In the normal form all
of them are `required` and properties that are `false`, within `anyOf` and `allOf`: ways in which arguments may stand.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

MAX_WAYS = 32
"""Ways that a grammar is written for; each repeats all arguments."""
_SAYS = frozenset(("type", "required", "properties", "allOf", "anyOf"))


@dataclass(frozen=True, slots=True)
class Presence:
    """One way: the arguments that must be there, and those that must not. Any of the others may be."""

    required: frozenset[str] = frozenset()
    absent: frozenset[str] = frozenset()


def presences(schema: Mapping[str, Any]) -> tuple[Sequence[Presence], frozenset[str]]:
    """Return the ways of a call's arguments, and the places in its schema of which they keep all that is said."""
    declared = schema.get("properties") or {}
    absent = frozenset(name for name, part in declared.items() if part is False)
    ways = [Presence(frozenset(schema.get("required", ())), absent)]
    held = {f"/properties/{name}" for name in absent - ways[0].required}
    parts = [(f"/allOf/{i}", part) for i, part in enumerate(schema.get("allOf", ()))]
    if "anyOf" in schema:
        parts.append(("/anyOf", {"anyOf": schema["anyOf"]}))
    for place, part in parts:
        found = _ways_of(part)
        both = [] if found is None else _both(ways, found)
        both = [way for way in both if way.required <= declared.keys() | ways[0].required]
        if 0 < len(both) <= MAX_WAYS:
            ways = both
            held.add(place)
    return ways, frozenset(held)


def _ways_of(part: Any) -> list[Presence] | None:
    """Return the ways that a part of a schema leaves; None: it says something else, or leaves too many."""
    if isinstance(part, bool):
        return [Presence()] if part else []
    properties = part.get("properties", {})
    if part.keys() - _SAYS or part.get("type", "object") != "object":
        return None
    if any(declared not in (True, False, {}) for declared in properties.values()):
        return None
    absent = frozenset(name for name, declared in properties.items() if declared is False)
    ways: list[Presence] | None = [Presence(frozenset(part.get("required", ())), absent)]
    for member in part.get("allOf", ()):
        more = _ways_of(member)
        ways = None if ways is None or more is None else _both(ways, more)
    if "anyOf" in part:
        any_of: list[Presence] = []
        for member in part["anyOf"]:
            more = _ways_of(member)
            if more is None or len(any_of) + len(more) > MAX_WAYS:
                return None
            any_of += more
        ways = None if ways is None else _both(ways, any_of)
    return None if ways is None or len(ways) > MAX_WAYS else ways


def _both(ways: Iterable[Presence], more: Sequence[Presence]) -> list[Presence]:
    """Return the ways in which both hold, without those that another one contains."""
    both = [Presence(one.required | two.required, one.absent | two.absent) for one in ways for two in more]
    both = [way for way in dict.fromkeys(both) if not way.required & way.absent]
    return [
        way
        for way in both
        if not any(way != other and other.required <= way.required and other.absent <= way.absent for other in both)
    ]
