r"""Patterns that libraries read in another way than JSON Schema does: look-around, leaky classes, `\S`."""

from __future__ import annotations

import datetime
import json
import random
import re
from typing import Any

import jsonschema_rs
import pytest

from dovetail.contracts.grammar import (
    GrammarBackend,
    GrammarLimits,
    GrammarMatcher,
    GrammarSpec,
    Kind,
    Support,
    SupportLevel,
)
from dovetail.grammar.spec.fields import check_spec
from dovetail.plugins import Registry, load, make_plan
from dovetail.sdk.schemas.formats import FORMATS, PATTERNS
from dovetail_grammar.patterns import is_leaky, rewritten, tightened
from dovetail_testing.conformance.grammar_samples import small_vocabulary

AROUND = [
    "^(?!aws:).*$", "^(?!aws:)[ a-zA-Z+.:-]+$", "^(?!svc-)(?![-])(?!.*[-]$)(?!.*[-]{2})[a-z0-9-]+$",
    "^(?=.{2,5}$)[a-z]+(?:[._-][a-z]+)*$", r"^(?!\s*$).+$", r"^(?!\s+$).*$", "^(?!.* {2})[a-z ]*$",
    r"^(?!^lucene\.|built\.).*$", "^[a-z-]+(?<!-)$", "^(?!(true|false)$).*$", "^(?!a$|ab)[ab]*$", "^(?!.*ab)[abc]*$",
    r"^(?!.*\.)[a-z.]+$", r"^(?=.*\w).+$", "^(?!.*a$)[ab]+$", "^(?!(?:a|bc))[abc]+$", "^(?![Aa][Bb])[a-bA-B]+$",
    r"^(?!(?:a|b\.|true)$)",
]  # fmt: skip
PIECES = ["aws:", "svc-", "lucene.", "true", "false", "AB", "ab", "a", "b", "c", "-", "--", " ", "  ", ".", "x", "\t"]


def at_ends(pattern: str) -> re.Pattern[str]:
    r"""As JSON Schema reads it: `$` is the end of the text, and not also what stands before a last newline."""
    return re.compile(re.sub(r"(?<!\\)\$", r"\\Z", pattern))


@pytest.mark.parametrize("pattern", AROUND)
def test_look_around_at_the_ends_is_several_expressions(pattern: str) -> None:
    """None of which looks around, and which together match the same texts."""
    made = rewritten(pattern).parts
    assert not any("(?!" in part or "(?=" in part or "(?<" in part for part in made)
    whole, parts = at_ends(pattern), [at_ends(part) for part in made]
    rng = random.Random(1)
    for _ in range(2000):
        text = "".join(rng.choices(PIECES, k=rng.randint(0, 5)))
        assert (whole.search(text) is not None) == all(part.search(text) is not None for part in parts), text


@pytest.mark.parametrize("pattern", ["^(?!a", "(?<=a+)b\\1", "^(?!aws:)[\\p{L}]+(?!b)$", "^(?:(?=[a-z]{40})x){9,90}$"])
def test_what_is_not_known_to_be_plain_comes_back(pattern: str) -> None:
    """Alone, so that it is refused and named."""
    assert rewritten(pattern).parts == (pattern,)


@pytest.fixture(scope="module")
def backend() -> GrammarBackend:
    made: GrammarBackend = load(make_plan(Registry.scan(), grammar_backend="llguidance"), "compiler").get(
        "grammar_backend", "llguidance"
    )(small_vocabulary())
    return made


def matcher_of(backend: GrammarBackend, schema: Any) -> GrammarMatcher:
    spec = GrammarSpec(kind=Kind.JSON, source=json.dumps(schema))
    made = backend.compile(spec, GrammarLimits())
    return (backend.load(made) if isinstance(made, bytes) else made).matcher()


def accepts(matcher: GrammarMatcher, text: str) -> bool:
    fresh, ids = matcher.fork(), list(text.encode())
    return fresh.accept(ids) == len(ids) and fresh.accepting


@pytest.mark.parametrize("pattern", AROUND)
def test_look_around_is_enforced_in_full(backend: GrammarBackend, pattern: str) -> None:
    """Also beside other keywords of strings."""
    schema = {"type": "string", "pattern": pattern, "maxLength": 12}
    assert backend.supports(GrammarSpec(kind=Kind.JSON, source=json.dumps(schema))).level is SupportLevel.FULL
    matcher, whole, rng = matcher_of(backend, schema), at_ends(pattern), random.Random(2)
    for _ in range(300):
        text = "".join(rng.choices(PIECES, k=rng.randint(0, 4)))
        right = whole.search(text) is not None and len(text) <= 12
        assert accepts(matcher, json.dumps(text)) == right, text


def test_a_class_that_lets_an_escaped_quote_through_is_reported(backend: GrammarBackend) -> None:
    r"""Not rejected, but named: the library reads controls beside `\p{L}` as any escape, and no rewrite is known."""
    schema = {"type": "object", "properties": {"a": {"type": "string", "pattern": r"^[\p{L}\x01]{1,3000}$"}}}
    found = backend.supports(GrammarSpec(kind=Kind.JSON, source=json.dumps(schema)))
    assert found == Support.approximate(["/properties/a/pattern"])


def test_names_but_some_are_a_pattern_of_names(backend: GrammarBackend) -> None:
    """Look-ahead in a name's pattern, where one expression says it: no name that is excluded comes, and others do."""
    given = {"type": "object", "patternProperties": {"^(?!(?:ab|c)$)": {"const": 1}}, "additionalProperties": False}
    assert backend.supports(GrammarSpec(kind=Kind.JSON, source=json.dumps(given))).level is SupportLevel.FULL
    matcher = matcher_of(backend, given)
    for text in ("{}", '{"a":1,"abc":1}'):
        assert accepts(matcher, text), text
    for text in ('{"ab":1}', '{"c":1}', '{"abc":2}'):
        assert not accepts(matcher, text), text


def spellings(char: str) -> set[str]:
    return {json.dumps(char), json.dumps(char, ensure_ascii=False), f'"\\u{ord(char):04x}"'}


def random_class(rng: random.Random) -> str:
    parts = []
    for _ in range(rng.randint(1, 4)):
        low, high = sorted(rng.sample(range(128), 2))
        kinds = [
            f"\\x{low:02x}",
            f"\\x{low:02x}-\\x{high:02x}",
            r"\s",
            r"\d",
            r"\w",
            r"\n",
            r"\x00-\x1f",
            r"\"",
            r"\\",
            "a",
        ]
        parts.append(rng.choice([*kinds, r"\x20-\x7e", "#"]))
    return f"[{rng.choice(['^', ''])}{''.join(parts)}]"


@pytest.mark.parametrize("seed", range(10))
def test_what_is_not_leaky_lets_no_other_character_through(backend: GrammarBackend, seed: int) -> None:
    """In any spelling; and classes that exclude quotes are none of the leaky ones once rare controls are out."""
    rng = random.Random(seed)
    chars = [chr(i) for i in range(1, 128)]
    for _ in range(4):
        pattern = rng.choice(["^%s$", "^%s+$", "^(%s|x)$"]).replace("%s", random_class(rng))
        if is_leaky(tightened(pattern)):
            continue
        right, matcher = (
            re.compile(pattern.replace("$", r"\Z"), re.ASCII),
            matcher_of(backend, {"pattern": pattern, "type": "string"}),
        )
        for char in chars:
            offered = [text for text in spellings(char) if accepts(matcher, text)]
            assert right.search(char) or not offered, (pattern, offered)
            assert offered or not right.search(char) or not (char.isprintable() or char in "\n\t"), (pattern, char)


@pytest.mark.parametrize(
    "pattern",
    [
        '^[^"]*$',
        r"^[^\\]+$",
        '^[^<>:;,?"*|/]+$',
        r"^[^\s]*$",
        r"^\S+$",
        r"^[^\p{C}]+$",
        r"^[\w\s.-]*$",
        r"^[\w-_.]+$",
        r"^[\S]+$",
    ],
)
def test_everyday_classes_are_not_leaky(pattern: str) -> None:
    """As everyday patterns have them."""
    assert not is_leaky(tightened(pattern))


def test_a_byte_order_mark_is_white_space(backend: GrammarBackend) -> None:
    """As ECMAScript says, in and out of classes."""
    for pattern in (r"^\S$", r"^[^\s]$", r"^[^\sa]$"):
        matcher = matcher_of(backend, {"type": "string", "pattern": pattern})
        assert accepts(matcher, '"b"')
        assert not accepts(matcher, '"\ufeff"')


@pytest.mark.parametrize(
    ("pattern", "right", "wrong"),
    [
        (r"^\${.*?}$", "${x}", "$x"),
        (r"^{{[a-z]+}}$", "{{x}}", "x"),
        (r"^[\w-.]+$", "a-b.c", "a b"),
        (r"^[\w\s]+$", "a\tb c", "a-b"),
        (r"^\u{41}{2}$|^\x41$", None, "B"),
        (r"^a{2}$", "aa", "a"),
    ],
)
def test_what_only_some_read_is_written_for_all(
    backend: GrammarBackend, pattern: str, right: str | None, wrong: str
) -> None:
    """Braces and dashes that stand for themselves."""
    matcher = matcher_of(backend, {"type": "string", "pattern": pattern})
    assert right is None or accepts(matcher, json.dumps(right))
    assert not accepts(matcher, json.dumps(wrong))


@pytest.mark.parametrize("pattern", ['^[^"]$', r"^[a\s]", r"[a-z\s+_-]", r"^[^\\]{1,2}$", r"^\S$", r"^(?!a)[^b]$"])
def test_no_key_gets_past_a_pattern_where_others_may_come(backend: GrammarBackend, pattern: str) -> None:
    """One with a control character would pass for one that no pattern finds; so there are no such keys."""
    opened = {"type": "object", "patternProperties": {pattern: {"type": "integer"}}}
    closed = {**opened, "additionalProperties": False}
    for given in (opened, closed, {**opened, "additionalProperties": {"type": "null"}}):
        assert backend.supports(GrammarSpec(kind=Kind.JSON, source=json.dumps(given))).level is SupportLevel.FULL
        matcher, judge = matcher_of(backend, given), jsonschema_rs.validator_for(given)
        for char in [*map(chr, range(1, 128)), "\ufeff", "\u00a0", "é"]:
            for spelt in spellings(char):
                for value in ("1", '"x"', "null"):
                    text = f"{{{spelt}:{value}}}"
                    offered, right = accepts(matcher, text), judge.is_valid(json.loads(text))
                    assert right or not offered, text
                    is_usual = char.isprintable() or char in "\n\t"
                    assert offered or not right or not is_usual or "u00" in spelt, text


FORMAT_TEXTS = {
    "date": "2026-11-23", "date-time": "2026-11-23T01:02:03Z", "duration": "P1D", "email": "a.b@c.org",
    "hostname": "a-b.org", "idn-email": "é@c.org", "idn-hostname": "a.org", "ipv4": "1.2.3.4", "ipv6": "::1",
    "iri": "https://a.org/é", "iri-reference": "é/b?c#d", "json-pointer": "/a/~0", "relative-json-pointer": "1/a",
    "regex": r"^(?:a|[^b-]{1,3})+?\.\w*$", "time": "01:02:03Z",
    "uri": "https://a.org/b", "uri-reference": "../b-c?d#e-f", "uri-template": "/a{?b,c}",
    "uuid": "123e4567-e89b-12d3-a456-426614174000",
}  # fmt: skip


@pytest.mark.parametrize("name", sorted({*FORMATS, *PATTERNS}))
def test_every_format_is_enforced_alone_and_beside_a_pattern(backend: GrammarBackend, name: str) -> None:
    """An expression that the library cannot read would be left out, with its name."""
    text = FORMAT_TEXTS[name]
    for more in ({}, {"pattern": f"{re.escape(text[-1])}$"}):
        spec = GrammarSpec(kind=Kind.JSON, source=json.dumps({"type": "string", "format": name, **more}))
        assert backend.supports(spec).level is SupportLevel.FULL
        made = backend.compile(spec, GrammarLimits())
        grammar = backend.load(made) if isinstance(made, bytes) else made
        for written, expected in ((text, True), (f"{text} {{~", False)):
            ids, matcher = list(json.dumps(written, ensure_ascii=False).encode()), grammar.matcher()
            assert (matcher.accept(ids) == len(ids)) is expected, written


@pytest.mark.parametrize("name", ["hostname", "email", "idn-hostname", "idn-email"])
def test_no_host_is_too_long(name: str) -> None:
    """A host has 253 characters at most, however its labels are cut."""
    host = re.compile(PATTERNS[name])
    before = "x@" if "email" in name else ""
    for size, num in ((61, 3), (15, 7), (63, 3)):
        assert host.fullmatch(before + ".".join(["a" * size] * num))
    assert host.fullmatch(f"{before}a-b.{'a-' * 14}a.org")
    for size in range(1, 64):
        assert not host.fullmatch(before + ".".join(["a" * size] * (254 // (size + 1) + 1)))


EDGES = {
    r"\bfoo\b": (["foo", "a foo!", "foo-bar"], ["food", "afoo", ""]),
    r"(?!aws:)[a-z:]+": (["abc", "aws"], ["aws:x", "A"]),
    r"(?=.{2,3}$)[a-z]+": (["ab", "abc"], ["a", "abcd"]),
    r".*(?<!-)$": (["a", "a-b"], ["a-"]),
}


@pytest.mark.parametrize("pattern", EDGES)
def test_a_regex_looks_around_as_a_pattern_does(backend: GrammarBackend, pattern: str) -> None:
    """As the whole text, and as a part of a structural grammar; the edge of a word is where `search` would find it."""
    whole = pattern if pattern != r"\bfoo\b" else r".*\bfoo\b.*"
    tag = {"type": "structural_tag", "format": {"type": "regex", "pattern": whole}}
    for kind, source in ((Kind.REGEX, whole), (Kind.STRUCTURAL, json.dumps(tag))):
        spec = GrammarSpec(kind=kind, source=source)
        made = backend.compile(spec, GrammarLimits())
        grammar = backend.load(made) if isinstance(made, bytes) else made
        right, wrong = EDGES[pattern]
        for text in (*right, *wrong):
            matcher, ids = grammar.matcher(), list(text.encode())
            assert (matcher.accept(ids) == len(ids) and matcher.accepting) is (text in right), text


@pytest.mark.parametrize(
    ("schema", "right", "wrong"),
    [
        ({"const": "a\0b"}, "a\0b", "ab"),
        ({"enum": ["\0", "x"]}, "\0", ""),
        ({"pattern": r"^a\u0000?$", "type": "string"}, "a\0", "b\0"),
        ({"properties": {"\0": {"type": "integer"}}, "required": ["\0"], "additionalProperties": False}, {"\0": 1}, {}),
    ],
)
def test_a_nul_in_a_schema_is_a_character(backend: GrammarBackend, schema: Any, right: Any, wrong: Any) -> None:
    """JSON escapes it."""
    spec = GrammarSpec(kind=Kind.JSON, source=json.dumps(schema))
    check_spec(spec)
    assert backend.supports(spec).level is SupportLevel.FULL
    made = backend.compile(spec, GrammarLimits())
    grammar = backend.load(made) if isinstance(made, bytes) else made
    for value in (right, wrong):
        matcher, ids = grammar.matcher(), list(json.dumps(value).encode())
        assert (matcher.accept(ids) == len(ids) and matcher.accepting) is (value == right), value


def test_dates_are_those_of_the_calendar() -> None:
    """From the year 1 on: many a program has no year 0."""
    date = re.compile(PATTERNS["date"])
    for year in (0, 1, 4, 10, 100, 400, 1900, 2000, 2023, 2024, 9999):
        for month in range(14):
            for day in (0, 1, 28, 29, 30, 31, 32):
                try:
                    is_one = bool(datetime.date(year, month, day))
                except ValueError:
                    is_one = False
                assert bool(date.fullmatch(f"{year:04}-{month:02}-{day:02}")) is is_one


def test_ends_of_a_text_as_python_and_perl_write_them(backend: GrammarBackend) -> None:
    r"""`\A` and `\Z` are the ends of the whole text; a backslash before them makes them letters."""
    assert tightened(r"\A[a-z]+\Z") == "^[a-z]+$"
    assert tightened(r"a\\Z") == r"a\\Z"
    spec = GrammarSpec(kind=Kind.JSON, source=json.dumps({"type": "string", "pattern": r"\A[a-z]+\Z"}))
    made = backend.compile(spec, GrammarLimits())
    grammar = backend.load(made) if isinstance(made, bytes) else made
    for text, expected in (('"ab"', True), ('"a1"', False), ('"1a"', False)):
        matcher = grammar.matcher()
        assert (matcher.accept(list(text.encode())) == len(text)) is expected
