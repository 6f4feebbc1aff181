"""Sources that are wrong in themselves, and the source of a choice: a JSON array of strings."""

from __future__ import annotations

import json

from dovetail.contracts.errors import RequestError

UNREADABLE = (RequestError, ValueError, TypeError, AttributeError, KeyError)
"""What walking over a source raises that is not of its kind; `compile` then says what is wrong with it."""


def read_choices(source: str) -> list[str]:
    """Return the strings.

    Raises:
        RequestError: The source is no JSON array of one or more strings.
    """
    try:
        value = json.loads(source)
    except (ValueError, RecursionError):
        value = None
    if not isinstance(value, list) or not value or not all(isinstance(item, str) for item in value):
        raise RequestError("a choice is a JSON array of one or more strings", code="invalid_grammar")
    return value
