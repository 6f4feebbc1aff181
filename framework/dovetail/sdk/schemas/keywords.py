"""The keywords of JSON Schema, by what they hold and mean, and its drafts; `keywords.json` lists them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from dovetail.contracts.tables import table

_DATA: dict[str, Any] = table(__file__)
ONE, LISTS, MAPS = (frozenset[str](_DATA[name]) for name in ("one", "lists", "maps"))
"""Keywords that hold a schema, a list of schemas, and schemas by name."""
DEFINITIONS = frozenset(("$defs", "definitions"))
HOLDING = ONE | LISTS | MAPS
ANNOTATIONS = frozenset[str](_DATA["annotations"])
COMPANIONS: dict[str, list[str]] = _DATA["companions"]
"""Keywords that go with another one."""
MEANING = frozenset[str](_DATA["meaning"])
"""Keywords that an instance is judged by, of all drafts from 4 on."""
CONTENT = frozenset(("contentEncoding", "contentMediaType"))
"""Judged up to draft 7; annotations since."""
DRAFTS: dict[str, int] = _DATA["drafts"]


def draft_of(root: Mapping[str, Any]) -> int | None:
    """Return the draft that a document names, None where it names none."""
    given = root.get("$schema")
    if not isinstance(given, str):
        return None
    return next((number for text, number in DRAFTS.items() if text in given), None)
