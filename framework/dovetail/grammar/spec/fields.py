"""The grammar of a request, in every spelling that clients use, as one `GrammarSpec`.

OpenAI: `response_format`. SGLang: `regex`, `ebnf`, `json_schema`, `structural_tag`. vLLM: `structured_outputs` with one
of `json`, `regex`, `choice`, `grammar`, `structural_tag`. More than one in a request is an error.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

import msgspec

from dovetail.contracts.errors import RequestError
from dovetail.contracts.grammar import GrammarLimits, GrammarSpec, Kind
from dovetail.sdk.expressions import ambiguity
from dovetail.sdk.schemas import schema, structural
from dovetail.sdk.schemas.references import check_references, may_name, may_refer

NAMES = ("response_format", "regex", "ebnf", "json_schema", "structural_tag", "structured_outputs")
FORMATS = ("text", "json_object", "json_schema", "regex", "ebnf", "structural_tag")
_OUTPUTS = ("json", "json_object", "regex", "choice", "grammar", "structural_tag")
_LARK = re.compile(r"^\s*(?:start|%llguidance|%import|%ignore)\b", re.MULTILINE)
_GBNF = re.compile(r"::=")
MAX_NESTING = 64
_SPACING = ("disable_any_whitespace", "whitespace_pattern")
_SPACES = re.compile(r"(?:\\[stnr]|[ \t\n\r\[\]()*+?|]|\{[0-9,]+\})*")


@dataclass(frozen=True, slots=True)
class RequestedGrammar:
    """A grammar and the field it came from."""

    spec: GrammarSpec
    param: str


def read_grammar(fields: Mapping[str, Any]) -> RequestedGrammar | None:
    """Return the request's grammar, checked as far as that needs no backend; None if it has none.

    Args:
        fields: Values by name, of `NAMES`; None or absent is not given.

    Raises:
        RequestError: Two grammars, an unknown form, or one that is wrong in itself; names the field.
    """
    given = [(name, value) for name in NAMES if (value := fields.get(name)) is not None]
    found = [asked for name, value in given if (asked := _READERS[name](value, name)) is not None]
    if len(found) > 1:
        names = " and ".join(asked.param for asked in found)
        raise RequestError(f"{names} both constrain the output; give one", param=found[1].param, code="invalid_value")
    if not found:
        return None
    check_spec(found[0].spec, found[0].param)
    return found[0]


def json_spec(schema: Any, param: str, *, strict: bool = False) -> GrammarSpec:
    """Return the spec of a JSON schema, given as text or as JSON."""
    return GrammarSpec(kind=Kind.JSON, source=_json_text(schema, param), strict=strict)


def _response_format(value: Any, name: str) -> RequestedGrammar | None:
    if not isinstance(value, Mapping):
        raise _wrong(name, "must be an object")
    kind = value.get("type")
    if kind not in FORMATS:
        raise _wrong(f"{name}", f"type must be one of {', '.join(FORMATS)} (given: {kind!r})")
    if kind == "text":
        return None
    if kind == "json_object":
        schema = value.get("schema")  # llama.cpp's and Together's clients say it so
        any_object = RequestedGrammar(GrammarSpec(kind=Kind.JSON_OBJECT, source=""), name)
        return any_object if schema is None else _json(schema, f"{name}.schema")
    if kind == "json_schema":
        return _openai_schema(value, name)
    if kind == "structural_tag":
        return _structural(value, name)
    text = value.get("pattern", value.get("regex")) if kind == "regex" else value.get("grammar", value.get("ebnf"))
    return (_regex if kind == "regex" else _grammar)(text, f"{name}.{'pattern' if kind == 'regex' else 'grammar'}")


def _openai_schema(value: Mapping[str, Any], name: str) -> RequestedGrammar:
    inner = value.get("json_schema")
    if not isinstance(inner, Mapping):
        raise _wrong(f"{name}.json_schema", 'must be an object: {"name": …, "schema": {…}}')
    schema, where = inner.get("schema", inner.get("schema_")), f"{name}.json_schema.schema"
    if schema is None:
        raise _wrong(where, "is required")
    strict = inner.get("strict")
    if strict not in (None, True, False):
        raise _wrong(f"{name}.json_schema.strict", "must be true or false")
    return RequestedGrammar(json_spec(schema, where, strict=bool(strict)), where)


def _json(value: Any, name: str) -> RequestedGrammar:
    return RequestedGrammar(json_spec(value, name), name)


def _regex(value: Any, name: str) -> RequestedGrammar:
    if not isinstance(value, str):
        raise _wrong(name, "must be a string: a regular expression")
    return RequestedGrammar(GrammarSpec(kind=Kind.REGEX, source=value), name)


def _grammar(value: Any, name: str) -> RequestedGrammar:
    """Read a grammar in Lark's dialect or GBNF, told apart by how rules are written."""
    if not isinstance(value, str):
        raise _wrong(name, "must be a string: a grammar in Lark's dialect or GBNF")
    is_lark = _LARK.search(value) is not None and _GBNF.search(value) is None
    return RequestedGrammar(GrammarSpec(kind=Kind.LARK if is_lark else Kind.EBNF, source=value), name)


def _choice(value: Any, name: str) -> RequestedGrammar:
    if not isinstance(value, list) or not value or not all(isinstance(item, str) and item for item in value):
        raise _wrong(name, "must be a list of one or more strings that are not empty")
    return RequestedGrammar(GrammarSpec(kind=Kind.CHOICE, source=json.dumps(value, ensure_ascii=False)), name)


def _structural(value: Any, name: str) -> RequestedGrammar:
    text = _json_text(value, name)
    try:
        json.loads(text)
    except (ValueError, RecursionError):
        raise _wrong(name, "must be an object, or the text of one") from None
    return RequestedGrammar(GrammarSpec(kind=Kind.STRUCTURAL, source=text), name)


def _structured_outputs(value: Any, name: str) -> RequestedGrammar | None:
    if not isinstance(value, Mapping):
        raise _wrong(name, f"must be an object with one of {', '.join(_OUTPUTS)}")
    given = {key: item for key, item in value.items() if item is not None}
    unknown = [key for key in given if key not in (*_OUTPUTS, *_SPACING)]
    if unknown:
        raise _wrong(f"{name}.{unknown[0]}", f"is not known; possible: {', '.join((*_OUTPUTS, *_SPACING))}")
    spaces = _spacing(given, name)
    asked = _output(given, name)
    return asked if asked is None else replace(asked, spec=replace(asked.spec, **spaces))


def _spacing(given: dict[str, Any], name: str) -> dict[str, Any]:
    """Take the fields about whitespace between JSON tokens out of `structured_outputs`."""
    compact, pattern = given.pop("disable_any_whitespace", False), given.pop("whitespace_pattern", None)
    if not isinstance(compact, bool):
        raise _wrong(f"{name}.disable_any_whitespace", "must be true or false")
    if pattern is not None and not (isinstance(pattern, str) and len(pattern) <= 64 and _SPACES.fullmatch(pattern)):
        raise _wrong(f"{name}.whitespace_pattern", r"must match whitespace only, such as [ \n]? or \s{0,4}")
    if (compact or pattern is not None) and not {"json", "json_object"} & given.keys():
        raise _wrong(name, "holds fields about whitespace, which are for json and json_object")
    return {"max_whitespace": 0} if compact else {"whitespace": pattern}


def _output(given: Mapping[str, Any], name: str) -> RequestedGrammar | None:
    if len(given) > 1:
        raise _wrong(name, f"holds {' and '.join(given)}, which both constrain the output; give one")
    for key, item in given.items():
        where = f"{name}.{key}"
        if key == "json_object":
            return RequestedGrammar(GrammarSpec(kind=Kind.JSON_OBJECT, source=""), where) if item is True else None
        readers = {"json": _json, "regex": _regex, "choice": _choice, "grammar": _grammar}
        return readers.get(key, _structural)(item, where)
    return None


_READERS = {
    "response_format": _response_format,
    "regex": _regex,
    "ebnf": _grammar,
    "json_schema": _json,
    "structural_tag": _structural,
    "structured_outputs": _structured_outputs,
}


def _json_text(value: Any, param: str) -> str:
    """Return JSON text; a client's own text as it is, so that equal texts share a compiled grammar."""
    if isinstance(value, str):
        return value
    if nesting(value) > MAX_NESTING:
        text = f"{param} is nested more than {MAX_NESTING} deep; flatten it, for instance with $ref"
        raise RequestError(text, param=param, code="grammar_too_complex")
    for key in _strange_keys(value):
        raise _wrong(param, f"must be JSON: its key {key!r:.80} is no text; write it as a string")
    try:
        check_size(len(msgspec.json.encode(value)))  # Python's writer takes five times the text's memory
        return json.dumps(value, ensure_ascii=False, allow_nan=False)
    except RequestError as error:
        raise RequestError(f"{param}: {error.message}", param=param, code=error.code) from None
    except (TypeError, ValueError) as error:
        raise _wrong(param, f"must be JSON: {error}") from None


def _strange_keys(value: Any) -> Iterator[Any]:
    """Yield the keys of objects that are no texts: Python's writer would make texts of them."""
    yield from (key for key in (value if isinstance(value, dict) else ()) if not isinstance(key, str))
    for part in value.values() if isinstance(value, dict) else value if isinstance(value, list | tuple) else ():
        yield from _strange_keys(part)


def _wrong(param: str, why: str) -> RequestError:
    return RequestError(f"{param} {why}", param=param, code="invalid_value")


# Refusing a grammar by what can be seen without compiling it: size, NUL, nesting, and what is no schema at all.

LIMITS = GrammarLimits()
_IN_JSON = (Kind.JSON, Kind.CHOICE, Kind.STRUCTURAL)
_BRACKETS = re.compile(r'[\[{}\]]|"[^"\\]*(?:\\.[^"\\]*)*(?:"|\\?\Z)', re.DOTALL)
"""Brackets, and strings, the last of which may have no end: each character is looked at once."""


def check_spec(spec: GrammarSpec, param: str | None = None, where: str | None = None) -> None:
    """Check a grammar from outside.

    Args:
        spec: The grammar.
        param: The request's field, for the error.
        where: What the message begins with; None: the field.

    Raises:
        RequestError: With `param`, and the place where there is one.
    """
    try:
        _check(spec)
    except RequestError as error:
        where = where or param
        named = error.message if where is None else f"{where}: {error.message}"
        raise RequestError(named, param=param, code=error.code) from None


def _check(spec: GrammarSpec) -> None:
    try:
        size = len(spec.source.encode())
    except UnicodeEncodeError as error:
        raise RequestError(
            f"the grammar holds a lone surrogate at position {error.start}", code="invalid_grammar"
        ) from None
    check_size(size)
    nul = spec.source.find("\0")
    if nul >= 0:
        text = (
            f"the grammar holds a NUL character at position {nul} ({spec.source[max(0, nul - 20) : nul]!r}); remove it"
        )
        raise RequestError(text, code="invalid_grammar")
    if spec.kind in _IN_JSON:
        check_nesting(spec.source)
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


def check_size(num_bytes: int) -> None:
    """Refuse a grammar by its size.

    Raises:
        RequestError: `grammar_too_large`.
    """
    if num_bytes > LIMITS.max_source_bytes:
        text = f"the grammar has {num_bytes} bytes; at most {LIMITS.max_source_bytes} are allowed"
        raise RequestError(text, code="grammar_too_large")


def check_nesting(source: str) -> None:
    """Refuse JSON text that is nested too deeply, before anything recursive reads it.

    Raises:
        RequestError: `grammar_too_complex`.
    """
    if source.count("{") + source.count("[") <= LIMITS.max_nesting:
        return
    depth = 0
    for found in _BRACKETS.finditer(source):
        char = found[0]
        if char in "{[":
            depth += 1
            if depth > LIMITS.max_nesting:
                what = f"the grammar's JSON is nested more than {LIMITS.max_nesting} deep at position {found.start()}"
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
