"""Grammars to test with where an author gives none: right ones, wrong ones, and those that are often ignored."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial

from dovetail.contracts.grammar import GrammarSpec, Kind, Vocabulary
from dovetail_testing.samples import GrammarSample

_WEATHER = json.dumps(
    {
        "type": "object",
        "properties": {"city": {"type": "string"}, "days": {"type": "integer"}},
        "required": ["city"],
        "additionalProperties": False,
    }
)
_PIECES = [
    b'{"', b'":', b'"}', b'",', b'": ', b'"city', b'city":"', b"Paris", b"days", b"true", b"false", b"null", b"[]",
    b"yes", b"ye", b"no", b"not", b" sure", b" thanks", b"12", b"34", b"ab", b"cd", b"123ab", b"}", b'{"city":"',
    "é".encode(), "日本".encode(), "日".encode()[:2], b"  ", b"\n", b"nonsense",
]  # fmt: skip


def _sample(kind: Kind, source: str, accepts: Sequence[str], rejects: Sequence[str]) -> GrammarSample:
    return GrammarSample(GrammarSpec(kind=kind, source=source), accepts, rejects)


SAMPLES: list[GrammarSample] = [
    _sample(
        Kind.JSON, _WEATHER, ['{"city":"Paris"}', '{"city":"x","days":3}'], ["{}", "[1]", '{"city":3}', '{"city":"x"']
    ),
    _sample(Kind.JSON, '{"enum": ["a", "bc", 3]}', ['"a"', '"bc"', "3"], ['"b"', "4", "null", '"a']),
    _sample(Kind.JSON, '{"const": 12}', ["12"], ["1", "123", "2"]),
    _sample(Kind.JSON_OBJECT, "", ["{}", '{"a":1}'], ["[1]", "1", '{"a"']),
    _sample(Kind.REGEX, "[0-9]{2,4}(ab|cd)?", ["12", "1234", "123ab"], ["1", "12345", "12ef", "ab", "12a"]),
    _sample(Kind.REGEX, "é+|日本", ["éé", "日本"], ["日", "e", "é日本"]),
    _sample(Kind.EBNF, 'root ::= ("yes" | "no") " thanks"?', ["yes", "no thanks"], ["maybe", "yes than", "thanks"]),
    _sample(Kind.LARK, 'start: ("yes" | "no") " thanks"?', ["yes", "no thanks"], ["maybe", "yes than", "thanks"]),
    _sample(Kind.CHOICE, '["yes", "no", "not sure"]', ["yes", "no", "not sure"], ["not", "ye", "yess", "maybe"]),
]

WRONG: dict[Kind, Sequence[str]] = {
    Kind.JSON: ("{", '{"type": "nonsense"}', '{"type": "object", "properties": 3}'),
    Kind.REGEX: ("(", "[z-a]"),
    Kind.EBNF: ("root ::= (", "nothing at all"),
    Kind.LARK: ("start: (", "%%%"),
    Kind.CHOICE: ("no json", '{"a": 1}'),
    Kind.STRUCTURAL: ("{",),
}
"""Sources that no backend can read."""

HOSTILE: dict[Kind, Sequence[str]] = {
    Kind.REGEX: ("(((a{1,90}){1,90}){1,90}){1,90}",),
    Kind.JSON: (json.dumps({"type": "array", "items": {"type": "string", "maxLength": 30000}, "maxItems": 3000}),),
    Kind.CHOICE: (json.dumps([f"{n * 7919:x}" * 12 for n in range(20_000)]),),
}
"""Sources that may take long to compile."""


@dataclass(frozen=True, slots=True)
class Trap:
    """A schema whose keyword backends like to ignore, with an instance that only the keyword rules out."""

    keyword: str
    schema: str
    invalid: str


TRAPS = [
    Trap("not", '{"type": "string", "not": {"const": "a"}}', '"a"'),
    Trap("uniqueItems", '{"type": "array", "items": {"type": "integer"}, "uniqueItems": true}', "[1,1]"),
    Trap("multipleOf", '{"type": "integer", "multipleOf": 7}', "8"),
    Trap("contains", '{"type": "array", "items": {"type": "integer"}, "contains": {"const": 1}}', "[2]"),
    Trap("maximum", '{"type": "integer", "maximum": 5}', "6"),
    Trap("pattern", '{"type": "string", "pattern": "^a+$"}', '"b"'),
    Trap("maxLength", '{"type": "string", "maxLength": 2}', '"abc"'),
    Trap("const", '{"const": 1}', "2"),
    Trap("$ref", '{"$defs": {"x": {"const": 1}}, "$ref": "#/$defs/x"}', "2"),
    Trap(
        "minProperties",
        '{"type": "object", "additionalProperties": {"type": "integer"}, "minProperties": 2}',
        '{"a":1}',
    ),
    Trap(
        "dependentRequired",
        '{"type": "object", "properties": {"a": {"type": "integer"}, "b": {"type": "integer"}}, '
        '"additionalProperties": false, "dependentRequired": {"a": ["b"]}}',
        '{"a":1}',
    ),
    Trap(
        "if",
        '{"type": "object", "properties": {"a": {"type": "integer"}, "b": {"type": "integer"}}, '
        '"additionalProperties": false, "if": {"required": ["a"]}, "then": {"required": ["b"]}}',
        '{"a":1}',
    ),
]


def longest(tokens: Sequence[bytes], text: str) -> list[int]:
    """Encode a text by the longest token at each place."""
    data, ids = text.encode(), {token: i for i, token in reversed(list(enumerate(tokens))) if token}
    found: list[int] = []
    place = 0
    while place < len(data):
        end = next(end for end in range(len(data), place, -1) if data[place:end] in ids)
        found.append(ids[data[place:end]])
        place = end
    return found


def small_vocabulary(*, with_encode: bool = True) -> Vocabulary:
    """Return every byte as a token, some longer tokens, two end tokens, a silent one, and logits wider than all.

    Args:
        with_encode: False as in a process that compiles.
    """
    tokens = [bytes([byte]) for byte in range(256)] + _PIECES
    first = len(tokens)
    tokens += [b"", b"", b""]
    return Vocabulary(
        tokens=tokens,
        size=len(tokens) + 9,
        eos_ids=frozenset({first, first + 1}),
        special_ids=frozenset({first, first + 1, first + 2}),
        fingerprint="dovetail-testing-1",
        encode=partial(longest, tokens) if with_encode else None,
    )
