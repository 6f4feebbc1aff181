"""Paths of other servers and of OpenAI that are not served here, each with the reason and the way out."""

from __future__ import annotations

import re
from functools import cache

from dovetail.contracts.tables import table

PATHS: dict[str, str] = {path: row["why"] for row in table(__file__, "paths.json") for path in row["paths"].split()}
"""A part in braces is any one part of a path."""


@cache
def _patterns() -> list[tuple[re.Pattern[str], str]]:
    return [(re.compile(path.replace("{}", "[^/]+")), why) for path, why in PATHS.items() if "{}" in path]


def why_not(path: str) -> str | None:
    """Return why a path is not served; None for one that nobody knows."""
    if path in PATHS:
        return PATHS[path]
    return next((why for pattern, why in _patterns() if pattern.fullmatch(path)), None)
