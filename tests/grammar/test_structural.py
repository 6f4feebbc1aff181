"""Every format of structural tags: what it allows and what not, with markers as text and as tokens."""

from __future__ import annotations

import functools
import json
from typing import Any

import pytest

from dovetail.contracts.grammar import GrammarLimits, GrammarMatcher, GrammarSpec, Kind, Vocabulary
from dovetail.errors import RequestError
from dovetail.grammar.fields import read_grammar
from dovetail.grammar.limits import check_spec
from dovetail.grammar.route import Router
from dovetail.grammar.vocabulary import make_vocabulary
from dovetail.grammar.wire import spec_of
from dovetail.plugins import Registry, load, make_plan
from dovetail.testing.vocabularies import byte_level

TOKENIZER = byte_level(("<call>", "</call>"))
VOCABULARY: Vocabulary = make_vocabulary(TOKENIZER, TOKENIZER.vocab_size, TOKENIZER.eos_token_ids)
AB: Any = {"type": "regex", "pattern": "a|b"}
INT: Any = {"type": "json_schema", "json_schema": {"type": "integer"}}


def text(value: str) -> Any:
    return {"type": "const_string", "value": value}


def tag(begin: Any, content: Any, end: Any) -> Any:
    return {"type": "tag", "begin": begin, "content": content, "end": end}


FREE: Any = {"type": "any_text"}
CASES = [
    ({"type": "optional", "content": AB}, ["", "a"], ["ab", "c"]),
    ({"type": "plus", "content": AB}, ["a", "aba"], ["", "c"]),
    ({"type": "star", "content": AB}, ["", "abba"], ["c"]),
    ({"type": "repeat", "min": 2, "max": 3, "content": AB}, ["ab", "abb"], ["a", "abab"]),
    ({"type": "repeat", "min": 2, "max": -1, "content": AB}, ["ab", "ababab"], ["a"]),
    ({"type": "grammar", "grammar": 'root ::= [a-z]* "end"'}, ["end", "endend"], ["en"]),
    ({"type": "grammar", "grammar": 'root ::= "(" root ")" | "x"'}, ["x", "((x))"], ["(x"]),
    (
        {"type": "sequence", "elements": [{"type": "grammar", "grammar": 'r ::= "x"\nroot ::= r r'}, AB]},
        ["xxa"],
        ["xa", "xx"],
    ),
    (tag("<a>", FREE, "</a>"), ["<a></a>", "<a>x < y\n</a>"], ["<a>x", "<a>x</a>y"]),
    (tag("<a>", FREE, ["</a>", "</b>"]), ["<a>x</b>", "<a>x</a>"], ["<a>x", "<a>x</c>"]),
    (tag("<a>", {**FREE, "excludes": ["no", "/"]}, "|"), ["<a>yes|"], ["<a>nono|", "<a>a/b|", "<a>yes"]),
    ({**FREE, "excludes": ["a\nb"]}, ["a b", "ab\n"], ["xa\nb"]),
    (
        {"type": "dispatch", "rules": [["<i>", INT], ["<a>", AB]]},
        ["", "x<i>12 y<a>b", "<a>a"],
        ["<i>x", "x<a>c"],
    ),
    ({"type": "dispatch", "rules": [["<i>", INT]], "loop": False}, ["x<i>12", "x"], ["<i>1<i>2"]),
    ({"type": "dispatch", "rules": [["<i>", INT]], "excludes": ["no"]}, ["x<i>1y"], ["no<i>1"]),
    (
        {"type": "triggered_tags", "triggers": ["<f"], "tags": [{**tag("<f>", INT, "</f>")}], "excludes": ["zz"]},
        ["a<f>1</f>b"],
        ["azz<f>1</f>", "<f>x</f>"],
    ),
    (
        tag({"type": "token", "token": "<call>"}, INT, {"type": "token", "token": "</call>"}),
        ["<call>1</call>"], ["<call>x"],
    ),
    (
        {
            "type": "token_triggered_tags",
            "trigger_tokens": ["<call>"],
            "tags": [{**tag({"type": "token", "token": "<call>"}, INT, "</call>")}],
        },
        ["x<call>1</call>y<call>2</call>", "x"],
        ["<call>x</call>"],
    ),
    (
        {
            "type": "qwen_xml_parameter",
            "json_schema": {
                "type": "object",
                "properties": {"name": {"type": "string"}, "age": {"type": "integer"}},
                "required": ["name"],
            },
        },
        ["<parameter=name>Bob</parameter>", "<parameter=name>a\n<b></parameter>\n<parameter=age>3</parameter>"],
        ["<parameter=age>3</parameter>", "<parameter=name>Bob</parameter><parameter=age>x</parameter>"],
    ),
    (
        {**INT, "style": "qwen_xml", "json_schema": {"properties": {"n": {"type": "integer"}}}},
        ["<parameter=n>3</parameter>", ""], ["3"],
    ),
]  # fmt: skip


def matcher_of(node: Any) -> GrammarMatcher:
    source = json.dumps({"type": "structural_tag", "format": node})
    spec = GrammarSpec(kind=Kind.STRUCTURAL, source=source)
    check_spec(spec)
    plan = make_plan(Registry.scan(), grammar_backend="llguidance")
    backend = load(plan, "compiler").get("grammar_backend", "llguidance")(VOCABULARY)
    made = backend.compile(spec, GrammarLimits())
    return (backend.load(made) if isinstance(made, bytes) else made).matcher()


@pytest.mark.parametrize(("node", "right", "wrong"), CASES, ids=lambda value: json.dumps(value)[:50])
def test_formats_allow_what_they_say(node: Any, right: list[str], wrong: list[str]) -> None:
    """Whole texts are complete or not."""
    matcher = matcher_of(node)
    for value in right:
        ids, fresh = TOKENIZER.encode(value, add_special_tokens=False), matcher.fork()
        assert fresh.accept(ids) == len(ids), value
        assert fresh.accepting, value
    for value in wrong:
        ids, fresh = TOKENIZER.encode(value, add_special_tokens=False), matcher.fork()
        assert fresh.accept(ids) < len(ids) or not fresh.accepting, value


@pytest.mark.parametrize(
    ("node", "place"),
    [
        ({"type": "repeat", "min": 3, "max": 2, "content": AB}, "/format/max"),
        ({"type": "dispatch", "rules": [["x"]]}, "/format/rules/0"),
        ({"type": "dispatch", "rules": []}, "/format/rules"),
        ({"type": "optional", "content": {"type": "strange"}}, "/format/content/type"),
        ({**FREE, "excludes": [""]}, "/format/excludes"),
        ({**INT, "style": "cohere_xml"}, "/format/style"),
        ({**FREE, "max_tokens": 3}, "/format/max_tokens"),
        ({"type": "token", "token": []}, "/format/token"),
    ],
    ids=lambda value: json.dumps(value)[:50],
)
def test_what_is_wrong_is_told_where(node: Any, place: str) -> None:
    """The message names the place; nothing is accepted and ignored."""
    with pytest.raises(RequestError, match=place):
        matcher_of(node)


def test_a_token_that_the_model_does_not_have_is_refused() -> None:
    """By its name."""
    with pytest.raises(RequestError, match="<none>"):
        matcher_of({"type": "token", "token": "<none>"})


def test_what_arguments_as_tags_do_not_say_is_named() -> None:
    """A string's length is nothing that tags hold."""
    schema = {"type": "object", "properties": {"s": {"type": "string", "maxLength": 3}, "n": {"type": "integer"}}}
    node = {"type": "json_schema", "style": "qwen_xml", "json_schema": schema}
    source = json.dumps({"type": "structural_tag", "format": node})
    plan = make_plan(Registry.scan(), grammar_backend="llguidance")
    backend = load(plan, "compiler").get("grammar_backend", "llguidance")(VOCABULARY)
    support = backend.supports(GrammarSpec(kind=Kind.STRUCTURAL, source=source))
    assert support.ignored == ("/format/json_schema/properties/s/maxLength",)


def test_json_may_be_compact_or_spaced_as_asked() -> None:
    """`disable_any_whitespace` and `whitespace_pattern`, on every backend that can; a bad pattern is refused."""
    schema = {
        "type": "object",
        "properties": {"a": {"type": "integer"}},
        "required": ["a"],
        "additionalProperties": False,
    }
    router = Router(backends_of_all())
    cases = [
        ({"disable_any_whitespace": True}, ['{"a":1}'], ['{"a": 1}']),
        ({"whitespace_pattern": "[ ]?"}, ['{"a": 1}', '{"a":1}'], ['{"a":  1}', '{"a":\n1}']),
        ({}, ['{ "a"\n:1}'], []),
    ]
    for extra, right, wrong in cases:
        asked = read_grammar({"structured_outputs": {"json": schema, **extra}})
        assert asked is not None
        route = router.route(asked.spec, asked.param)
        for way in route.ways:
            if way.enforcement != "full" or way.step.weaken:
                continue
            backend = backends_of_all()[way.step.backend]
            made = backend.compile(spec_of(way.step), GrammarLimits())
            matcher = (backend.load(made) if isinstance(made, bytes) else made).matcher()
            for value in (*right, *wrong):
                ids, fresh = TOKENIZER.encode(value, add_special_tokens=False), matcher.fork()
                accepted = fresh.accept(ids) == len(ids) and fresh.accepting
                assert accepted == (value in right), (way.step.backend, extra, value)
    compact = Router(backends_of_all(), compact=True)
    asked = read_grammar({"json_schema": schema})
    assert asked is not None
    assert compact.route(asked.spec, asked.param).ways[0].step.max_whitespace == 0
    for wrong_field in ({"whitespace_pattern": ".*"}, {"disable_any_whitespace": 1}):
        with pytest.raises(RequestError, match="structured_outputs"):
            read_grammar({"structured_outputs": {"json": schema, **wrong_field}})
    with pytest.raises(RequestError, match="whitespace"):
        read_grammar({"structured_outputs": {"regex": "a", "disable_any_whitespace": True}})


@functools.cache
def backends_of_all() -> dict[str, Any]:
    """Those of the default install."""
    plugins = load(make_plan(Registry.scan(), grammar_backend="auto"), "compiler")
    return {planned.name: backend(VOCABULARY) for planned, backend in plugins.candidates("grammar_backend")}
