"""The keywords of JSON Schema that an instance is judged by, and its drafts."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

MEANING = frozenset(
    [
        "additionalItems", "additionalProperties", "allOf", "anyOf", "const", "contains", "dependencies",
        "dependentRequired", "dependentSchemas", "else", "enum", "exclusiveMaximum", "exclusiveMinimum", "format", "if",
        "items", "maxContains", "maxItems", "maxLength", "maxProperties", "maximum", "minContains", "minItems",
        "minLength", "minProperties", "minimum", "multipleOf", "not", "oneOf", "pattern", "patternProperties",
        "prefixItems", "properties", "propertyNames", "required", "then", "type", "unevaluatedItems",
        "unevaluatedProperties", "uniqueItems",
    ]
)  # fmt: skip
"""Keywords that an instance is judged by, of all drafts from 4 on."""
CONTENT = frozenset(("contentEncoding", "contentMediaType"))
"""Judged up to draft 7; annotations since."""
DRAFTS = {
    "draft-03": 3, "draft-04": 4, "draft-06": 6, "draft-07": 7, "draft/2019-09": 2019, "draft/2020-12": 2020,
}  # fmt: skip


def draft_of(root: Mapping[str, Any]) -> int | None:
    """Return the draft that a document names, None where it names none."""
    given = root.get("$schema")
    if not isinstance(given, str):
        return None
    return next((number for text, number in DRAFTS.items() if text in given), None)
