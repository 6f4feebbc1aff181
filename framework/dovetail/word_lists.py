"""Lists as flags and environment variables write them; imports nothing heavy: `dovetail plugin list` reads them too."""

from __future__ import annotations

import contextlib
import json
from typing import overload


@overload
def split_names(value: str | list[str]) -> list[str]: ...
@overload
def split_names(value: object) -> object: ...
def split_names(value: object) -> object:
    """Accept `a,b` for a list of names, as environment variables and a single flag write it, and a JSON list."""
    if isinstance(value, str):
        value = [value]
    if isinstance(value, list) and len(value) == 1 and str(value[0]).startswith("["):
        with contextlib.suppress(ValueError):
            value = json.loads(str(value[0]))
    if isinstance(value, list):
        return [word for item in value for word in split_words(str(item))]
    return value


def split_words(text: str) -> list[str]:
    """Return the comma-separated words of a text."""
    return [word.strip() for word in text.split(",") if word.strip()]
