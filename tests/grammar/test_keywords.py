"""Line by line: every keyword, generated texts, formats, escapes, several ends, backends against each other."""

from __future__ import annotations

import datetime
import ipaddress
import json
import random
import re
import uuid
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from jsonschema.validators import validator_for
from schema_cases import CASES, DRAFT7

from dovetail.contracts.errors import RequestError
from dovetail.contracts.grammar import (
    CompiledGrammar,
    GrammarBackend,
    GrammarLimits,
    GrammarSpec,
    Kind,
    SupportLevel,
    Vocabulary,
)
from dovetail.grammar.compile.validity import conforms
from dovetail.grammar.spec.route import GrammarRouter
from dovetail.plugins import Registry, load, make_plan
from dovetail.sdk.masks import ids_of
from dovetail_server.bench.grammar_schemas import schemas

NAMES = ("llguidance", "outlines", "xgrammar")
KEYWORDS = {
    "draft 2020-12": """
        $schema $id $ref $anchor $dynamicRef $dynamicAnchor $vocabulary $comment $defs allOf anyOf oneOf not if then
        else dependentSchemas prefixItems items contains properties patternProperties additionalProperties propertyNames
        unevaluatedItems unevaluatedProperties type enum const multipleOf maximum exclusiveMaximum minimum
        exclusiveMinimum maxLength minLength pattern maxItems minItems uniqueItems maxContains minContains maxProperties
        minProperties required dependentRequired title description default deprecated readOnly writeOnly examples format
        contentEncoding contentMediaType contentSchema""",
    "draft 7": "definitions dependencies additionalItems",
}


@pytest.fixture(scope="module")
def backends(small: Vocabulary) -> Mapping[str, GrammarBackend]:
    """All built-in backends over the small vocabulary."""
    made: dict[str, GrammarBackend] = {}
    for name in NAMES:
        pytest.importorskip({"outlines": "outlines_core"}.get(name, name))
        plan = make_plan(Registry.scan(), grammar_backend=name)
        made[name] = load(plan, "compiler").get("grammar_backend", name)(small)
    return made


def compiled(backend: GrammarBackend, spec: GrammarSpec) -> CompiledGrammar:
    result = backend.compile(spec, GrammarLimits())
    return backend.load(result) if isinstance(result, bytes) else result


def json_spec(schema: Any) -> GrammarSpec:
    return GrammarSpec(kind=Kind.JSON, source=json.dumps(schema, ensure_ascii=False), max_whitespace=1)


def matches(grammar: CompiledGrammar, small: Vocabulary, text: str) -> bool:
    ids = [small.tokens.index(bytes([byte])) for byte in text.encode()]
    matcher = grammar.matcher()
    return matcher.accept(ids) == len(ids) and matcher.accepting


def texts(grammar: CompiledGrammar, small: Vocabulary, num: int, seed: int = 0, most: int = 150) -> Iterator[str]:
    """Random texts of a grammar, drawn from its masks, closing what is open soon."""
    mask = np.zeros((1, small.mask_words), dtype=np.int32)
    for number in range(num):
        rng, matcher, text = random.Random(seed + number), grammar.matcher(), b""
        for _ in range(most):
            matcher.fill(mask, 0)
            allowed = ids_of(mask[0])
            if small.eos_ids & set(allowed) and rng.random() < 0.4:
                yield text.decode(errors="replace")
                break
            rest = [t for t in allowed if t not in small.eos_ids]
            if not rest:
                yield text.decode(errors="replace")
                break
            closing = [t for t in rest if small.tokens[t][:1] in (b'"', b"}", b"]")]
            token = rng.choice(closing if closing and rng.random() < 0.4 else rest)
            assert matcher.accept([token]) == 1
            text += small.tokens[token]


def is_valid(schema: Any, text: str) -> bool:
    return bool(validator_for(schema, default=validator_for(True))(schema).is_valid(json.loads(text)))


def keys_of(value: Any) -> set[str]:
    if isinstance(value, dict):
        return set(value).union(*map(keys_of, value.values()))
    return set().union(*map(keys_of, value)) if isinstance(value, list) else set()


def test_every_keyword_has_instances() -> None:
    """The table of instances holds every keyword of draft 2020-12, and those that only draft 7 has."""
    used = set().union(*(keys_of(schema) for schema, _, _ in CASES))
    wanted = {word for words in KEYWORDS.values() for word in words.split()}
    assert wanted <= used
    assert DRAFT7 in {schema.get("$schema") for schema, _, _ in CASES if isinstance(schema, dict)}


@pytest.mark.parametrize("name", NAMES)
def test_what_is_generated_validates(backends: Mapping[str, GrammarBackend], small: Vocabulary, name: str) -> None:
    """Random texts within the masks of every grammar that a backend calls FULL conform, as `jsonschema` judges."""
    backend = backends[name]
    num_texts = 0
    for schema, _, _ in CASES:
        spec = json_spec(schema)
        support = backend.supports(spec)
        if "3000" in spec.source or support.level is not SupportLevel.FULL:
            continue
        try:
            grammar = compiled(backend, support.to_compile(spec))
        except RequestError:
            continue  # honest: the next way is tried
        for text in texts(grammar, small, 3):
            assert is_valid(schema, text), (schema, text)
            num_texts += 1
    assert num_texts > {"llguidance": 120, "outlines": 40, "xgrammar": 90}[name]


@pytest.mark.parametrize(
    ("first", "second"), [("llguidance", "xgrammar"), ("llguidance", "outlines"), ("xgrammar", "outlines")]
)
def test_backends_agree_on_schemas_that_both_enforce(
    backends: Mapping[str, GrammarBackend], small: Vocabulary, first: str, second: str
) -> None:
    """Where two are FULL, what one generates and `json.dumps` rewrites is a text of the other; both ways."""
    made = [schema for schema, _, _ in CASES] + schemas(40, seed=5, bounded=True, exotic=False)
    num_compared = 0
    for schema in made:
        spec = json_spec(schema)
        if "3000" in spec.source or len(spec.source) > 600:
            continue
        answers = {n: backends[n].supports(spec) for n in (first, second)}
        if any(support.level is not SupportLevel.FULL for support in answers.values()):
            continue
        try:
            grammars = [compiled(backends[n], support.to_compile(spec)) for n, support in answers.items()]
        except RequestError:
            continue
        for one, other in (grammars, grammars[::-1]):
            for text in texts(one, small, 2, seed=7):
                plain = json.dumps(json.loads(text), ensure_ascii=False)
                if "\\u" in plain or re.search(r"[eE]", re.sub(r'"(?:[^"\\]|\\.)*"', "", plain)) or "\x7f" in plain:
                    continue  # outlines narrows escapes and exponents
                assert matches(other, small, plain) or narrower(plain, schema), (schema, plain)
                num_compared += 1
    assert num_compared >= 20


def narrower(text: str, schema: Any) -> bool:
    """Whether a text is one that some backend leaves out: other orders of keys, numbers' spellings."""
    value = json.loads(text)
    order = list(schema.get("properties", ())) if isinstance(schema, dict) else []
    odd_order = isinstance(value, dict) and [k for k in order if k in value] != list(value)[: len(value)]
    return odd_order or bool(re.search(r"-0\b|\d{16,}|\.\d{7,}", text))


FORMATS: dict[str, Callable[[str], Any]] = {
    "date": datetime.date.fromisoformat,
    "uuid": uuid.UUID,
    "ipv4": ipaddress.IPv4Address,
    "ipv6": ipaddress.IPv6Address,
    "date-time": lambda text: _shaped(r"\d{4}-\d\d-\d\d[Tt]\d\d:\d\d:\d\d(\.\d+)?([Zz]|[+-]\d\d:\d\d)", text),
    "time": lambda text: _shaped(r"\d\d:\d\d:\d\d(\.\d+)?([Zz]|[+-]\d\d:\d\d)", text),
    "duration": lambda text: _shaped(r"P[\dYMWDTHS]+", text),
    "email": lambda text: _shaped(r'("[^"]*"|[^@\s"]+)@\S+', json.loads(f'"{text}"') if "\\" in text else text),
    "hostname": lambda text: _shaped(r"[A-Za-z0-9-]{1,63}(\.[A-Za-z0-9-]{1,63})*", text),
    "uri": lambda text: _shaped(r"[A-Za-z][A-Za-z0-9+.-]*:\S*", text),
}


def _shaped(pattern: str, text: str) -> None:
    if re.fullmatch(pattern, text) is None:
        raise ValueError(text)


@pytest.mark.parametrize("name", FORMATS)
def test_formats_are_kept(backends: Mapping[str, GrammarBackend], small: Vocabulary, name: str) -> None:
    """Texts of an enforced `format` are read by Python's own parsers, or have its shape; others are refused."""
    grammar = compiled(backends["llguidance"], json_spec({"type": "string", "format": name}))
    found = [json.loads(text) for text in texts(grammar, small, 12)]
    assert found
    for text in found:
        if name == "date" and not text[5:] <= "12-28":
            continue  # a day that no month has is beyond a pattern of digits
        FORMATS[name](text)
    assert not matches(grammar, small, '"no such thing"')


@pytest.mark.parametrize("text", ['"😀é日"', '"\\"\\\\\\b\\f\\n\\r\\t"', '"tab \\t and \\u0001"', '"/"'])
def test_strings_hold_every_character(backends: Mapping[str, GrammarBackend], small: Vocabulary, text: str) -> None:
    """A free string may hold any character, escaped where JSON wants it; other spellings are not offered."""
    grammar = compiled(backends["llguidance"], json_spec({"type": "string"}))
    assert matches(grammar, small, text)
    for wrong in ('"\n"', '"\x01"', '"\\x41"', '"\\u00g0"', '"', '"\\ud800"'):
        assert not matches(grammar, small, wrong)


def test_escapes_in_schemas_are_their_characters(backends: Mapping[str, GrammarBackend], small: Vocabulary) -> None:
    """`\\u00e9` in a schema means é, as a value and as a key, surrogate pairs too."""
    source = '{"type": "object", "properties": {"\\u00e9": {"const": "\\ud83d\\ude00"}}, "required": ["\\u00e9"]}'
    grammar = compiled(backends["llguidance"], GrammarSpec(kind=Kind.JSON, source=source))
    assert matches(grammar, small, '{"é": "😀"}')


def test_lengths_count_characters(backends: Mapping[str, GrammarBackend], small: Vocabulary) -> None:
    """`minLength` and `maxLength` count characters however they are written, also in the thousands."""
    grammar = compiled(backends["llguidance"], json_spec({"type": "string", "minLength": 2, "maxLength": 3}))
    for text, fits in (('"é😀"', True), ('"é\\n"', True), ('"é"', False), ('"éééé"', False), ('"\\n"', False)):
        assert matches(grammar, small, text) is fits, text
    long = compiled(backends["llguidance"], json_spec({"type": "string", "minLength": 2000, "maxLength": 4000}))
    for num, fits in ((1999, False), (2000, True), (4000, True), (4001, False)):
        assert matches(long, small, json.dumps("é" * num, ensure_ascii=False)) is fits, num


@pytest.mark.parametrize("num", [1998, 1999, 2000, 3998, 3999, 4000])
def test_masks_at_the_ends_of_long_strings(backends: Mapping[str, GrammarBackend], small: Vocabulary, num: int) -> None:
    """Thousands of characters in, exactly the tokens are allowed that keep within both lengths, quote included."""
    grammar = compiled(backends["llguidance"], json_spec({"type": "string", "minLength": 2000, "maxLength": 4000}))
    matcher, mask = grammar.matcher(), np.zeros((1, small.mask_words), dtype=np.int32)
    ids = [small.tokens.index(bytes([byte])) for byte in b'"' + b"a" * num]
    assert matcher.accept(ids) == len(ids)
    matcher.fill(mask, 0)
    allowed = set(ids_of(mask[0]))
    plain = [i for i, token in enumerate(small.tokens) if re.fullmatch(rb'[ !#-\[\]-~]*"?', token) and token]
    assert any(len(small.tokens[i]) > 2 for i in plain)
    for i in plain:
        text, quote, _ = small.tokens[i].partition(b'"')
        total = num + len(text)
        assert (i in allowed) is (total <= 4000 and (not quote or total >= 2000)), small.tokens[i]


def test_properties_come_in_the_order_of_the_schema(backends: Mapping[str, GrammarBackend], small: Vocabulary) -> None:
    """Listed properties are written in their order, each once; others follow, and required ones cannot be left out."""
    schema = {"type": "object", "properties": {"b": {"type": "integer"}, "a": {}}, "required": ["a"]}
    for name in ("llguidance", "xgrammar"):
        grammar = compiled(backends[name], json_spec(schema))
        assert matches(grammar, small, '{"b": 1, "a": 2}')
        assert matches(grammar, small, '{"a": 2, "z": 3}')
        assert not matches(grammar, small, '{"a": 2, "b": 1}')
        assert not matches(grammar, small, '{"b": 1}')
        assert not matches(grammar, small, '{"a": 1, "a": 2}')


HELD = [
    # What no other key can be spelled as, what is a character of JSON, and divisors that are counted with.
    ("xgrammar", {"type": "object", "properties": {"a": {"type": "integer"}}}, '{"a": 1, "\\u0061": "s"}'),
    ("xgrammar", {"type": "object", "properties": {"a/b": {"const": 1}}}, '{"a\\/b": 2}'),
    *(("xgrammar", {"type": "string", "pattern": f"^{text}$"}, f'"{char}"')
      for text, char in ((r"\0", "\0"), (r"\v", "\v"), (r"[\f]", "\f"), (r"\n", "\n"))),
    ("llguidance", {"type": "integer", "multipleOf": 10**9}, None),
    ("llguidance", {"type": "integer", "allOf": [{"multipleOf": 10**8}, {"multipleOf": 7}]}, None),
]  # fmt: skip


@pytest.mark.parametrize(("name", "schema", "wrong"), HELD)
def test_what_a_library_lets_through_is_named(
    backends: Mapping[str, GrammarBackend], small: Vocabulary, name: str, schema: Any, wrong: str | None
) -> None:
    """Found by trying: invalid texts pass, or none that is valid does."""
    found = backends[name].supports(json_spec(schema))
    assert (found.level, len(found.ignored)) == (SupportLevel.APPROXIMATE, 1)
    if wrong is not None:
        assert conforms(schema, wrong) is False
        assert matches(compiled(backends[name], json_spec(schema)), small, wrong)


NUMBERS = ["0", "-0", "9007199254740993", "-9223372036854775809", "1" * 400, "1e308", "-1.5E-300", "0.1e+7"]


@pytest.mark.parametrize("text", NUMBERS)
def test_numbers_at_their_limits(backends: Mapping[str, GrammarBackend], small: Vocabulary, text: str) -> None:
    """Numbers beyond 64 bits and doubles are JSON like others; what JSON does not know is refused."""
    number = compiled(backends["llguidance"], json_spec({"type": "number"}))
    assert matches(number, small, text)
    for wrong in ("01", "+1", ".5", "1.", "1e", "NaN", "Infinity", "0x1", "--1"):
        assert not matches(number, small, wrong)
    edges = json_spec({"type": "integer", "minimum": -(2**53), "maximum": 2**53})
    grammar = compiled(backends["llguidance"], edges)
    for value in (-(2**53), -1, 0, 2**53):
        assert matches(grammar, small, str(value))
    for value in (-(2**53) - 1, 2**53 + 1, 2**64):
        assert not matches(grammar, small, str(value))


def test_every_end_ends(small: Vocabulary) -> None:
    """With several end tokens each is allowed exactly where the text is complete, and each terminates it."""
    ends = frozenset((small.size - 3, small.size - 2, *small.eos_ids))
    several = replace(small, eos_ids=ends, special_ids=small.special_ids | ends, fingerprint="several")
    for name in NAMES:
        plan = make_plan(Registry.scan(), grammar_backend=name)
        backend = load(plan, "compiler").get("grammar_backend", name)(several)
        grammar = compiled(backend, GrammarSpec(kind=Kind.REGEX, source="ab?"))
        mask = np.zeros((1, several.mask_words), dtype=np.int32)
        for end in ends:
            matcher = grammar.matcher()
            matcher.fill(mask, 0)
            assert not ends & set(ids_of(mask[0]))
            assert matcher.accept([end]) == 0
            assert matcher.accept([small.tokens.index(b"a")]) == 1
            matcher.fill(mask, 0)
            assert ends <= set(ids_of(mask[0]))
            assert matcher.accept([end]) == 1
            assert matcher.terminated
            matcher.rollback(1)
            assert matcher.accept([small.tokens.index(b"b"), end]) == 2


def test_a_kind_that_no_backend_reads_is_refused(backends: Mapping[str, GrammarBackend]) -> None:
    """The error names the field, the kind and what there is; with no backend at all it says how to get one."""
    spec = GrammarSpec(kind=Kind.LARK, source='start: "a"')
    with pytest.raises(RequestError, match=r"ebnf is a grammar of kind lark.*outlines: choice json regex") as caught:
        GrammarRouter({"outlines": backends["outlines"]}).route(spec, "ebnf")
    assert (caught.value.param, caught.value.code) == ("ebnf", "unsupported_grammar")
    with pytest.raises(RequestError, match="--grammar-backend auto") as caught:
        GrammarRouter({}).route(spec, "ebnf")
    assert (caught.value.param, caught.value.code) == ("ebnf", "unsupported_parameter")


@pytest.mark.parametrize("name", NAMES)
def test_a_format_that_nobody_defines_is_named(backends: Mapping[str, GrammarBackend], name: str) -> None:
    """It is an annotation, so the schema is enforced in full, but under strictness it is refused."""
    given = {"type": "object", "properties": {"a": {"type": "string", "format": "f"}}, "required": ["a"]}
    given["additionalProperties"] = False
    spec = replace(json_spec(given), strict=True)
    support = backends[name].supports(spec)
    assert (support.level, support.ignored) == (SupportLevel.FULL, ("/properties/a/format",))
    with pytest.raises(RequestError, match="/properties/a/format"):
        GrammarRouter({name: backends[name]}, strict_schema=True).route(spec, "response_format")
