"""Regular expressions as they are read: as trees of sets of characters, and where readers differ."""

from __future__ import annotations

import re

_TOKENS = re.compile(r"\\.|\[\^?\]?(?:\\.|[^\]\\])*", re.DOTALL)
_ESCAPE = re.compile(r"\\.", re.DOTALL)
_OPERATION = re.compile(r"\[|&&|--|~~")


def ambiguity(pattern: str) -> str | None:
    """Say what is an operation on sets, or a class within a class, to Rust, and characters to Python; None for nothing.

    Returns:
        How a sentence about the expression goes on.
    """
    for token in _TOKENS.finditer(pattern):
        found = _OPERATION.search(_ESCAPE.sub("..", token[0]), 1) if token[0][0] == "[" else None
        if found is not None:
            at = token.start() + found.start() + 1
            why = "an operation on sets to some and characters to others"
            return f"holds {found[0]!r} within a class at character {at}, {why}; escape it, or write out the characters"
    return None
