"""Leaving out of a grammar's JSON schemas what a backend refuses, each keyword at its place, and no more than it must.

The one engine of that for response formats, tools and structural grammars. What is left out is named by JSON pointers
into the source. A `oneOf` becomes `anyOf` rather than nothing, and what would mean more than before without the keyword
goes with it: `additionalProperties: false` beside `properties` that are gone would forbid every key.
"""

from __future__ import annotations

import json
import re
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any, Generic, TypeVar

from dovetail.contracts.errors import RequestError
from dovetail.contracts.grammar import GrammarBackend, GrammarSpec, Kind
from dovetail.sdk.schemas import keywords, schema
from dovetail.sdk.schemas.keywords import MEANING
from dovetail.sdk.schemas.schema import escape
from dovetail.sdk.schemas.structural import schemas_with_places

R = TypeVar("R")
_NEVER = re.compile(r"[Uu]nsatisfiable|allows no text")
"""What no keyword is to blame for: no text conforms."""
_WORDS = re.compile(r"[A-Za-z]+")
_HOLDING = (keywords.HOLDING | {"$ref"}) - {"not", "if", "then", "else", "contains", "propertyNames"}
MAX_TRIALS = 400


def is_relaxable(code: str | None, message: str) -> bool:
    """Whether a refusal may be due to a keyword that can be left out."""
    return code not in ("grammar_too_large", "invalid_json_schema") and _NEVER.search(message) is None


def without(source: str, places: Sequence[str]) -> str:
    """Return a source without the keywords at some places."""
    return json.dumps(schema.leave_out(json.loads(source), places), ensure_ascii=False) if places else source


def keywords_in(spec: GrammarSpec) -> Iterator[tuple[str, str]]:
    """Yield pointer and name of every keyword that can be left out, inner ones behind outer ones."""
    root = json.loads(spec.source)
    for start, found in [("", root)] if spec.kind is Kind.JSON else schemas_with_places(root):
        for pointer, node in schema.every(found):
            if isinstance(node, dict):
                for key in node:
                    if (key in MEANING and key != "type") or key == "$ref":
                        yield f"{start}{pointer}/{escape(key)}", key


def relax_schema(spec: GrammarSpec, compile_: Callable[[GrammarSpec], R], until: float) -> tuple[R, tuple[str, ...]]:
    """Compile a grammar without as few of its keywords as can be found in time.

    Args:
        spec: The grammar; JSON or structural.
        compile_: Compiles one.
        until: When to be content with what was found, of `time.monotonic`.

    Returns:
        What `compile_` returned, and the places of what was left out.

    Raises:
        RequestError: No keyword is to blame.
    """
    try:
        return compile_(spec), ()
    except RequestError as error:
        if not is_relaxable(error.code, error.message):
            raise
        return _KeywordSearch(spec, compile_, until).run(error)


class _KeywordSearch(Generic[R]):
    """Looks for the keywords to leave out: all that may be to blame first, then as many of them back as possible."""

    def __init__(self, spec: GrammarSpec, compile_: Callable[[GrammarSpec], R], until: float) -> None:
        self._spec, self._compile, self._until = spec, compile_, until
        self._root = json.loads(spec.source)
        self._trials = 0
        self._best: R | None = None

    def run(self, error: RequestError) -> tuple[R, tuple[str, ...]]:
        """Search; see `relax_schema`."""
        found = list(keywords_in(self._spec))
        named = set(_WORDS.findall(error.message))
        blamed = [place for place, key in found if key in named or (key == "pattern" and "regex" in named)]
        everything = [place for place, _ in found]
        for gone in (blamed, everything):
            if gone and self._works(gone):
                return self._result(self._minimal(gone))
        raise error

    def _minimal(self, gone: list[str]) -> list[str]:
        """Put keywords back: those first that hold others, so that these go rather than all of them."""
        holding = [place for place in gone if place.rsplit("/", 1)[-1] in _HOLDING]
        holding.sort(key=lambda place: place.count("/"))
        rest = [place for place in gone if place not in set(holding)]
        holding = self._put_back(holding, rest)
        return holding + self._put_back(rest, holding)

    def _put_back(self, some: list[str], others: list[str]) -> list[str]:
        """Return those of some keywords that must stay out beside others: many are tried at a time, then fewer."""
        size = max(1, len(some))
        while some:
            start = 0
            while start < len(some):
                fewer = some[:start] + some[start + size :]
                if self._works(fewer + others):
                    some = fewer
                else:
                    start += size
            if size == 1 or not self._has_time():
                break
            size = max(1, size // 2)
        return some

    def _works(self, gone: list[str]) -> bool:
        if not gone or (self._best is not None and not self._has_time()):
            return False
        self._trials += 1
        source = json.dumps(schema.leave_out(self._root, gone), ensure_ascii=False)
        try:
            self._best = self._compile(replace(self._spec, source=source))
        except RequestError:
            return False
        return True

    def _has_time(self) -> bool:
        return self._trials < MAX_TRIALS and time.monotonic() < self._until

    def _result(self, gone: list[str]) -> tuple[R, tuple[str, ...]]:
        if self._best is None:
            raise AssertionError("nothing has worked")
        outer = [place for place in gone if not any(place.startswith(f"{other}/") for other in gone)]
        return self._best, tuple(outer)


# What in a schema costs a compiler most, and a grammar without it where compiling it takes too long.

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
