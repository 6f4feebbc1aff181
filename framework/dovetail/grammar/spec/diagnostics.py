"""Where in the schemas of a request the cause of a refusal stands, and what to write there instead.

What compiles a grammar says what is wrong in words of its own, or only that it took too long. The places are looked for
in the schemas as they were given: keywords and names that the words hold, or what costs most.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping
from typing import Any

from dovetail.contracts.grammar import Kind
from dovetail.grammar.spec.advice import advice, hint
from dovetail.grammar.spec.refusals import LATER, TOO_COMPLEX
from dovetail.grammar.spec.relax import costly_places
from dovetail.grammar.spec.route import GrammarRoute
from dovetail.sdk.schemas import schema
from dovetail.sdk.schemas.keywords import MEANING
from dovetail.sdk.schemas.schema import escape
from dovetail.sdk.schemas.structural import schemas_with_places
from dovetail.sdk.schemas.types import kinds_in_common, kinds_of, types_of_value, values_of

MAX_PLACES = 3
_WORDS = re.compile(r"[a-z]+[A-Z][A-Za-z]+|\b(?:pattern|regex|format|enum|const|not|if|contains|minimum|maximum)\b")
_QUOTED = re.compile(r"'([^']+)'|\"([^\"]+)\"|`([^`]+)`")
_PAIRS = (("minimum", "maximum"), *((f"min{what}", f"max{what}") for what in ("Length", "Items", "Properties")))


def explained(route: GrammarRoute | None, code: str | None, message: str) -> str:
    """Return a refusal's message with places and advice, where it is one of a grammar with schemas.

    Args:
        route: The request's; None where it has no grammar.
        code: Of the refusal.
        message: What was wrong.
    """
    if route is None or code is None or code in LATER:
        return message
    found: list[tuple[str, str]] = []
    for start, given in _schemas(route):
        places = _costly(given) if code == TOO_COMPLEX else _named(given, message)
        found += ((f"{start}{place}", why) for place, why in places)
    found += _expressions(route, message)
    if not found:
        instead = hint(message)
        return message if instead is None else f"{message}; {instead}"
    return f"{message}; see {'; '.join(f'{place} ({why})' for place, why in found[:MAX_PLACES])}"


def _schemas(route: GrammarRoute) -> Iterator[tuple[str, Any]]:
    """Yield place and value of every schema of a request."""
    if route.tools:
        yield from ((tool.place, json.loads(tool.source)) for tool in route.tools)
    elif route.spec.kind is Kind.JSON:
        yield "", schema.parse(route.spec.source)
    elif route.spec.kind is Kind.STRUCTURAL:
        yield from schemas_with_places(json.loads(route.spec.source))


def _expressions(route: GrammarRoute, message: str) -> Iterator[tuple[str, str]]:
    """Yield places of expressions and grammars of rules in a structural grammar that a message quotes."""
    if route.spec.kind is not Kind.STRUCTURAL or route.tools:
        return
    stack: list[tuple[str, Any]] = [("", json.loads(route.spec.source))]
    while stack:
        pointer, node = stack.pop()
        if isinstance(node, list):
            stack += ((f"{pointer}/{index}", item) for index, item in enumerate(node))
        elif isinstance(node, Mapping):
            key = {"regex": "pattern", "grammar": "grammar"}.get(str(node.get("type")), "")
            if (key == "pattern" and f'"{node[key]}"' in message) or (key == "grammar" and " rule " in message):
                yield f"{pointer}/{key}", hint(message) or "write it in another way"
            stack += ((f"{pointer}/{escape(key)}", item) for key, item in node.items() if key != "json_schema")


def _named(given: Any, message: str) -> list[tuple[str, str]]:
    """Return what a message speaks of: patterns that it quotes, names, bounds that no value is within, keywords."""
    quoted = {next(filter(None, groups)) for groups in _QUOTED.findall(message)}
    words = {"pattern" if word == "regex" else word for word in _WORDS.findall(message)}
    exact: list[tuple[str, str]] = []
    rest: list[tuple[str, str]] = []
    if given is False:
        return [("/", "false allows nothing: write true, or what is allowed")]
    for pointer, node in _nodes(given):
        exact += ((f"{pointer}/{key}", why) for key, why in _contradictions(node))
        for key, value in node.items():
            place = f"{pointer}/{escape(key)}"
            if key == "pattern" and isinstance(value, str) and len(value) > 2 and value in message:
                exact.append((place, advice(place)))
            elif key == "properties" and isinstance(value, Mapping):
                names = (name for name in value if name in quoted)
                exact += ((f"{place}/{escape(name)}", "no value of it conforms to all that is said") for name in names)
            elif key in words and key in MEANING:
                rest.append((place, advice(place)))
    return (exact or rest)[:MAX_PLACES]


def _contradictions(node: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    """Yield keywords of one schema that no value passes, or not beside another one, each with the reason."""
    for low, high in _PAIRS:
        least, most = node.get(low), node.get(high)
        if isinstance(least, (int, float)) and isinstance(most, (int, float)) and least > most:
            yield low, "no value is within these bounds"
    values = values_of(node)
    if values is not None and not any(types_of_value(value) & kinds_of(node) for value in values):
        yield "enum" if "enum" in node else "const", "none of its values has the type that stands beside it"
    parts = [part for part in node.get("allOf", ()) if isinstance(part, dict)]
    kinds = kinds_of(node)
    for part in parts:
        kinds = kinds_in_common(kinds, kinds_of(part))
    if parts and not kinds:
        yield "allOf", "no value has all of these types"
    if node.get("additionalProperties") is False and "patternProperties" not in node:
        missing = [name for name in node.get("required", ()) if name not in node.get("properties", {})]
        if missing:
            yield "required", f"{missing[0]!r} is not allowed beside it: declare it in properties"


def _costly(given: Any) -> list[tuple[str, str]]:
    """Return the places that cost most, the worst first."""
    found = costly_places(given)[:MAX_PLACES]
    return [(place, advice(place)) for weight, place in found if weight * 10 >= found[0][0]]


def _nodes(given: Any) -> Iterator[tuple[str, Mapping[str, Any]]]:
    return ((pointer, node) for pointer, node in schema.every(given) if isinstance(node, Mapping))
