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


def given_names(value: object) -> object:
    """Split what a user gave for a list of names.

    Raises:
        ValueError: It holds none. An empty list, which is `[]` in a flag, is a value; a text of nothing is a mistake,
            such as a shell's variable that is not set, and would leave a server without what it was to ask for.
    """
    names = split_names(value)
    if names == [] and value not in ([], "[]", ["[]"]):
        raise ValueError("is empty; give at least one, comma-separated, or leave it out")
    return names


def split_words(text: str) -> list[str]:
    """Return the comma-separated words of a text."""
    return [word.strip() for word in text.split(",") if word.strip()]
