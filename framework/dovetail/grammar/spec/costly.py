"""What in a schema costs a compiler most, and a grammar without it where compiling it takes too long."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from dovetail.contracts.grammar import GrammarBackend, GrammarSpec, Kind
from dovetail.sdk.schemas import schema
from dovetail.sdk.schemas.schema import escape
from dovetail.sdk.schemas.structural import schemas_with_places

MIN_WEIGHT = 500
"""What costs less is not to blame."""
_REPEAT = re.compile(r"\{(\d+)(?:,(\d*))?\}")
NUMBERS = (1, 2, 4, 8, 16, 64)
"""How many keywords are left out: few first."""


def lightened(backend: GrammarBackend, spec: GrammarSpec) -> tuple[GrammarSpec, tuple[str, ...]] | None:
    """Return a grammar without its costliest keywords, of which as few go as a backend needs to call it fast.

    Args:
        backend: It.
        spec: JSON or structural.

    Returns:
        The grammar and the places that were left out; None where the backend calls nothing fast, or not even that.
    """
    if type(backend).inline is GrammarBackend.inline:
        return None
    root = json.loads(spec.source)
    schemas = [("", root)] if spec.kind is Kind.JSON else list(schemas_with_places(root))
    found = [(weight, start + place) for start, given in schemas for weight, place in costly_places(given)]
    places = [place for _, place in sorted(found, key=lambda item: -item[0])]
    for number in NUMBERS:
        made = replace(spec, source=json.dumps(schema.leave_out(root, places[:number]), ensure_ascii=False))
        if places and backend.inline(made):
            return made, tuple(places[:number])
        if number >= len(places):
            break
    return None


def costly_places(given: Any) -> list[tuple[float, str]]:
    """Return weights and places of keywords that cost much, the worst first."""
    found = [
        (weight, f"{pointer}/{escape(key)}")
        for pointer, node in schema.every(given)
        if isinstance(node, Mapping)
        for key, value in node.items()
        if (weight := _weight(key, value)) >= MIN_WEIGHT
    ]
    return sorted(found, key=lambda item: -item[0])


def _weight(key: str, value: Any) -> float:
    """Estimate what a keyword costs, in no unit."""
    if key == "multipleOf" and isinstance(value, (int, float)):
        return float(f"{value:.12f}".rstrip("0").rstrip(".").replace(".", "").lstrip("0") or 1)
    if key in ("pattern", "format") and isinstance(value, str):
        weight = float(len(value))
        for low, high in _REPEAT.findall(value):
            weight *= max(int(low), int(high or 0), 1)
        return weight
    if key in ("maxLength", "minLength", "maxItems", "minItems", "minProperties", "maxProperties"):
        return float(value) if isinstance(value, (int, float)) else 0.0
    if key in ("enum", "required"):
        return float(len(value))
    if key in ("properties", "patternProperties", "anyOf", "oneOf", "allOf"):
        return len(value) ** 2 / 4
    return 0.0
