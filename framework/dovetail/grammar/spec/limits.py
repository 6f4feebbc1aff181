"""Refusing a grammar by what can be seen without compiling it: size, NUL, nesting, and what is no schema at all."""

from __future__ import annotations

import json
import re
from typing import Any

from dovetail.contracts.errors import RequestError
from dovetail.contracts.grammar import GrammarLimits, GrammarSpec, Kind
from dovetail.sdk.expressions import ambiguity
from dovetail.sdk.schemas import schema, structural
from dovetail.sdk.schemas.references import check_references, may_name, may_refer

LIMITS = GrammarLimits()
_IN_JSON = (Kind.JSON, Kind.CHOICE, Kind.STRUCTURAL)
_BRACKETS = re.compile(r'[\[{}\]]|"[^"\\]*(?:\\.[^"\\]*)*(?:"|\\?\Z)', re.DOTALL)
"""Brackets, and strings, the last of which may have no end: each character is looked at once."""


def check_spec(spec: GrammarSpec, param: str | None = None, limits: GrammarLimits = LIMITS) -> None:
    """Check a grammar from outside.

    Args:
        spec: The grammar.
        param: The request's field, for the error.
        limits: Bounds.

    Raises:
        RequestError: With `param`, and the place where there is one.
    """
    try:
        _check(spec, limits)
    except RequestError as error:
        named = error.message if param is None else f"{param}: {error.message}"
        raise RequestError(named, param=param, code=error.code) from None


def check_schema(source: str, param: str, tool: str) -> None:
    """Check the schema of a tool's arguments.

    Raises:
        RequestError: With `param`, the tool's name and the place.
    """
    try:
        _check(GrammarSpec(kind=Kind.JSON, source=source), LIMITS)
    except RequestError as error:
        text = f"{param}: the parameters of the tool {tool!r}: {error.message}"
        raise RequestError(text, param=param, code=error.code) from None


def _check(spec: GrammarSpec, limits: GrammarLimits) -> None:
    try:
        size = len(spec.source.encode())
    except UnicodeEncodeError as error:
        raise RequestError(
            f"the grammar holds a lone surrogate at position {error.start}", code="invalid_grammar"
        ) from None
    check_size(size, limits)
    nul = spec.source.find("\0")
    if nul >= 0:
        text = (
            f"the grammar holds a NUL character at position {nul} ({spec.source[max(0, nul - 20) : nul]!r}); remove it"
        )
        raise RequestError(text, code="invalid_grammar")
    if spec.kind in _IN_JSON:
        check_nesting(spec.source, limits.max_nesting)
    if spec.kind is Kind.JSON:
        root = schema.parse(spec.source)
        schema.check(root)
        if may_refer(spec.source):
            check_references(root, is_named=may_name(spec.source))
    elif spec.kind is Kind.STRUCTURAL:
        structural.check(json.loads(spec.source))
    elif spec.kind is not Kind.JSON_OBJECT and not spec.source.strip():
        raise RequestError("the grammar is empty", code="invalid_grammar")
    if spec.kind is Kind.REGEX and (why := ambiguity(spec.source)) is not None:
        raise RequestError(f"the regex {why}", code="invalid_grammar")


def check_size(num_bytes: int, limits: GrammarLimits = LIMITS) -> None:
    """Refuse a grammar by its size.

    Raises:
        RequestError: `grammar_too_large`.
    """
    if num_bytes > limits.max_source_bytes:
        text = f"the grammar has {num_bytes} bytes; at most {limits.max_source_bytes} are allowed"
        raise RequestError(text, code="grammar_too_large")


def check_nesting(source: str, max_nesting: int) -> None:
    """Refuse JSON text that is nested too deeply, before anything recursive reads it.

    Raises:
        RequestError: `grammar_too_complex`.
    """
    if source.count("{") + source.count("[") <= max_nesting:
        return
    depth = 0
    for found in _BRACKETS.finditer(source):
        char = found[0]
        if char in "{[":
            depth += 1
            if depth > max_nesting:
                what = f"the grammar's JSON is nested more than {max_nesting} deep at position {found.start()}"
                text = f"{what}; flatten it, for instance with $ref"
                raise RequestError(text, code="grammar_too_complex")
        elif char in "}]":
            depth -= 1


def nesting(value: Any) -> int:
    """Depth of parsed JSON: 0 for a scalar."""
    depth, level = -1, [value]
    while level:
        depth += 1
        level = [
            inner
            for item in level
            if isinstance(item, (dict, list))
            for inner in (item.values() if isinstance(item, dict) else item)
        ]
    return depth
