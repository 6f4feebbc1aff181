"""The grammar of each tool format: it allows what the parser reads, and what it allows the parser reads back."""

# ruff: noqa: E501 - tables: one case a line

from __future__ import annotations

import json
import random
import sys
from functools import cache
from importlib import metadata
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from dovetail.contracts.grammar import GrammarLimits, GrammarMatcher, GrammarSpec, Vocabulary
from dovetail.contracts.output import FormatSpec
from dovetail.contracts.tools import ToolParser
from dovetail.sdk.formats.output import make_parser, parse_full
from dovetail.sdk.schemas.structural import check
from dovetail.text.tokenizer.tokenizer import Tokenizer

sys.path.insert(0, str(Path(__file__).parent))  # the table beside this file

from samples import MACHINES, PLAMO, plamo

entry_points = cache(metadata.entry_points)
"""All metadata is read for it, and most tests ask."""

TOOLS: list[dict[str, Any]] = [
    {
        "type": "function",
        "function": {
            "name": "get_weather",
            "parameters": {
                "type": "object",
                "properties": {
                    "city": {"type": "string", "enum": ["Paris", "Rome"]},
                    "days": {"type": "integer", "minimum": 0, "maximum": 99},
                    "exact": {"type": "boolean"},
                },
                "required": ["city"],
                "additionalProperties": False,
            },
        },
    },
    {
        "type": "function",
        "function": {"name": "now", "parameters": {"type": "object", "properties": {}, "additionalProperties": False}},
    },
]
ARGUMENTS = '{"city": "Paris", "days": 3}'
_TAGGED = "<parameter=city>{0}Paris{0}</parameter>\n<parameter=days>{0}3{0}</parameter>\n"
_JSON = '{"name": "get_weather", "arguments": ' + ARGUMENTS + "}"
_M3 = "]<]minimax[>["
_DSML = (
    '<{0}{1}>\n<{0}{2}invoke name="get_weather">\n<{0}{2}parameter name="city" string="true">Paris</{0}{2}parameter>\n'
    '<{0}{2}parameter name="days" string="false">3</{0}{2}parameter>\n</{0}{2}invoke>\n</{0}{1}>'
)
WRITTEN = {
    "hermes": '<tool_call>\n{"name": "get_weather", "arguments": ' + ARGUMENTS + "}\n</tool_call>",
    "qwen3-coder": "<tool_call>\n<function=get_weather>\n" + _TAGGED.format("\n") + "</function>\n</tool_call>",
    "seed-oss": "<seed:tool_call>\n<function=get_weather>\n" + _TAGGED.format("") + "</function>\n</seed:tool_call>",
    "minimax-m2": '<minimax:tool_call>\n<invoke name="get_weather">\n<parameter name="city">Paris</parameter>\n'
    '<parameter name="days">3</parameter>\n</invoke>\n</minimax:tool_call>',
    "llama3": '{"name": "get_weather", "parameters": ' + ARGUMENTS + "}",
    "pythonic": '[get_weather(city="Paris", days=3)]',
    "mistral": "[TOOL_CALLS]get_weather[ARGS]" + ARGUMENTS,
    "deepseek-v3": "<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>function<｜tool▁sep｜>get_weather\n```json\n"
    + ARGUMENTS
    + "\n```<｜tool▁call▁end｜><｜tool▁calls▁end｜>",
    "deepseek-v31": "<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>get_weather<｜tool▁sep｜>"
    + ARGUMENTS
    + "<｜tool▁call▁end｜><｜tool▁calls▁end｜>",
    "deepseek-v32": '<｜DSML｜function_calls>\n<｜DSML｜invoke name="get_weather">\n'
    '<｜DSML｜parameter name="city" string="true">Paris</｜DSML｜parameter>\n'
    '<｜DSML｜parameter name="days" string="false">3</｜DSML｜parameter>\n</｜DSML｜invoke>\n</｜DSML｜function_calls>',
    "kimi-k2": "<|tool_calls_section_begin|><|tool_call_begin|>functions.get_weather:0<|tool_call_argument_begin|>"
    + ARGUMENTS
    + "<|tool_call_end|><|tool_calls_section_end|>",
    "glm45": "<tool_call>get_weather\n<arg_key>city</arg_key>\n<arg_value>Paris</arg_value>\n"
    "<arg_key>days</arg_key>\n<arg_value>3</arg_value>\n</tool_call>",
    "gpt-oss": "<|channel|>commentary to=functions.get_weather <|constrain|>json<|message|>" + ARGUMENTS + "<|call|>",
    "apertus": '<|tools_prefix|>[{"get_weather": ' + ARGUMENTS + "}]<|tools_suffix|>",
    "cohere-command": '<|START_ACTION|>[{"tool_name": "get_weather", "parameters": ' + ARGUMENTS + "}]<|END_ACTION|>",
    "deepseek-v4": _DSML.format("｜DSML｜", "tool_calls", ""),
    "deepseek-v41": _DSML.format("｜DSML｜", " calls", " "),
    "gigachat35": _DSML.format("｜GCML｜", "tool_calls", ""),
    "dots": "<dots_function_call>\n<invoke name=get_weather>\n<parameter name=city>Paris</parameter>\n"
    "<parameter name=days>3</parameter>\n</invoke>\n</dots_function_call>",
    "functiongemma": "<start_function_call>call:get_weather{city:<escape>Paris<escape>,days:3}<end_function_call>",
    "gemma4": '<|tool_call>call:get_weather{city:<|"|>Paris<|"|>,days:3}<tool_call|>',
    "gigachat3": '<|function_call|>{"name": "get_weather", "arguments": ' + ARGUMENTS + "}",
    "granite": f"<|tool_call|>[{_JSON}]",
    "granite-20b-fc": f"<function_call> {_JSON}",
    "hunyuan-a13b": f"<tool_calls>[{_JSON}]</tool_calls>",
    "hy-v3": "<tool_calls>\n<tool_call>get_weather<tool_sep>\n<arg_key>city</arg_key><arg_value>Paris</arg_value>\n"
    "<arg_key>days</arg_key><arg_value>3</arg_value>\n</tool_call>\n</tool_calls>",
    "internlm": '<|action_start|><|plugin|>\n{"name": "get_weather", "parameters": ' + ARGUMENTS + "}<|action_end|>",
    "kimi-k3": '<|open|>tools<|sep|><|open|>call tool="get_weather" index="1"<|sep|>'
    '<|open|>argument key="city" type="string"<|sep|>Paris<|close|>argument<|sep|>'
    '<|open|>argument key="days" type="object"<|sep|>3<|close|>argument<|sep|><|close|>call<|sep|><|close|>tools<|sep|>',
    "lfm2": '<|tool_call_start|>[get_weather(city="Paris", days=3)]<|tool_call_end|>',
    "longcat": f"<longcat_tool_call>\n{_JSON}\n</longcat_tool_call>",
    "minicpm5": '<function name="get_weather"><param name="city">Paris</param><param name="days">3</param></function>',
    "minimax-m3": f'{_M3}<tool_call>\n{_M3}<invoke name="get_weather">{_M3}<city>Paris{_M3}</city>{_M3}<days>3{_M3}</days>'
    f"{_M3}</invoke>\n{_M3}</tool_call>",
    "nemotron": f"<TOOLCALL>[{_JSON}]</TOOLCALL>",
    "olmo3": '<function_calls>\nget_weather(city="Paris", days=3)\n</function_calls>',
    "phi4-mini-json": f"functools[{_JSON}]",
    "solar": "<|tool_calls|><|tool_call:begin|>a1<|tool_call:name|>get_weather<|tool_call:args|>"
    + ARGUMENTS
    + "<|tool_call:end|><|calls|>",
    "step3": '<｜tool_calls_begin｜><steptml:invoke name="get_weather"><steptml:parameter name="city">Paris</steptml:parameter>'
    '<steptml:parameter name="days">3</steptml:parameter></steptml:invoke><｜tool_calls_end｜>',
    "xlam": f"[{_JSON}]",
}
WRITTEN |= {
    "beam": ' to=get_weather<|channel|>analysis <|constrain|>xml<|message|><rfl:parameter name="city">\nParis\n</rfl:parameter>'
    '<rfl:parameter name="days">\n3\n</rfl:parameter>',
    "functionary": f"get_weather\n{ARGUMENTS}",
    "hyperclova": f" -> tool/function_call\n[{_JSON}]",
    "inkling": f'get_weather<|content_invoke_tool_json|>{{"name": "get_weather", "args": {ARGUMENTS}}}<|end_message|>',
    "iquest-q1": "<iquest_tool_call>get_weather<arg_key>city</arg_key><arg_value>Paris</arg_value>"
    "<arg_key>days</arg_key><arg_value>3</arg_value></iquest_tool_call>",
    "k2-horizon": "<ifm|tool_calls><ifm|tool_call>get_weather<ifm|arg_key>city</ifm|arg_key><ifm|arg_value>Paris</ifm|arg_value>"
    "<ifm|arg_key>days</ifm|arg_key><ifm|arg_value>3</ifm|arg_value></ifm|tool_call></ifm|tool_calls>",
    "muse": ' to=get_weather<|message|><atem:function_calls>\n<atem:invoke name="get_weather">\n'
    '<atem:parameter name="city">Paris</atem:parameter>\n<atem:parameter name="days">3</atem:parameter>\n'
    "</atem:invoke>\n</atem:function_calls>",
    "plamo3": f"{plamo('begin_tool_requests')}{PLAMO[0]}get_weather{PLAMO[1]}{ARGUMENTS}{PLAMO[2]}{plamo('end_tool_requests')}",
}
ANSWERS = {
    "gpt-oss": "<|channel|>final<|message|>so it is",
    "beam": "<|channel|>final<|message|>so it is",
    "functionary": "all\nso it is",
    "hyperclova": "\nso it is",
    "inkling": "<|message_model|><|content_text|>so it is",
    "muse": " to=user<|message|>so it is",
}
"""How a format writes an answer, where that is not the bare text."""
BEGUN = {"hyperclova": " -> tool/function_call"}
"""What begins calls, where the marker behind thoughts is the end of the reply in the tests' vocabulary."""
NAMED = {"type": "function", "function": {"name": "now"}}


def parser_of(name: str) -> ToolParser:
    (entry,) = entry_points(group="dovetail.tool_parsers.v1", name=name)
    made = entry.load()()
    assert isinstance(made, ToolParser)
    return made


@pytest.fixture(scope="module")
def compile_(tokenizer: Tokenizer) -> Any:
    """Compile a grammar with llguidance."""
    (entry,) = entry_points(group="dovetail.grammar_backends.v1", name="llguidance")
    size = tokenizer.vocab_size
    end = tokenizer.added_tokens["<|im_end|>"]
    backend = entry.load()(
        Vocabulary(
            tokens=[b"" if i in tokenizer.special_ids else tokenizer.token_bytes(i) for i in range(size)],
            size=size,
            eos_ids=frozenset([end]),
            special_ids=tokenizer.special_ids,
            fingerprint="test",
            added=tokenizer.added_tokens,
            encode=lambda text: tokenizer.encode(text, add_special_tokens=False),
        )
    )

    def run(spec: GrammarSpec) -> GrammarMatcher:
        check(json.loads(spec.source))
        return backend.compile(spec, GrammarLimits()).matcher()

    return run


def accepts(matcher: GrammarMatcher, tokenizer: Tokenizer, text: str) -> bool:
    ids = tokenizer.encode(text, add_special_tokens=False)
    return matcher.accept(ids) == len(ids) and matcher.accepting


def test_every_format_has_a_grammar() -> None:
    """No built-in tool parser is without."""
    found = {e.name for e in entry_points(group="dovetail.tool_parsers.v1") if e.value.startswith("dovetail_parsers.")}
    assert found == {*WRITTEN, "template"}  # the last: see tests/text/test_derive.py


@pytest.mark.parametrize("name", WRITTEN)
def test_the_grammar_allows_the_formats_own_calls(name: str, tokenizer: Tokenizer, compile_: Any) -> None:
    """Required calls as the parser reads them; a call that was not chosen, of no tool or one too many is refused."""
    parser = parser_of(name)
    required = parser.grammar(TOOLS, "required", True, True)
    assert required is not None
    assert accepts(compile_(required), tokenizer, WRITTEN[name])
    assert not accepts(compile_(required), tokenizer, "so it is")
    assert not accepts(compile_(required), tokenizer, WRITTEN[name].replace("get_weather", "get_weathers"))
    single = parser.grammar(TOOLS, "required", True, False)
    assert single is not None
    assert accepts(compile_(single), tokenizer, WRITTEN[name])
    assert not any(accepts(compile_(single), tokenizer, mark.join([WRITTEN[name]] * 2)) for mark in ("", "\n"))
    named = parser.grammar(TOOLS, NAMED, True, True)
    assert named is not None
    assert not accepts(compile_(named), tokenizer, WRITTEN[name])
    assert required == parser.grammar(TOOLS, "required", True, True)


@pytest.mark.parametrize("name", WRITTEN)
def test_in_free_text_calls_may_stand(name: str, tokenizer: Tokenizer, compile_: Any) -> None:
    """With `auto`, an answer is free, and a call in it is right."""
    spec = parser_of(name).grammar(TOOLS, "auto", True, True)
    assert spec is not None
    assert accepts(compile_(spec), tokenizer, ANSWERS.get(name, "so it is"))
    assert accepts(compile_(spec), tokenizer, WRITTEN[name])
    assert not accepts(compile_(spec), tokenizer, WRITTEN[name].replace("get_weather", "get_weathers"))


@pytest.mark.sampled
@pytest.mark.parametrize("name", WRITTEN)
@pytest.mark.parametrize("seed", range(3))
def test_what_the_grammar_allows_is_read_back(name: str, seed: int, tokenizer: Tokenizer, compile_: Any) -> None:
    """A random walk through the grammar ends in calls that the parser reads and the schema allows."""
    parser = parser_of(name)
    spec = parser.grammar(TOOLS, "required", True, seed > 0)
    matcher = compile_(spec)
    rng = random.Random(seed)
    mask = np.zeros((1, (tokenizer.vocab_size + 31) // 32), dtype=np.int32)
    end = tokenizer.added_tokens["<|im_end|>"]
    ids = tokenizer.encode(BEGUN.get(name, ""), add_special_tokens=False)
    assert matcher.accept(ids) == len(ids)
    while len(ids) < 6000:
        assert matcher.fill(mask, 0)
        bits = np.unpackbits(mask.view(np.uint8), bitorder="little")[: tokenizer.vocab_size]
        allowed = np.flatnonzero(bits).tolist()
        is_space = bool(ids) and tokenizer.token_bytes(ids[-1]).isspace()
        choices = [token for token in allowed if not (is_space and tokenizer.token_bytes(token).isspace())] or allowed
        token = end if end in allowed and rng.random() < 0.5 else rng.choice(choices)
        if token == end:
            break
        ids.append(token)
        assert matcher.accept([token]) == 1
    made = make_parser(parser.extend(FormatSpec(), TOOLS), tokenizer)
    if name in MACHINES:
        made.prime(MACHINES[name])
    reply = parse_full(made, ids)
    assert reply.tool_calls
    for call in reply.tool_calls:
        arguments = json.loads(call.arguments)
        if call.name == "now":
            assert arguments == {}
        else:
            assert arguments["city"] in ("Paris", "Rome")
            assert set(arguments) <= {"city", "days", "exact"}
            assert isinstance(arguments.get("days", 0), int)
            assert isinstance(arguments.get("exact", True), bool)
    # A preamble, which some allow before a call, is content.
    assert name in MACHINES or (reply.content or "").strip() == ""
    assert seed > 0 or len(reply.tool_calls) == 1
