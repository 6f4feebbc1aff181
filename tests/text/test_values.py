"""Values that models write without JSON's quotes: Python literals, and text between tags."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dovetail.sdk.formats.python_literals import literal_json
from dovetail.sdk.formats.schema_types import types_of, value_text

values: st.SearchStrategy[Any] = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=4), inner, max_size=3),
    max_leaves=8,
)


@given(value=values)
def test_python_literals_become_json(value: Any) -> None:
    """Whatever Python prints of plain values, and whatever JSON does, is read back."""
    for written in (repr(value), json.dumps(value), json.dumps(value, ensure_ascii=False)):
        found = literal_json(written)
        assert found is not None
        assert json.loads(found) == value


@pytest.mark.parametrize(
    ("written", "value"),
    [
        ("(1, 2)", [1, 2]),
        ("(1,)", [1]),
        ("(1)", 1),
        ("{1, 2}", [1, 2]),
        ("()", []),
        ("{}", {}),
        ("{1: 'a'}", {"1": "a"}),
        ("'a' \"b\"", "ab"),
        ("r'\\d'", "\\d"),
        ("'\\d\\x41\\101\\u00e9\\U0001F389'", "\\dAA\u00e9\U0001f389"),
        ("+1_000", 1000),
        (".5e-3", 0.0005),
        ("[1, 2,]", [1, 2]),
        ("true", True),
    ],
)
def test_what_python_allows(written: str, value: Any) -> None:
    """Tuples and sets are lists, strings join, escapes mean what they mean in Python."""
    found = literal_json(written)
    assert found is not None
    assert json.loads(found) == value


@pytest.mark.parametrize("written", ["1e999", "9" * 5000, "-0.10", "1E+5", "[1.0, 1e400]"])
def test_numbers_of_json_stay_as_they_are(written: str) -> None:
    """No float is as large, or as exact."""
    assert literal_json(written) == written


@pytest.mark.parametrize(
    "written",
    [
        *("", "x", "f(1)", "1 + 1", "[1", "'a", "{1: 2, 3}", "[,]", "1 2", "__import__('os')", "1_0e999", "lambda: 1"),
        *("b'a'", "[" * 1000, "9_" * 5000 + "9", "a.b", "nan"),
    ],
)
def test_what_is_no_literal_is_refused(written: str) -> None:
    """Nothing is evaluated, and nothing raises."""
    assert literal_json(written) is None


@pytest.mark.parametrize(
    ("schema", "text", "json_text"),
    [
        ({"type": "integer"}, " 3 ", "3"),
        ({"type": "integer"}, "3.0", "3.0"),
        ({"type": "number"}, "3", "3"),
        ({"type": "boolean"}, "True", "true"),
        ({"type": "boolean"}, "yes", '"yes"'),
        ({"type": ["string", "null"]}, "null", "null"),
        ({"type": ["string", "integer"]}, "x", '"x"'),
        ({"type": ["string", "integer"]}, "7", "7"),
        ({"type": "object"}, '{"a": [1]}', '{"a": [1]}'),
        ({"type": "array"}, "[1, oops]", '"[1, oops]"'),
        ({"enum": [1, 2]}, "1", "1"),
        ({"enum": ["1", "2"]}, "1", '"1"'),
        ({"const": None}, "None", "null"),
        ({"$ref": "#/$defs/n"}, "4", "4"),
        ({"$ref": "#/$defs/loop"}, "4", "4"),
        ({"$ref": "http://x"}, "[4]", "[4]"),
        ({"anyOf": [{"type": "string"}, {"type": "null"}]}, "4", '"4"'),
        ({"anyOf": [{"type": "string"}, {}]}, "4", "4"),
        ({"properties": {}}, "{}", "{}"),
        ({"items": {}}, "[]", "[]"),
        ({}, '"quoted"', '"\\"quoted\\""'),
        ({}, "NaN", '"NaN"'),
        (True, "1", "1"),
        ({"type": "integer"}, "9" * 5000, '"' + "9" * 5000 + '"'),
        ({"type": "array"}, "[" * 100_000, '"' + "[" * 100_000 + '"'),
    ],
)
def test_text_becomes_a_value_that_the_schema_allows(schema: Any, text: str, json_text: str) -> None:
    """JSON of an allowed type passes as written; without a word of the schema, JSON that is no string does."""
    root = {"$defs": {"n": {"type": "integer"}, "loop": {"$ref": "#/$defs/loop"}}}
    assert value_text(text, types_of(schema, root)) == json_text
