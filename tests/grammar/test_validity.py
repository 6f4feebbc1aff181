"""Finished texts are judged by what ECMAScript means with an expression, not by what Python does."""

from __future__ import annotations

import json
import re
from typing import Any

import jsonschema_rs
import pytest

from dovetail.grammar.compile.validity import conforms
from dovetail.sdk.schemas import formats

TEXTS = [
    "",
    "a",
    "a\n",
    "\n",
    "7",
    "\u0667",
    "\u00e9",
    "_",
    " ",
    "\u00a0",
    "\ufeff",
    "\x1c",
    "\x85",
    "\u2028",
    "a b",
    "a-b",
]
TEXTS += ["a b", "a-b", "a\u00e9b", "$", "]", "^", "\\", "d", "k", "aa", "a7", "-", "\U0001f600", "\r", "w", "a]"]
PATTERNS = [
    "^a$", r"^a\$", "^[$]$", "a$|^7$", r"^\d$", r"^\D$", r"^\w+$", r"^\W$", r"^\s$", r"^\S$", r"^[\d-]$", r"^[\w]+$",
    r"^[^\w]$", r"^[\s]$", r"^[\S]$", r"^[^\S]$", r"^[\D]$", r"^[\W]$", r"^[^\d\s]$", r"^\\$", r"^[\]]$",
    r"^[\\]$", r"^[\^]$", "^(?=a$)", "^(?!a$)", r"(?<=a)$", r"^[a\]]+$", "", r"^[\d\D]$", r"^\/?a$",
]  # fmt: skip

DRAFT_4 = "http://json-schema.org/draft-04/schema#"


@pytest.mark.parametrize("pattern", PATTERNS)
def test_texts_and_names_are_judged_by_ecmascript(pattern: str) -> None:
    """As a validator says that reads expressions so; also of names, and what else may be named."""
    rest = {"patternProperties": {pattern: {"type": "integer"}}, "additionalProperties": False}
    unevaluated = {"patternProperties": {pattern: True}, "unevaluatedProperties": False}
    cases: list[tuple[Any, Any]] = [({"pattern": pattern}, text) for text in TEXTS]
    cases += [({"propertyNames": {"pattern": pattern}}, {text: 1}) for text in TEXTS]
    cases += [(each, {text: value}) for text in TEXTS for value in (1, "x") for each in (rest, unevaluated)]
    for schema, value in cases:
        expected = jsonschema_rs.validator_for(schema).is_valid(value)
        assert conforms(schema, json.dumps(value)) == expected, (schema, value)


@pytest.mark.parametrize(
    ("schema", "text", "expected"),
    [
        ({"type": "integer", "minimum": -(2**63), "maximum": 2**63 - 1}, str(2**63 - 1), True),
        ({"type": "integer", "minimum": -(2**63), "maximum": 2**63 - 1}, str(2**63), False),
        ({"minimum": -1e300, "exclusiveMaximum": 1e300}, "-1e299", True),
        (
            {"$schema": "http://json-schema.org/draft-04/schema#", "minimum": 1e30, "exclusiveMinimum": True},
            "1e30",
            False,
        ),
        ({"multipleOf": 0.1}, "0.3", True),
        ({"multipleOf": 0.01}, "0.57", True),
        ({"multipleOf": 0.01}, "0.571", False),
        ({"multipleOf": 3}, "1e300", False),
    ],
)
def test_numbers_are_judged_as_they_are_written(schema: Any, text: str, expected: bool) -> None:
    """By bounds beyond what backends count with, and by fractions that no floating-point number is."""
    assert conforms(schema, text) is expected


def test_a_final_newline_is_no_end() -> None:
    """Python's own `$` would stand before it."""
    assert conforms({"pattern": "^a$"}, '"a"')
    assert not conforms({"pattern": "^a$"}, '"a\\n"')
    assert not conforms({"patternProperties": {"^a$": True}, "additionalProperties": False}, '{"a\\n": 1}')


@pytest.mark.parametrize(
    ("pattern", "right", "wrong"),
    [
        (r"a\b", "a\u00e9b", "ab"), (r"^a\B", "ab", "a\u00e9b"), ("^[^]$", "\n", ""), ("[]", None, "a"),
        ("a|[]", "a", "b"),
    ],
)  # fmt: skip
def test_what_the_other_validator_reads_otherwise(pattern: str, right: str | None, wrong: str) -> None:
    """Edges of words are between letters of ASCII, and a class may be empty: ECMA-262, 22.2.2."""
    assert right is None or conforms({"pattern": pattern}, json.dumps(right))
    assert not conforms({"pattern": pattern}, json.dumps(wrong))


def test_what_is_no_expression_judges_nothing() -> None:
    """A bracket too many does not end what is put around."""
    with pytest.raises(re.error):
        conforms({"pattern": "a)(b"}, '"ab"')


def test_names_of_groups_and_equal_expressions() -> None:
    """Python writes names in another way; two expressions that it writes alike both say something."""
    schema: dict[str, Any] = {"pattern": r"^(?<one>[ab])\k<one>$"}
    assert conforms(schema, '"bb"')
    assert not conforms(schema, '"ab"')
    schema = {"patternProperties": {r"\d": {"minimum": 1}, "[0-9]": {"maximum": 1}}}
    assert [conforms(schema, f'{{"7": {value}}}') for value in (0, 1, 2)] == [False, True, False]


def test_the_schema_is_judged_by_again() -> None:
    """It is left as it was."""
    schema = {"type": "object", "properties": {"a": {"pattern": r"^\d$"}}, "patternProperties": {"^b$": False}}
    before = json.dumps(schema)
    for _ in range(2):
        assert conforms(schema, '{"a": "7"}')
        assert not conforms(schema, '{"a": "7\\n"}')
    assert json.dumps(schema) == before


@pytest.mark.parametrize(
    ("schema", "text", "wanted"),
    [
        ({"$dynamicRef": "#n", "$defs": {"n": {"$dynamicAnchor": "n", "type": "integer"}}}, "1", True),
        ({"$dynamicRef": "#n", "$defs": {"n": {"$dynamicAnchor": "n", "type": "integer"}}}, '"x"', False),
        ({"items": {"$dynamicRef": "#/$defs/n"}, "$defs": {"n": {"const": 1}}}, "[1, 2]", False),
        ({"properties": {"a": {"$ref": "https://example.com/x.json"}}}, '{"a": 1}', None),
        ({"not": {"$ref": "https://example.com/x.json"}}, "1", None),
        ({"if": {"$ref": "https://example.com/x.json"}, "then": {"type": "string"}}, "1", None),
        ({"oneOf": [{"$ref": "https://example.com/x.json"}, {"type": "integer"}]}, "1", None),
        ({"$ref": "https://example.com/x.json", "unevaluatedProperties": False}, '{"a": 1}', None),
        ({"not": {"type": "string", "format": "hostname"}}, '"-a.org"', None),
        ({"allOf": [{"$ref": "https://example.com/x.json"}, {"type": "string"}]}, "1", False),
        ({"properties": {"a": {"$ref": "https://example.com/x.json"}}, "required": ["b"]}, "{}", False),
        ({"$ref": "http://json-schema.org/draft-07/schema#"}, '{"type": 7}', False),
        ({"type": "integer", "minimum": 0, "exclusiveMinimum": True}, "0", False),
        ({"$schema": "http://json-schema.org/draft-04/schema#", "minimum": 0, "exclusiveMinimum": True}, "0", False),
    ],
)
def test_the_schema_as_it_came_is_judged_by(schema: Any, text: str, wanted: bool | None) -> None:
    """Dynamic references are followed; one to a schema that is not at hand leaves no verdict, unless all else fails."""
    assert conforms(schema, text) is wanted


@pytest.mark.parametrize(
    ("name", "text", "expected"),
    [
        ("time", "08:30:06Z", True), ("time", "08:30:06 PST", False), ("time", "24:00:00Z", False),
        ("time", "15:59:60-08:00", True), ("time", "22:59:60Z", False), ("time", "1\u09e8:00:00Z", False),
        ("date-time", "2024-02-29t10:00:00.5+23:59", True), ("date-time", "2023-02-29T10:00:00Z", False),
        ("date-time", "2024-02-29", False), ("duration", "PT36H", True), ("duration", "PT1D", False),
        ("json-pointer", "/a~0b", True), ("json-pointer", "/foo/bar~", False),
        ("relative-json-pointer", "1/a", True), ("relative-json-pointer", "01/a", False),
        ("hostname", "a-b.org", True), ("hostname", "-a.org", None), ("hostname", "xn--4gbwdl.xn--wgbh1c", None),
        ("uri", "https://a.org/b", True), ("uri", "/abc", None), ("uri", "http://[::1]/", None),
        ("email", "a.b@c.org", True), ("email", "2962", False), ("email", ".a@c.org", None),
        ("uri-template", "{a", None), ("iri", "https://a.org/\u00e9", True), ("ipv4", "256.1.1.1", False),
        ("regex", "^(abc]", False), ("regex", r"^a+$", True), ("made-up", "x", True),
    ],
)  # fmt: skip
def test_formats_are_told_or_nobody_knows(name: str, text: str, expected: bool | None) -> None:
    """Never called valid without knowing; another fault is told all the same."""
    schema = {"type": "object", "properties": {"a": {"type": "string", "format": name}, "b": {"type": "integer"}}}
    assert conforms(schema, json.dumps({"a": text})) is expected
    assert conforms(schema, json.dumps({"a": text, "b": "x"})) is False
    assert conforms({"type": ["string", "integer"], "format": name}, "3") is True


@pytest.mark.parametrize("unit", ["a", "1-", "%20", "/", "a|", "\u00e9", "a.", "(a", "[a-", "{a,", "1:", "~0"])
def test_long_texts_are_matched_with_formats_soon(unit: str) -> None:
    """No expression of a format tries each way to divide a text: that would take years."""
    found = {
        name for name, one in (formats.PATTERNS | formats.TEXT_PATTERNS).items() if re.fullmatch(one, f"{100 * unit} ")
    }
    assert found <= {"json-pointer", "regex"}


def test_content_as_draft_7_asks_for_it_is_not_known() -> None:
    """Nobody here reads it."""
    schema = {
        "$schema": "http://json-schema.org/draft-07/schema#",
        "type": "string",
        "contentMediaType": "application/json",
    }
    assert conforms(schema, '"{:}"') is None
    assert conforms(schema, "1") is False
    assert conforms({**schema, "$schema": "https://json-schema.org/draft/2020-12/schema"}, '"{:}"') is True
