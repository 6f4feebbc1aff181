"""Which of a call's arguments must stand in it together, and which must not: for formats that write each by itself.

JSON schemas say so with `required`, `minProperties`, `dependentRequired`, `not`, `if` and more. In the normal form all
of them are `required` and properties that are `false`, within `anyOf` and `allOf`: ways in which arguments may stand.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

MAX_OPTIONS = 32
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
    options = [Presence(frozenset(schema.get("required", ())), absent)]
    held = {f"/properties/{name}" for name in absent - options[0].required}
    parts = [(f"/allOf/{i}", part) for i, part in enumerate(schema.get("allOf", ()))]
    if "anyOf" in schema:
        parts.append(("/anyOf", {"anyOf": schema["anyOf"]}))
    for place, part in parts:
        found = _options_of(part)
        both = [] if found is None else _both(options, found)
        both = [option for option in both if option.required <= declared.keys() | options[0].required]
        if 0 < len(both) <= MAX_OPTIONS:
            options = both
            held.add(place)
    return options, frozenset(held)


def _options_of(part: Any) -> list[Presence] | None:
    """Return the ways that a part of a schema leaves; None: it says something else, or leaves too many."""
    if isinstance(part, bool):
        return [Presence()] if part else []
    properties = part.get("properties", {})
    if part.keys() - _SAYS or part.get("type", "object") != "object":
        return None
    if any(declared not in (True, False, {}) for declared in properties.values()):
        return None
    absent = frozenset(name for name, declared in properties.items() if declared is False)
    options: list[Presence] | None = [Presence(frozenset(part.get("required", ())), absent)]
    for member in part.get("allOf", ()):
        more = _options_of(member)
        options = None if options is None or more is None else _both(options, more)
    if "anyOf" in part:
        any_of: list[Presence] = []
        for member in part["anyOf"]:
            more = _options_of(member)
            if more is None or len(any_of) + len(more) > MAX_OPTIONS:
                return None
            any_of += more
        options = None if options is None else _both(options, any_of)
    return None if options is None or len(options) > MAX_OPTIONS else options


def _both(options: Iterable[Presence], more: Sequence[Presence]) -> list[Presence]:
    """Return the ways in which both hold, without those that another one contains."""
    both = [Presence(one.required | two.required, one.absent | two.absent) for one in options for two in more]
    both = [option for option in dict.fromkeys(both) if not option.required & option.absent]
    return [
        option
        for option in both
        if not any(
            option != other and other.required <= option.required and other.absent <= option.absent for other in both
        )
    ]
