"""Every format of structural tags: what it allows and what not, with markers as text and as tokens."""

from __future__ import annotations

import functools
import json
import random
from typing import Any

import pytest

from dovetail.contracts.errors import RequestError
from dovetail.contracts.grammar import GrammarLimits, GrammarMatcher, GrammarSpec, Kind, Vocabulary
from dovetail.grammar.compile.validity import FORMATS
from dovetail.grammar.compile.vocabulary import make_vocabulary
from dovetail.grammar.spec.fields import check_spec, read_grammar
from dovetail.grammar.spec.route import GrammarRouter
from dovetail.grammar.spec.wire import spec_of
from dovetail.plugins import Registry, load, make_plan
from dovetail_testing.vocabularies import byte_level

TOKENIZER = byte_level(("<call>", "</call>"))
VOCABULARY: Vocabulary = make_vocabulary(TOKENIZER, TOKENIZER.vocab_size, TOKENIZER.eos_token_ids)
AB: Any = {"type": "regex", "pattern": "a|b"}
INT: Any = {"type": "json_schema", "json_schema": {"type": "integer"}}


def text(value: str) -> Any:
    return {"type": "const_string", "value": value}


def tag(begin: Any, content: Any, end: Any) -> Any:
    return {"type": "tag", "begin": begin, "content": content, "end": end}


def const(value: str) -> Any:
    return {"type": "const_string", "value": value}


def sequence(*elements: Any) -> Any:
    return {"type": "sequence", "elements": list(elements)}


def either(*elements: Any) -> Any:
    return {"type": "or", "elements": list(elements)}


FREE: Any = {"type": "any_text"}
NUMBER: Any = {"type": "json_schema", "json_schema": {"type": "number"}}
TRIGGERED: Any = {"type": "triggered_tags", "triggers": ["A"], "tags": [tag("A", const("1"), "!")]}
CALL: Any = {"type": "token", "token": "<call>"}
END_CALL: Any = {"type": "token", "token": "</call>"}


def plain(schema: Any, *excludes: str) -> Any:
    return tag(
        "<a>", {"type": "json_schema", "style": "text", "json_schema": schema, "excludes": [*excludes]}, "</a>\n"
    )


ONE_TWO: Any = {
    "type": "object",
    "properties": {"a": {"type": "integer"}, "b": {"type": "integer"}},
    "required": ["a"],
    "additionalProperties": False,
}
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
    (plain({"maxLength": 2}), ["<a>é\n</a>\n", "<a></a>\n"], ["<a>abc</a>\n", "<a>ab"]),
    (plain({"minLength": 3, "pattern": "b|^a"}), ["<a>\n\nb</a>\n", "<a>a</a</a>\n"], ["<a>ab</a>\n", "<a>ccc</a>\n"]),
    (plain({"anyOf": [{"enum": ["x", "x\n</a>", ""]}, {"const": "/"}]}), ["<a>x</a>\n", "<a>/</a>\n"], ["<a>y</a>\n"]),
    (plain({"format": "date", "not": {"pattern": "^2"}}), ["<a>1999-02-28</a>\n"], ["<a>2020-02-28</a>\n"]),
    (plain({"allOf": [{"pattern": "a"}, {"pattern": "b$"}]}, "c"), ["<a>xab</a>\n"], ["<a>acb</a>\n", "<a>ba</a>\n"]),
    (plain({"maxLength": 9000}, "</b>"), ["<a>" + "</a>" * 999 + "</a>\n"], ["<a></b></a>\n"]),
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
    ({"type": "exclude_token", "exclude_tokens": ["a", "<call>"]}, ["b", "</call>"], ["a", "<call>", "", "bb"]),
    ({"type": "any_tokens", "exclude_tokens": ["<call>"]}, ["", "ab</call>"], ["a<call>"]),
    ({"type": "any_tokens", "max_tokens": 3}, ["", "<call><call>x"], ["<call><call><call><call>"]),
    ({"type": "any_tokens", "max_tokens": 0}, [""], ["a"]),
    (tag(CALL, {"type": "any_tokens"}, END_CALL), ["<call>a<call></call>"], ["<call></call></call>"]),
    (tag(CALL, {**FREE, "max_tokens": 2}, END_CALL), ["<call></call>", "<call>%%</call>"], ["<call>%%%</call>"]),
    (tag("<call>", {**FREE, "max_tokens": 2}, "</call>"), ["<call>%%</call>"], ["<call>%%%</call>"]),
    (tag("<call>", {"type": "any_tokens"}, "</a>"), ["<call>%</a>"], ["<call>%", "<call></a></a>"]),
    ({**FREE, "max_chars": 2}, ["", "é\n"], ["abc"]),
    (tag("<a>", {**FREE, "max_chars": 2}, "</a>"), ["<a>éé</a>", "<a></a>"], ["<a>abc</a>", "<a>a</a>b</a>"]),
    (
        {"type": "token_dispatch", "rules": [["<call>", INT]], "exclude_tokens": ["%"]},
        ["", "ab<call>12</call><call>1"],
        ["<call>x", "%<call>1"],
    ),
    ({"type": "token_dispatch", "rules": [["<call>", AB]], "loop": False}, ["<call>a", "x"], ["<call>a<call>b"]),
    (
        {
            "type": "token_triggered_tags",
            "trigger_tokens": ["<call>"],
            "tags": [tag(CALL, INT, "!")],
            "exclude_tokens": ["%"],
            "at_least_one": True,
        },
        ["<call>1!y", "<call>1!x<call>2!"],
        ["%<call>1!", "x", "x<call>1!"],
    ),
    ({**TRIGGERED, "at_least_one": True}, ["A1!y", "A1!A1!", "A1!xA1!"], ["xA1!", "", "x"]),
    ({**TRIGGERED, "at_least_one": True, "stop_after_first": True}, ["A1!"], ["xA1!", "A1!y", "A1!A1!", ""]),
    (tag("B", TRIGGERED, "END"), ["BEND", "BxEND", "BxA1!yEND", "BA1!A1!END"], ["B", "BxA1!y", "BA2!END"]),
    (tag("B", {**TRIGGERED, "stop_after_first": True}, "END"), ["BEND", "BxEND", "BxA1!END"], ["BxA1!yEND", "BA1!"]),
    (tag("<s>", sequence(const("[T]"), FREE), "<e>"), ["<s>[T]ab<e>", "<s>[T]<e>"], ["<s>ab<e>", "<s>[T]ab"]),
    (tag("<s>", either(const("[T]"), FREE), "<e>"), ["<s>[T]<e>", "<s>abc<e>"], ["<s>abc"]),
    (sequence(FREE, const("ABC"), AB), ["xABCa", "ABCb"], ["xABC", "xABa"]),
    (sequence({**FREE, "excludes": ["ABC"]}, const("ABC")), ["HelloABC", "ABC"], ["Hello", "ABCx"]),
    (sequence(FREE, tag("<a>", INT, "</a>")), ["x<a>1</a>", "<a>1</a>"], ["x", "x<a>y</a>"]),
    (sequence({**TRIGGERED, "excludes": ["XY"]}, const("XY")), ["2XY", "A1!XY", "XY"], ["2", "XYx", "XXYA1!"]),
    (tag("B", NUMBER, "END"), ["B12END", "B-0.5END", "B1e5END", "B2E+1END"], ["BEND", "B01END", "B1e+END", "B1EN"]),
    (tag("B", NUMBER, "."), ["B12.", "B1.5."], ["B12", "B."]),
    (sequence(NUMBER, const("e!")), ["3e!", "3e4e!"], ["3e4", "e!"]),
    ({**INT, "json_schema": ONE_TWO, "any_order": True}, ['{"b":1,"a":2}', '{"a":1}'], ["{}", '{"c":1}', '{"a":"x"}']),
    ({**INT, "json_schema": ONE_TWO, "max_whitespace_cnt": 1}, ['{ "a":1}'], ['{  "a":1}']),
]  # fmt: skip
M = "]<]minimax[>["
WIDE = "\uff5cDSML\uff5c"
PERSON: Any = {
    "type": "object",
    "properties": {
        "s": {"type": "string"},
        "n": {"type": "integer"},
        "e": {"enum": ["x", 3]},
        "m": {"type": ["string", "integer"]},
        "o": {"$ref": "#/$defs/o"},
        "l": {"type": "array", "items": {"type": "string"}},
    },
    "required": ["s", "n"],
    "additionalProperties": False,
    "$defs": {"o": {"type": "object", "properties": {"a": {"type": "string"}}, "required": ["a"]}},
}
STYLES = {
    "qwen_xml": (
        "<parameter=s>a</parameter><parameter=n>1</parameter>",
        ["<parameter=e>x</parameter>", '\n<parameter=o>\n{"a": "b"}\n</parameter>\n'],
        ['<parameter=e>"x"</parameter>', "<parameter=z>x</parameter>", "<parameter=l>x</parameter>"],
    ),
    "minimax_xml": (
        '<parameter name="s">a</parameter>\n<parameter name="n">1</parameter>',
        ['<parameter name="l">["x"]</parameter>'],
        ["<parameter=m>1</parameter>"],
    ),
    "glm_xml": (
        "<arg_key>s</arg_key><arg_value>a</arg_value><arg_key>n</arg_key>\n<arg_value>1</arg_value>",
        ["<arg_key>m</arg_key><arg_value>x</arg_value>"],
        ["<arg_key>l</arg_key><arg_value>x</arg_value>"],
    ),
    "deepseek_xml": (
        f'<{WIDE}parameter name="s" string="true">a</{WIDE}parameter>'
        f'<{WIDE}parameter name="n" string="false">1</{WIDE}parameter>',
        [f'<{WIDE}parameter name="{n}" string="{s}">{v}</{WIDE}parameter>' for n, s, v in
         (("e", "true", "x"), ("e", "false", "3"), ("m", "false", "3"), ("m", "true", "3"))],
        [f'<{WIDE}parameter name="e" string="false">x</{WIDE}parameter>'],
    ),
    "deepseek_v4_1_xml": (
        f'<{WIDE} parameter name="s" string="true">a</{WIDE} parameter>'
        f'<{WIDE} parameter name="n" string="false">1</{WIDE} parameter>',
        [],
        [f'<{WIDE} parameter name="m" string="no">1</{WIDE} parameter>'],
    ),
    "cohere_xml": (
        '<cofl:value name="s" type="raw">a</cofl:value><cofl:value name="n" type="json">1</cofl:value>',
        [
            '<cofl:value name="e" type="json">3</cofl:value>',
            '<cofl:value name="o" type="dict"><cofl:value name="a" type="raw">q</cofl:value></cofl:value>',
            '<cofl:value name="l" type="list"><cofl:value type="raw">q</cofl:value></cofl:value>',
        ],
        ['<cofl:value name="o" type="json">{"a":"b"}</cofl:value>', '<cofl:value name="m" type="json">x</cofl:value>'],
    ),
    "kimi_k3_xml": (
        '<|open|>argument key="s" type="string"<|sep|>a<|close|>argument<|sep|>'
        '<|open|>argument key="n" type="number"<|sep|>1<|close|>argument<|sep|>',
        [
            '<|open|>argument key="m" type="number"<|sep|>3<|close|>argument<|sep|>',
            '<|open|>argument key="o" type="object"<|sep|>{"a":"b"}<|close|>argument<|sep|>',
        ],
        ['<|open|>argument key="m" type="number"<|sep|>x<|close|>argument<|sep|>'],
    ),
    "minimax_m3_xml": (
        f"{M}<s>a{M}</s>{M}<n>3{M}</n>",
        [f"{M}<o>{M}<a>b{M}</a>{M}</o>", f"{M}<l>{M}<item>b{M}</item>{M}<item>{M}</item>{M}</l>"],
        [f'{M}<l>["b"]{M}</l>'],
    ),
}  # fmt: skip


OPEN = {
    "qwen_xml": "<parameter=k>x</parameter>",
    "minimax_xml": '<parameter name="k">x</parameter>',
    "glm_xml": "<arg_key>k</arg_key><arg_value>x</arg_value>",
    "deepseek_xml": f'<{WIDE}parameter name="k" string="true">x</{WIDE}parameter>',
    "cohere_xml": '<cofl:value name="k" type="raw">x</cofl:value>',
    "kimi_k3_xml": '<|open|>argument key="k" type="string"<|sep|>x<|close|>argument<|sep|>',
}


@pytest.mark.parametrize("style", OPEN)
def test_arguments_that_no_schema_names_as_tags(style: str) -> None:
    """Where no properties are declared, any may come; each text was tried with xgrammar, too."""
    right = OPEN[style]
    for given in (True, {"type": "object"}):
        if style != "cohere_xml":  # a value of any type needs the properties of objects there
            assert_allowed({**INT, "style": style, "json_schema": given}, ["", right, right + right])
            assert_refused({**INT, "style": style, "json_schema": given}, [right[:-1], right.replace("k", "", 1)])
    of_strings = {"type": "object", "additionalProperties": {"type": "string"}}
    assert_allowed({**INT, "style": style, "json_schema": of_strings}, ["", right, right + right])
    for given in ({"type": "object", "additionalProperties": False}, {"type": "object", "properties": {}}):
        assert_refused({**INT, "style": style, "json_schema": given}, [right])


def test_names_in_attributes_are_written_as_such() -> None:
    """Two styles write what would end an attribute by name; each text was tried with xgrammar, too."""
    given = {"type": "object", "properties": {'a"&<': {"type": "string"}}, "required": ['a"&<']}
    for style, name in (("kimi_k3_xml", "a&quot;&amp;<"), ("cohere_xml", "a&quot;&amp;&lt;"), ("minimax_xml", 'a"&<')):
        right = OPEN[style].replace('"k"', f'"{name}"')
        assert_allowed({**INT, "style": style, "json_schema": given}, [right])


@pytest.mark.parametrize("style", STYLES)
def test_arguments_as_tags_in_every_style(style: str) -> None:
    """The required ones, then an optional one that is right or wrong; each text was tried with xgrammar, too."""
    start, right, wrong = STYLES[style]
    assert_allowed({**INT, "style": style, "json_schema": PERSON}, [start, *(start + more for more in right)])
    assert_refused({**INT, "style": style, "json_schema": PERSON}, ["", *(start + more for more in wrong)])


def test_tags_come_in_any_order_where_that_is_asked_for() -> None:
    """They may repeat, then; their number is at least that of the required ones."""
    node = {**INT, "style": "glm_xml", "any_order": True, "json_schema": ONE_TWO}
    a, b = (f"<arg_key>{name}</arg_key><arg_value>1</arg_value>" for name in "ab")
    assert_allowed(node, [b + a, a, a + a])
    assert_refused(node, ["", a.replace("1", "x")])


def test_what_order_and_budgets_leave_unsaid_is_named() -> None:
    """`required` without an order, and a budget of tokens up to an end that is text."""
    cases = [
        ({**INT, "json_schema": ONE_TWO, "any_order": True}, "/format/json_schema/required"),
        (tag("<a>", {**FREE, "max_tokens": 3}, "</a>"), "/format/content/max_tokens"),
        (tag(CALL, {**FREE, "max_tokens": 3, "max_chars": 9}, END_CALL), "/format/content/max_tokens"),
        ({**FREE, "max_tokens": 3}, "/format/max_tokens"),
        (tag(CALL, {"type": "any_tokens", "exclude_tokens": [1]}, "x"), "/format/content/exclude_tokens"),
        ({**INT, "excludes": ["x"]}, "/format/excludes"),
    ]
    for node, place in cases:
        spec = GrammarSpec(kind=Kind.STRUCTURAL, source=json.dumps({"type": "structural_tag", "format": node}))
        assert backends_of_all()["llguidance"].supports(spec).ignored == (place,)


def matcher_of(node: Any) -> GrammarMatcher:
    source = json.dumps({"type": "structural_tag", "format": node})
    spec = GrammarSpec(kind=Kind.STRUCTURAL, source=source)
    check_spec(spec)
    plan = make_plan(Registry.scan(), grammar_backend="llguidance")
    backend = load(plan, "compiler").get("grammar_backend", "llguidance")(VOCABULARY)
    made = backend.compile(spec, GrammarLimits())
    return (backend.load(made) if isinstance(made, bytes) else made).matcher()


@pytest.mark.sampled
@pytest.mark.parametrize(("node", "right", "wrong"), CASES, ids=lambda value: json.dumps(value)[:50])
def test_formats_allow_what_they_say(node: Any, right: list[str], wrong: list[str]) -> None:
    """Whole texts are complete or not."""
    assert_allowed(node, right)
    assert_refused(node, wrong)


def assert_allowed(node: Any, texts: list[str]) -> None:
    matcher = matcher_of(node)
    for value in texts:
        ids, fresh = TOKENIZER.encode(value, add_special_tokens=False), matcher.fork()
        assert fresh.accept(ids) == len(ids), value
        assert fresh.accepting, value


def assert_refused(node: Any, texts: list[str]) -> None:
    matcher = matcher_of(node)
    for value in texts:
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
        ({**INT, "style": "other_xml"}, "/format/style"),
        ({**FREE, "max_tokens": -1}, "/format/max_tokens"),
        ({**FREE, "max_tokens": True}, "/format/max_tokens"),
        ({**FREE, "max_chars": 2**31}, "/format/max_chars"),
        ({**INT, "any_order": 1}, "/format/any_order"),
        ({"type": "exclude_token", "exclude_tokens": [""]}, "/format/exclude_tokens"),
        ({"type": "token_dispatch", "rules": [["", AB]]}, "/format/rules/0"),
        (tag({"type": "token"}, AB, ""), "/format/begin"),
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
    """Of a string between tags, a pattern that is no regular expression; its length is enforced."""
    text = {"type": "string", "maxLength": 3, "pattern": r"(.)\1"}
    schema = {"type": "object", "properties": {"s": text, "n": {"type": "integer"}}}
    node = {"type": "json_schema", "style": "qwen_xml", "json_schema": schema}
    source = json.dumps({"type": "structural_tag", "format": node})
    plan = make_plan(Registry.scan(), grammar_backend="llguidance")
    backend = load(plan, "compiler").get("grammar_backend", "llguidance")(VOCABULARY)
    support = backend.supports(GrammarSpec(kind=Kind.STRUCTURAL, source=source))
    assert support.ignored == ("/format/json_schema/properties/s/pattern",)
    found = matcher_of(node)
    ids = [TOKENIZER.encode(f"<parameter=s>{text}</parameter>", add_special_tokens=False) for text in ("abc", "abcd")]
    assert [found.fork().accept(each) == len(each) for each in ids] == [True, False]


@pytest.mark.parametrize(
    ("name", "right"),
    [
        ("ipv4", ["127.0.0.1", "255.255.249.99"]),
        (
            "ipv6",
            ["::", "1::", "::1", "1:2:3:4:5:6:7:8", "1::3:4:5:6:7:8", "::ffff:1.2.3.4", "1:2:3:4:5:6:1.2.3.4", "a::b"],
        ),
        ("uuid", ["123e4567-e89b-12d3-a456-426614174000"]),
        ("duration", ["P1Y2M3DT4H5M6S", "P4W", "PT36H", "P1DT1M"]),
        ("uri", ["http://a/b?c#d", "urn:x:y"]),
    ],
)
def test_formats_without_quotes_hold_nothing_else(name: str, right: list[str]) -> None:
    """What such an expression matches is of the format, by a checker of it, or the library's rule for JSON strings."""
    rng, mutated = random.Random(name), [*right]
    for _ in range(300):
        text = rng.choice(right)
        at, new = rng.randrange(len(text) + 1), rng.choice(["", ":", "::", ".", "0", "1", "f", "T", "D", "-", "/"])
        mutated.append(text[:at] + new + text[at + rng.randrange(2) :])
    in_json = matcher_of({"type": "json_schema", "json_schema": {"type": "string", "format": name}})
    alone = matcher_of(plain({"format": name}))

    def accepts(matcher: Any, text: str) -> bool:
        ids, fresh = TOKENIZER.encode(text, add_special_tokens=False), matcher.fork()
        return bool(fresh.accept(ids) == len(ids) and fresh.accepting)

    for text in mutated:
        is_right = FORMATS.conforms(text, name) if name in FORMATS.checkers else accepts(in_json, f'"{text}"')
        assert is_right or not accepts(alone, f"<a>{text}</a>\n"), text
    assert all(accepts(alone, f"<a>{text}</a>\n") for text in right)


def test_json_may_be_compact_or_spaced_as_asked() -> None:
    """`disable_any_whitespace` and `whitespace_pattern`, on every backend that can; a bad pattern is refused."""
    schema = {
        "type": "object",
        "properties": {"a": {"type": "integer"}},
        "required": ["a"],
        "additionalProperties": False,
    }
    router = GrammarRouter(backends_of_all())
    cases = [
        ({"disable_any_whitespace": True}, ['{"a":1}'], ['{"a": 1}']),
        ({"whitespace_pattern": "[ ]?"}, ['{"a": 1}', '{"a":1}'], ['{"a":  1}', '{"a":\n1}']),
        ({}, ['{ "a"\n:1}'], []),
    ]
    for extra, right, wrong in cases:
        asked = read_grammar({"structured_outputs": {"json": schema, **extra}})
        assert asked is not None
        route = router.route(asked.spec, asked.param, asks_all=True)
        for way in route.options:
            if way.enforcement != "full" or way.grammar.relax_schema:
                continue
            backend = backends_of_all()[way.grammar.backend]
            made = backend.compile(spec_of(way.grammar), GrammarLimits())
            matcher = (backend.load(made) if isinstance(made, bytes) else made).matcher()
            for value in (*right, *wrong):
                ids, fresh = TOKENIZER.encode(value, add_special_tokens=False), matcher.fork()
                accepted = fresh.accept(ids) == len(ids) and fresh.accepting
                assert accepted == (value in right), (way.grammar.backend, extra, value)
    compact = GrammarRouter(backends_of_all(), compact=True)
    asked = read_grammar({"json_schema": schema})
    assert asked is not None
    assert compact.route(asked.spec, asked.param).options[0].grammar.max_whitespace == 0
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
