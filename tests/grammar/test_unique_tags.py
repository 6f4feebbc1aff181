"""`uniqueItems` in the arguments of tools and in structural tags: in full where tags can be told from other text."""

from __future__ import annotations

import json
import random
import re
from collections.abc import Mapping
from typing import Any

import numpy as np
import pytest
from random_pairs import Maker
from test_unique import Watched, _differ

from dovetail.contracts.grammar import CompiledGrammar, GrammarBackend, GrammarLimits, GrammarSpec, Kind, Vocabulary
from dovetail.contracts.output import FormatSpec
from dovetail.grammar.compile.vocabulary import make_vocabulary
from dovetail.grammar.pipeline import StructuredOutputs
from dovetail.grammar.spec.fields import read_grammar
from dovetail.grammar.spec.route import EnforcementOption, GrammarRouter
from dovetail.grammar.spec.wire import spec_of
from dovetail.plugins import Registry, load, make_plan
from dovetail.sdk.masks import ids_of
from dovetail_grammar.unique.tags import watched_tags
from dovetail_testing.vocabularies import byte_level

VALUES = ["a", "ab", "b", "ba", "abc", "c", "cc"]
ARRAY = {"type": "array", "items": {"enum": VALUES}, "uniqueItems": True, "minItems": len(VALUES)}
TOOL = {
    "type": "function",
    "function": {
        "name": "note",
        "parameters": {
            "type": "object",
            "properties": {"tags": ARRAY, "n": {"type": "integer", "minimum": 1, "maximum": 3}},
            "required": ["tags", "n"],
            "additionalProperties": False,
        },
    },
}
PLACE = "/tools/0/function/parameters/properties/tags/uniqueItems"
BUILT_IN = [r.name for r in Registry.scan().of_kind("tool_parser") if r.builtin]
LEFT = ("functiongemma", "gemma4", "kimi-k2", "lfm2", "olmo3", "pythonic", "solar")
"""Formats in which values stand behind texts that other text could hold, too."""
ARRAYS = re.compile(r'\[\s*"[abc",\s]*\]')
THOUGHTFUL = ("beam", "hyperclova", "muse")
"""Random thoughts before a call would hardly come to an end."""
FORMATS = [name for name in BUILT_IN if name not in (*LEFT, "template")]


@pytest.fixture(scope="module")
def vocabulary() -> Vocabulary:
    tokenizer = byte_level()
    return make_vocabulary(tokenizer, tokenizer.vocab_size, tokenizer.eos_token_ids)


@pytest.fixture(scope="module")
def backend(vocabulary: Vocabulary) -> GrammarBackend:
    plugins = load(make_plan(Registry.scan(), grammar_backend="llguidance"), "compiler")
    made: GrammarBackend = plugins.get("grammar_backend", "llguidance")(vocabulary)
    return made


class InTags(Watched):
    """A way, as the engine makes it."""

    def __init__(self, way: EnforcementOption, backend: GrammarBackend, vocabulary: Vocabulary) -> None:
        self.enforcement, self.ignored = way.enforcement, way.ignored
        compiled = backend.compile(spec_of(way.grammar), GrammarLimits())
        self.grammar: CompiledGrammar = backend.load(compiled) if isinstance(compiled, bytes) else compiled
        self.vocabulary = vocabulary

    def accepts(self, text: str) -> bool:
        """Whether a text is complete and conforms."""
        matcher, ids = self.grammar.matcher(), self.ids_as_written(text)
        return matcher.accept(ids) == len(ids) and matcher.accepting

    def ids_as_written(self, text: str) -> list[int]:
        """Return the tokens that a model writes a text as: markers are tokens of their own."""
        encode, added = self.vocabulary.encode, self.vocabulary.added
        assert encode is not None
        pieces = re.split(f"({'|'.join(map(re.escape, added))})", text)
        return [i for piece in pieces for i in ([added[piece]] if piece in added else encode(piece))]

    def calls(self, rng: random.Random, start: str, most: int = 600) -> str:
        """Follow the masks to the end of a text, from some text on where it may begin so; ends as soon as it may."""
        matcher, ids = self.grammar.matcher(), self.ids_as_written(start)
        begun = matcher.accept(ids)
        if begun < len(ids):
            matcher.rollback(begun)
        mask = np.zeros((1, self.vocabulary.mask_words), dtype=np.int32)
        markers = {token_id: text for text, token_id in self.vocabulary.added.items()}
        text = start.encode() if begun == len(ids) else b""
        for _ in range(most):
            if matcher.accepting:
                return text.decode()
            matcher.fill(mask, 0)
            assert matcher.error is None, (text, matcher.error)
            ids = [i for i in ids_of(mask[0]) if i not in self.vocabulary.eos_ids]
            assert ids, text
            plain = [i for i in ids if self.vocabulary.tokens[i].isascii() and not self.vocabulary.tokens[i].isspace()]
            token = rng.choice([i for i in ids if i in markers] or plain or ids)
            assert matcher.accept([token]) == 1, text
            text += markers[token].encode() if token in markers else self.vocabulary.tokens[token]
        raise AssertionError(text)


def tool_way(name: str, choice: Any, backend: GrammarBackend, tool: Mapping[str, Any] = TOOL) -> EnforcementOption:
    parser = load(make_plan(Registry.scan(), tool_parser=name), "api").get("tool_parser", name)()
    front = StructuredOutputs({"llguidance": backend})
    try:
        return front.tools(parser, name, [tool], choice, parallel=False, param="tool_choice").options[0]
    finally:
        front.close()


def structural(format_: Any, backend: GrammarBackend) -> EnforcementOption:
    spec = GrammarSpec(kind=Kind.STRUCTURAL, source=json.dumps({"type": "structural_tag", "format": format_}))
    return GrammarRouter({"llguidance": backend}).route(spec, "structural_tag").options[0]


@pytest.mark.parametrize("name", FORMATS)
def test_arguments_differ_in_every_format(name: str, backend: GrammarBackend, vocabulary: Vocabulary) -> None:
    """A tool's schema is enforced in full, and a call is always finished."""
    way = tool_way(name, "required", backend)
    assert (way.enforcement, way.ignored) == ("full", ())
    made = InTags(way, backend, vocabulary)
    if name in THOUGHTFUL:
        return
    seen = set()
    for seed in range(6):
        tags, _ = watched_tags(json.loads(way.grammar.source))
        text = made.calls(random.Random(seed), next(begin for begin, shape, _ in tags if shape))
        [written] = ARRAYS.findall(text)
        tags = json.loads(written)
        assert sorted(tags) == sorted(VALUES), text
        seen.add(tuple(tags))
    assert len(seen) > 1


@pytest.mark.parametrize("name", LEFT)
def test_where_it_cannot_be_told_it_is_named(name: str, backend: GrammarBackend) -> None:
    """Nothing is weakened without a word."""
    way = tool_way(name, "required", backend)
    assert way.enforcement == "approximate"
    assert PLACE in way.ignored
    assert watched_tags(json.loads(way.grammar.source)) == ([], frozenset())


def test_strict_tools_under_auto_differ_too(backend: GrammarBackend, vocabulary: Vocabulary) -> None:
    """In free text a call begins where its trigger stands, and not in the strings of another call."""
    tool = {**TOOL, "function": {**TOOL["function"], "strict": True}}  # type: ignore[dict-item]
    way = tool_way("hermes", "auto", backend, tool)
    assert way.enforcement == "full"
    made = InTags(way, backend, vocabulary)
    begin, end = '<tool_call>\n{"name": "note", "arguments": {"tags": ', ', "n": 1}}\n</tool_call>'
    assert made.accepts('["a", "a"]' + begin + json.dumps(VALUES) + end)
    assert not made.accepts('["a", "a"]' + begin + json.dumps([*VALUES, "a"]) + end)


def test_random_arguments_agree_with_a_plain_check(backend: GrammarBackend, vocabulary: Vocabulary) -> None:
    """Values in any spelling are taken exactly where no array in them repeats an item."""
    anything = {"uniqueItems": True, "items": {"$ref": "#/$defs/x"}, "additionalProperties": {"$ref": "#/$defs/x"}}
    parameters = {"type": "object", "additionalProperties": {"$ref": "#/$defs/x"}, "$defs": {"x": anything}}

    def way(given: Any) -> InTags:
        tool = {"type": "function", "function": {"name": "f", "parameters": given}}
        return InTags(tool_way("hermes", "required", backend, tool), backend, vocabulary)

    watched, plain = way(parameters), way({"type": "object"})
    assert watched.enforcement == "full"
    counts = [0, 0]
    for seed in range(300):
        maker = Maker(seed)
        value = {"a": [maker.rng.choice([[1, 1], {"a": [2]}, 1, "a", maker.instance({})]) for _ in range(3)]}
        written = maker.text(value)
        text = '<tool_call>\n{"name": "f", "arguments": ' + written + "}\n</tool_call>"
        if plain.accepts(text):
            differ = _differ(json.loads(written))
            counts[differ] += 1
            assert watched.accepts(text) == differ, text
    assert min(counts) > 30


TAG = {"type": "json_schema", "json_schema": {"type": "array", "uniqueItems": True}}


def test_tags_of_a_request_differ(backend: GrammarBackend, vocabulary: Vocabulary) -> None:
    """One array in each tag; what stands between them, and texts that only look like a tag, are no arrays."""
    tags = [
        {"begin": "<x>", "content": TAG, "end": "</x>"},
        {"begin": "<t>", "content": {"type": "any_text"}, "end": "</t>"},
    ]
    way = structural({"type": "triggered_tags", "triggers": ["<x", "<t"], "tags": tags}, backend)
    assert (way.enforcement, way.ignored) == ("full", ())
    made = InTags(way, backend, vocabulary)
    assert made.accepts("[1, 1] <x>[1, 2]</x> and <x>[1, 2]</x>")
    assert made.accepts("<t> <x>[1, 1] </t> <x>[[1], [1, 1], 1]</x>")
    assert not made.accepts("<t> <x>[1, 1] </t> <x>[[1], [1, 1], [1]]</x>")
    assert not made.accepts("<x>[1, 2]</x> and <x>[2, 2]</x>")
    assert made.accepts('<x>["<x>[1, 1", 1]</x>')
    assert not made.accepts('<x>["<x>[1, 1", 1, 1.0]</x>')
    one = {"type": "tag", "begin": "<x>", "content": TAG, "end": "</x>"}
    for format_ in (one, {"type": "sequence", "elements": [one, {"type": "optional", "content": one}]}):
        alone = InTags(structural(format_, backend), backend, vocabulary)
        assert alone.enforcement == "full"
        assert alone.accepts("<x>[1, 2]</x>")
        assert not alone.accepts("<x>[1, 1]</x>")


@pytest.mark.parametrize(
    "format_",
    [
        TAG,
        {"type": "sequence", "elements": [{"type": "any_text"},
                                          {"type": "tag", "begin": "x", "content": TAG, "end": "y"}]},
        {"type": "sequence", "elements": [{"type": "regex", "pattern": "<x>[0-9]*"},
                                          {"type": "tag", "begin": "<x>", "content": TAG, "end": "y"}]},
        {"type": "sequence", "elements": [{"type": "json_schema", "json_schema": {}},
                                          {"type": "tag", "begin": "<x>", "content": TAG, "end": "y"}]},
        {"type": "sequence", "elements": [{"type": "const_string", "value": "1<"},
                                          {"type": "tag", "begin": "<x>", "content": TAG, "end": "y"}]},
        {"type": "or", "elements": [{"type": "tag", "begin": "<x", "content": TAG, "end": "y"},
                                    {"type": "tag", "begin": "<xx", "content": TAG, "end": "y"}]},
        {"type": "triggered_tags", "triggers": ["<"], "tags": [
            {"begin": "<c>", "end": "</c>", "content": {"type": "tag", "begin": "x=", "content": TAG, "end": ";"}}]},
    ],
    ids=["alone", "free text", "expression", "JSON", "text", "two beginnings", "within another"],
)  # fmt: skip
def test_tags_that_other_text_could_hold_are_left_to_judging(format_: Any, backend: GrammarBackend) -> None:
    """What cannot be told is named."""
    way = structural(format_, backend)
    assert way.enforcement == "approximate"
    assert any(place.endswith("/uniqueItems") for place in way.ignored)
    assert watched_tags(json.loads(way.grammar.source)) == ([], frozenset())


def test_a_text_or_calls_name_what_neither_watches(backend: GrammarBackend) -> None:
    """Where a request has a schema and tools, which of the two a text is cannot be told from its beginning."""
    parser = load(make_plan(Registry.scan(), tool_parser="hermes"), "api").get("tool_parser", "hermes")()
    front = StructuredOutputs({"llguidance": backend})
    asked = read_grammar({"json_schema": json.dumps({"properties": {"list": {"uniqueItems": True}}})})
    assert asked is not None
    try:
        calls = front.tools(parser, "hermes", [TOOL], "required", parallel=True, param="tool_choice")
        way = front.either(asked, calls, parser.extend(FormatSpec(), [TOOL])).options[0]
    finally:
        front.close()
    assert way.enforcement == "approximate"
    assert set(way.ignored) == {"/properties/list/uniqueItems", PLACE}
