"""What the text of a value between tags means, once it is complete or cut short: for `TaggedCalls`."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from typing import Any

from dovetail.sdk.formats.schema_types import properties_of, value_text
from dovetail.sdk.formats.tags import CDATA_START

_CDATA = re.compile(r"\s*<!\[CDATA\[(.*)\]\]>\s*", re.DOTALL)
_WRAPPERS = frozenset(["arguments", "input", "parameters", "properties"])
"""Keys under which models put all arguments at times, as JSON."""
_OBJECT = frozenset(["object"])


def is_wrapper(key: str, known: Mapping[str, Any]) -> bool:
    """Whether all arguments may stand under a key, which is none of the tool's `known` parameters."""
    return key in _WRAPPERS and bool(known) and key not in known


def unwrap(text: str, schema: Mapping[str, Any] | None) -> tuple[str, int] | None:
    """Return the members' JSON text and the number of arguments that one value holds.

    None: it holds no object of the tool's parameters alone, which `schema` describes.
    """
    text = text.strip()
    if text.startswith("{"):
        text = value_text(text, _OBJECT)
    try:
        found = json.loads(text)
    except (ValueError, RecursionError):
        return None
    if not isinstance(found, dict) or not found.keys() <= properties_of(schema).keys():
        return None
    return text[1:-1].strip(), len(found)


def whole_value(text: str, types: frozenset[str], *, cdata: bool) -> str:
    """Return the JSON text of a value of one of some types; `cdata`: it may stand in a CDATA section."""
    found = _CDATA.fullmatch(text) if cdata else None
    return value_text(found[1] if found else cut_value(text, cdata=cdata) if text.strip() else text, types)


def cut_value(text: str, *, cdata: bool) -> str:
    """Return what is there of a value that was cut short, without the beginning of its CDATA section."""
    inner = text.lstrip()
    if not cdata or not (inner.startswith(CDATA_START) or CDATA_START.startswith(inner)):
        return text
    return inner[len(CDATA_START) :].removesuffix(">").removesuffix("]").removesuffix("]")
