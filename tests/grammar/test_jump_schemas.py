"""Jump-forward over many schemas: what is forced is what the masks would have left, token for token."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import jsonschema
import pytest
from grammar_demo import Demo, Jump, Result, json_option

from dovetail.engine import replies
from dovetail.messages import GrammarOption

SHORT = {"type": "string", "maxLength": 6}
SCHEMAS: list[Any] = [
    {"const": {"a": [1, None, True], "é": 'say "é\\/" 😀\n', "": {}}},
    {
        "enum": [
            "tab\tand\nline",
            'a "quoted" word',
            "back\\slash \\n",
            "😀😀 日本語",
            "</think>",
            "\u0001\u007f",
            "a" * 200,
        ]
    },
    {
        "type": "object",
        "properties": {
            key: {"enum": [1, 22]} for key in ("zebra_of_the_zoo", "apple of the tree", "mid.dle[0]", "é 日")
        },
        "required": ["é 日", "mid.dle[0]", "zebra_of_the_zoo", "apple of the tree"],
        "additionalProperties": False,
    },
    {
        "type": "object",
        "properties": {"first_of_the_names": SHORT, "second_of_the_names": SHORT, "third_of_the_names": {"const": 3}},
        "required": ["third_of_the_names"],
        "additionalProperties": False,
    },
    {
        "type": "object",
        "properties": {"a_known_property": {"type": "boolean"}},
        "required": ["a_known_property", "one_that_is_not_listed"],
        "additionalProperties": {"type": "integer", "minimum": 1000000, "maximum": 1000009},
        "maxProperties": 2,
    },
    {
        "anyOf": [
            {
                "type": "object",
                "properties": {"kind_of_the_thing": {"const": kind}, f"number_of_{kind}s": {"enum": [1, 2]}},
                "required": ["kind_of_the_thing", f"number_of_{kind}s"],
                "additionalProperties": False,
            }
            for kind in ("circle", "circular_saw", "square")
        ]
    },
    {"type": "array", "items": {"enum": ["the very same text"]}, "minItems": 3, "maxItems": 4},
    {
        "$defs": {"n": {"enum": ["null and void", None]}},
        "type": "array",
        "prefixItems": [{"$ref": "#/$defs/n"}] * 3,
        "minItems": 3,
        "items": False,
    },
    {"type": "string", "pattern": "^(abc){20}-[0-9]{2}-\\\\{10}$"},
]


@pytest.mark.parametrize("page_size", [*(pytest.param(size, marks=pytest.mark.full) for size in (1, 16)), 64])
def test_greedy_replies_are_the_same_with_jumps_and_without(
    make_demo: Callable[..., Demo], monkeypatch: pytest.MonkeyPatch, jumps: list[Jump], page_size: int
) -> None:
    """All schemas in one batch, with whitespace or without: equal tokens and ends, and what has ended is valid."""
    demo = make_demo(page_size=page_size, overlap_on_cpu=page_size != 16, dtype="float32")
    spaces = 1 if page_size == 64 else 0
    wanted = [(schema, json_option(schema, max_whitespace=spaces)) for schema in SCHEMAS]

    def both() -> list[Result]:
        demo.run(demo.client.control("flush_cache"))
        return demo.together([demo.one(step, temperature=0, max_tokens=90) for _, step in wanted])

    jumping = both()
    assert len(jumps) >= len(SCHEMAS), jumps
    num_jumps = len(jumps)
    monkeypatch.setattr(replies, "MIN_JUMP", 1 << 30)
    stepping = both()
    assert len(jumps) == num_jumps
    for (schema, _), one, other in zip(wanted, jumping, stepping, strict=True):
        assert (one.ids, one.finish) == (other.ids, other.finish), schema
        if one.finish is not None and one.finish.reason == "stop":
            jsonschema.validate(json.loads(one.text), schema)
    assert sum(len(one.ids) < 90 for one in jumping) > len(SCHEMAS) // 2


@pytest.mark.parametrize("eos", [0, 1])
def test_a_jump_stops_where_the_text_may_end(demo: Demo, jumps: list[Jump], eos: int) -> None:
    """With several ends none of them is forced: each may be what the model says, and the text before it is whole."""
    ends = sorted(demo.tokenizer.added_tokens[name] for name in ("<|im_end|>", "<|endoftext|>"))
    step = GrammarOption(backend="llguidance", kind="choice", source='["a text of several tokens, all of them forced"]')
    result = demo.generate(step, temperature=0, logit_bias={ends[eos]: 100.0, ends[1 - eos]: -100.0})
    assert result.ids[-1] == ends[eos]
    assert not set(result.ids[:-1]) & set(ends)
    assert result.text == "a text of several tokens, all of them forced"
    assert result.finish is not None
    assert (result.finish.reason, result.finish.matched) == ("stop", ends[eos])
    assert sum(each.num for each in jumps) >= len(result.ids) - 3


@pytest.mark.sampled
@pytest.mark.parametrize("state", ["open", "in"])
@pytest.mark.parametrize("budget", [None, 4])
def test_forced_text_behind_thinking(
    demo: Demo, monkeypatch: pytest.MonkeyPatch, jumps: list[Jump], state: str, budget: int | None
) -> None:
    """Thinking is never jumped over, and the answer behind it is the same with jumps and without."""
    asked: dict[str, Any] = {
        "prompt": demo.prompt("What is the capital of France? Answer as JSON.", thinking=True),
        "thinking": demo.thinking(state, budget),
        "temperature": 0,
    }
    step = json_option(SCHEMAS[2], max_whitespace=0)
    first = demo.generate(step, **asked)
    assert jumps
    num_jumps = len(jumps)
    monkeypatch.setattr(replies, "MIN_JUMP", 1 << 30)
    second = demo.generate(step, **asked)
    assert len(jumps) == num_jumps
    assert (first.ids, first.finish) == (second.ids, second.finish)
    thought, end, answer = demo.tokenizer.decode(first.ids, skip_special_tokens=True).partition("</think>")
    assert end
    assert thought
    jsonschema.validate(json.loads(answer), SCHEMAS[2])
