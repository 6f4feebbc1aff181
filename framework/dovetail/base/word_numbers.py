"""Which numbers a setting takes, in words: for messages about what was given."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from pydantic.fields import FieldInfo

BOUNDS = ("ge", "gt", "le", "lt")
NUMBERS = frozenset(
    {
        *("greater_than", "greater_than_equal", "less_than", "less_than_equal", "finite_number"),
        *("int_type", "int_parsing", "int_parsing_size", "int_from_float", "float_type", "float_parsing"),
    }
)
"""What pydantic calls a value that is no number, or beyond its bounds."""


def wanted(error: Mapping[str, Any], field: FieldInfo) -> str:
    """Return what to give in place of a number that was refused; empty where the refusal is about something else.

    Args:
        error: One of `ValidationError.errors()`, about the field itself.
        field: Of the settings.
    """
    if error["type"] not in NUMBERS or len(error["loc"]) != 1:
        return ""
    bounds = {name: getattr(each, name) for each in field.metadata for name in BOUNDS if hasattr(each, name)}
    return f"give {'a number' if 'float' in str(field.annotation) else 'a whole number'}{_within(bounds)}"


def _within(bounds: Mapping[str, float]) -> str:
    low, high = bounds.get("ge"), bounds.get("le")
    if low is not None and high is not None:
        return f" from {low:,} to {high:,}"
    above, below = bounds.get("gt"), bounds.get("lt")
    least = f"of {low:,} or more" if low is not None else f"above {above:,}" if above is not None else ""
    most = f"{high:,} at most" if high is not None else f"below {below:,}" if below is not None else ""
    said = " and ".join(filter(None, (least, most)))
    return f" {said}" if said else ""
