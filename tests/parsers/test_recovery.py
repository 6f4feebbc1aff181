"""What a model writes slightly wrong: nothing is lost, nothing raw leaks, and the same comes out in every chunking.

`ROWS` is the recovery table of `docs/output-recovery.md`: each line of it stands here for every format that it holds in.
"""

# ruff: noqa: E501 - a table: one case per row, markers as they are

from __future__ import annotations

import json
import sys
from functools import cache
from importlib import metadata
from pathlib import Path
from typing import Any

import pytest

from dovetail.contracts.output import FormatSpec
from dovetail.contracts.reasoning import ParserRequest
from dovetail.sdk.formats.machine import IncrementalParser
from dovetail.sdk.formats.output import fold, make_parser
from dovetail.text.parsing.stream import NoTemplate
from dovetail.text.tokenizer.tokenizer import Tokenizer

sys.path.insert(0, str(Path(__file__).parent))  # the table beside this file

from samples import CALLS, CONTENT_FIRST, TWO
from samples import TOOLS as OTHER_TOOLS

entry_points = cache(metadata.entry_points)
"""All metadata is read for it, and most tests ask."""

TOOLS = [
    {
        "type": "function",
        "function": {
            "name": "f",
            "parameters": {
                "type": "object",
                "properties": {
                    "city": {"type": "string"},
                    "days": {"type": "integer"},
                    "list": {"type": "array"},
                },
            },
        },
    }
]
Call = tuple[str, Any]
K2, K2_END, ARGS = "<|tool_call_begin|>functions.f:", "<|tool_call_end|>", "<|tool_call_argument_begin|>"
M3 = "]<]minimax[>["
K2_SECTION, K2_SECTION_END = "<|tool_calls_section_begin|>", "<|tool_calls_section_end|>"
V31, V31_END, SEP = "<｜tool▁call▁begin｜>", "<｜tool▁call▁end｜>", "<｜tool▁sep｜>"
V31_SECTION, V31_SECTION_END = "<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>"
LONG = "a" * 100
S3_SECTION, S3_SECTION_END = "<｜tool_calls_begin｜>", "<｜tool_calls_end｜>"
S3, S3_SEP, S3_END = "<｜tool_call_begin｜>", "<｜tool_sep｜>", "<｜tool_call_end｜>"
S3_CALL = '<steptml:invoke name="f"><steptml:parameter name="city">x</steptml:parameter>'
ONE = [("f", {"city": "x"})]
MUSE_START, MUSE_END = "<atem:function_calls>", "</atem:function_calls>"
MUSE, ATEM, ATEM_END = f" to=f<|message|>{MUSE_START}", '<atem:parameter name="', "</atem:parameter>"
KEYED = [
    ("glm45", "<tool_call>f\n", "</tool_call>"),
    ("iquest-q1", "<iquest_tool_call>f", "</iquest_tool_call>"),
    ("hy-v3", "<tool_calls><tool_call>f<tool_sep>", "</tool_call></tool_calls>"),
]
"""Formats in which a tag of its own opens a value: how a call begins and ends."""

ROWS: list[tuple[str, str, str | None, list[Call]]] = [
    # A marker in a value is part of it.
    ("hermes", '<tool_call>{"name": "f", "arguments": {"city": "a </tool_call> b"}}</tool_call>', None,
     [("f", {"city": "a </tool_call> b"})]),
    ("hermes", '<tool_call>{"name": "f", "arguments": {"city": "a <tool_call> b"}}</tool_call>', None,
     [("f", {"city": "a <tool_call> b"})]),
    ("kimi-k2", f'{K2_SECTION}{K2}0{ARGS}{{"city": "{K2_END}{K2_SECTION_END}"}}{K2_END}{K2_SECTION_END}', None,
     [("f", {"city": K2_END + K2_SECTION_END})]),
    ("deepseek-v31", f'{V31_SECTION}{V31}f{SEP}{{"city": "{V31_SECTION_END}"}}{V31_END}{V31_SECTION_END}', None,
     [("f", {"city": V31_SECTION_END})]),
    ("qwen3-coder", "<tool_call>\n<function=f>\n<parameter=city>\na </tool_call> b\n</parameter>\n</function>\n</tool_call>",
     None, [("f", {"city": "a </tool_call> b"})]),
    ("glm45", "<tool_call>f\n<arg_key>city</arg_key>\n<arg_value>a </tool_call> b</arg_value>\n</tool_call>", None,
     [("f", {"city": "a </tool_call> b"})]),
    ("mistral", '[TOOL_CALLS]f[ARGS]{"city": "[TOOL_CALLS]"}', None, [("f", {"city": "[TOOL_CALLS]"})]),
    # A missing brace does not swallow the next call.
    ("kimi-k2", f'{K2_SECTION}{K2}0{ARGS}{{"days": 1{K2_END}{K2}1{ARGS}{{"city": "x"}}{K2_END}{K2_SECTION_END}', None,
     [("f", '{"days": 1'), *ONE]),
    ("kimi-k2", f'{K2_SECTION}{K2}0{ARGS}{{"days": 1{K2}1{ARGS}{{"city": "x"}}{K2_END}{K2_SECTION_END}so', "so",
     [("f", '{"days": 1'), *ONE]),
    ("deepseek-v31", f'{V31_SECTION}{V31}f{SEP}{{"days": 1{V31_END}{V31}f{SEP}{{"city": "x"}}{V31_END}{V31_SECTION_END}',
     None, [("f", '{"days": 1'), *ONE]),
    ("hermes", '<tool_call>{"name": "f", "arguments": {"city": "x"}</tool_call><tool_call>{"name": "f"}</tool_call>',
     None, [*ONE, ("f", {})]),
    ("deepseek-v3", f'{V31_SECTION}{V31}function{SEP}f\n```json\n{{"days": 1\n```{V31_END}\n{V31}function{SEP}f\n```json\n{{"city": "x"}}\n```'
     f"{V31_END}{V31_SECTION_END}so", "so", [("f", '{"days": 1\n'), *ONE]),
    ("deepseek-v3", f'{V31_SECTION}{V31}function{SEP}f\n```json\n{{"city": "a ``` b"}}\n```{V31_END}{V31_SECTION_END}', None,
     [("f", {"city": "a ``` b"})]),
    # Noise in a section: no phantom call, and the next call is found.
    ("kimi-k2", f'{K2_SECTION}noise {K2}0{ARGS}{{"city": "x"}}{K2_END}{K2_SECTION_END}', "noise ", ONE),
    ("deepseek-v31", f'{V31_SECTION}noise{V31}f{SEP}{{"city": "x"}}{V31_END}{V31_SECTION_END}', "noise", ONE),
    ("kimi-k2", f'{K2_SECTION}{K2}0{ARGS}{{}}{K2_END} and {K2}1{ARGS}{{"city": "x"}}{K2_END}{K2_SECTION_END}', " and ",
     [("f", {}), *ONE]),
    ("kimi-k2", f"{K2_SECTION}noise{K2_SECTION_END}", f"{K2_SECTION}noise{K2_SECTION_END}", []),
    ("minimax-m2", '<minimax:tool_call>noise<invoke name="f"><parameter name="city">x</parameter></invoke>'
     "</minimax:tool_call>", "noise", ONE),
    # Text in a tag that is no attribute: of a name, then there is no call; of a key, then there is no argument.
    ("muse", f'{MUSE}<atem:invoke name="f" a:b=\'1\' id="1">\n{ATEM}city" string="true">x{ATEM_END}</atem:invoke>{MUSE_END}', None,
     [("f", {"city": "x"})]),
    ("muse", f'{MUSE}<atem:invoke name="f"why>\n{ATEM}city">x{ATEM_END}</atem:invoke>{MUSE_END}',
     f'{MUSE_START}<atem:invoke name="f"why>\n{ATEM}city">x{ATEM_END}</atem:invoke>{MUSE_END}', []),
    ("muse", f'{MUSE}<atem:invoke name="f">\n{ATEM}city"why>x{ATEM_END}{ATEM}days">3{ATEM_END}</atem:invoke>{MUSE_END}',
     f'{ATEM}city"why>x{ATEM_END}', [("f", {"days": 3})]),
    ("minimax-m2", '<minimax:tool_call><invoke name="f"><parameter name="city>x</parameter><parameter name="days">3</parameter></invoke>'
     "</minimax:tool_call>", '<parameter name="city>x</parameter>', [("f", {"days": 3})]),
    ("minimax-m2", '<minimax:tool_call><invoke name="f"><parameter name="days">3</parameter><parameter name="city</invoke>so'
     "</minimax:tool_call>", '<parameter name="cityso', [("f", {"days": 3})]),
    ("k2-horizon", "<ifm|tool_calls><ifm|tool_call>f<ifm|arg_key>city</ifm|arg_key><ifm|arg_key>days</ifm|arg_key><ifm|arg_type>integer</ifm|arg_type>"
     "<ifm|arg_value>3</ifm|arg_value></ifm|tool_call></ifm|tool_calls>", "<ifm|arg_key>city</ifm|arg_key>", [("f", {"days": 3})]),
    # Markers that mean nothing to a call come back where there is none.
    ("internlm", "<|action_start|><|plugin|>\nnoise<|action_end|>so", "<|action_start|><|plugin|>\nnoise<|action_end|>so", []),
    ("internlm", "<|action_start|><|plugin|>no<|plugin|>ise<|action_end|>", "<|action_start|><|plugin|>no<|plugin|>ise<|action_end|>", []),
    ("internlm", '<|action_start|> <|plugin|>{"name": "f", "parameters": {"city": "<|plugin|>"}}<|action_end|>', None,
     [("f", {"city": "<|plugin|>"})]),
    # Markers that are missing.
    ("step3", f'{S3_SECTION}{S3}{S3_CALL}</steptml:invoke>{S3_END}{S3_SECTION_END}', None, ONE),
    ("step3", f'{S3_SECTION}{S3}{S3_SEP}{S3_CALL}</steptml:invoke>{S3_END}{S3}function{S3_SEP}{S3_CALL}</steptml:invoke>{S3_SECTION_END}', None,
     [*ONE, *ONE]),
    ("step3", f'{S3_SECTION}function{S3_SEP}{S3_CALL}</steptml:invoke>{S3_SECTION_END}', None, ONE),
    ("step3", f'{S3_SECTION}{S3}function{S3_SEP}noise{S3_END}{S3_SECTION_END}', f"{S3_SECTION}{S3}function{S3_SEP}noise{S3_END}{S3_SECTION_END}", []),
    ("minimax-m2", '<invoke name="f"><parameter name="city">x</parameter></invoke>', None, ONE),
    ("seed-oss", "<function=f><parameter=city>x</parameter></function></seed:tool_call>so", "so", ONE),
    ("kimi-k2", f'{K2}0{ARGS}{{"city": "x"}}{K2_END}', None, ONE),
    ("deepseek-v31", f'{V31}f{SEP}{{"city": "x"}}{V31_END}', None, ONE),
    ("deepseek-v32", '<｜DSML｜invoke name="f"><｜DSML｜parameter name="city" string="true">x</｜DSML｜parameter>'
     "</｜DSML｜invoke>", None, ONE),
    ("qwen3-coder", "<tool_call><function=f><parameter=city>x</function></tool_call>", None, ONE),
    ("qwen3-coder", "<tool_call><function=f><parameter=city>x</tool_call>\n<tool_call><function=f></function></tool_call>",
     None, [*ONE, ("f", {})]),
    ("hermes", '<tool_call>{"name": "f", "arguments": {"city": "x"}}', None, ONE),
    # JSON that is Python, or not quite JSON.
    ("hermes", "<tool_call>{'name': 'f', 'arguments': {'city': 'it\\'s \"x\"', 'days': None, 'list': [True, False]}}"
     "</tool_call>", None, [("f", {"city": 'it\'s "x"', "days": None, "list": [True, False]})]),
    ("hermes", '<tool_call>{"name": "f", "arguments": {"city": "a\nb\tc"}}</tool_call>', None, [("f", {"city": "a\nb\tc"})]),
    ("kimi-k2", f"{K2_SECTION}{K2}0{ARGS}{{'city': 'x'}}{K2_END}{K2_SECTION_END}", None, ONE),
    ("qwen3-coder", "<tool_call><function=f><parameter=list>['a', True, None]</parameter></function></tool_call>", None,
     [("f", {"list": ["a", True, None]})]),
    # Keys beside the arguments, and around the call.
    ("hermes", '<tool_call>{"id": 1, "name": "f", "arguments": {"city": "x"}, "why": "so"}</tool_call>', None, ONE),
    ("hermes", '<tool_call>{"type": "function", "function": {"name": "f", "arguments": {"city": "x"}}}</tool_call>so', "so",
     ONE),
    ("hermes", '<tool_call>{"name": "f", "city": "x"}</tool_call>', None, ONE),
    # The schema's type wins over what the tags say.
    ("deepseek-v32", '<｜DSML｜function_calls><｜DSML｜invoke name="f"><｜DSML｜parameter name="days" string="true">3'
     '</｜DSML｜parameter><｜DSML｜parameter name="other" string="true">3</｜DSML｜parameter></｜DSML｜invoke>'
     "</｜DSML｜function_calls>", None, [("f", {"days": 3, "other": "3"})]),
    ("minimax-m3", f'{M3}<tool_call>{M3}<invoke name="f">{M3}</invoke>oops{M3}<invoke name="f">{M3}</invoke>{M3}</tool_call>', "oops",
     [("f", {}), ("f", {})]),
    # Text beside values, and keys without any: shown, and the call stays JSON.
    ("gemma4", '<|tool_call>call:f{city:oops<|"|>x<|"|>}<tool_call|>', "oops", ONE),
    ("gemma4", '<|tool_call>call:f{city:<|"|>x<|"|>oops}<tool_call|>', "oops", ONE),
    ("gemma4", '<|tool_call>call:f{city:<|"|>x<|"|>,oops}<tool_call|>', "oops", ONE),
    ("gemma4", '<|tool_call>call:f{oops}<tool_call|>', "oops", [("f", {})]),
    # Commas too many, and keys without a value.
    ("gemma4", '<|tool_call>call:f{city:<|"|>x<|"|>,}<tool_call|>', None, ONE),
    ("gemma4", '<|tool_call>call:f{list:[{a:1}', None, [("f", {"list": [{"a": 1}]})]),
    ("gemma4", '<|tool_call>call:f{city:<|"|>x', None, ONE),
    ("gemma4", '<|tool_call>call:f{days:<|"|>3', None, [("f", {"days": 3})]),
    ("gemma4", '<|tool_call>call:f{city:<|"|>x<|"|>,<|"|>days<|"|>oops:1}', "oops", [("f", {"city": "x", "days": 1})]),
    ("gemma4", '<|tool_call>call:f{,city:<|"|>x<|"|>,,days:1,}<tool_call|>', None, [("f", {"city": "x", "days": 1})]),
    ("gemma4", '<|tool_call>call:f{list:[1,{a:[2,],},],days:3}<tool_call|>', None, [("f", {"list": [1, {"a": [2]}], "days": 3})]),
    ("gemma4", '<|tool_call>call:f{city:,days:,list:[]}<tool_call|>', None, [("f", {"city": "", "days": None, "list": []})]),
    ("gemma4", '<|tool_call>call:f{list:[{a:}],:1}<tool_call|>', None, [("f", {"list": [{"a": None}], "": 1})]),
    ("minimax-m3", f'{M3}<tool_call>{M3}<invoke name="f">oops{M3}<city>x{M3}</city>{M3}</invoke>{M3}</tool_call>', "oops", ONE),
    ("minimax-m3", f'a\n{M3}<invoke name="f"word>{M3}<city>x{M3}</city>{M3}</invoke>{M3}<invoke name="nope">{M3}</invoke>',
     f'a\n<invoke name="f"word>{M3}<city>x{M3}</city>{M3}</invoke>{M3}<invoke name="nope">{M3}</invoke>', []),
    ("minimax-m3", f'{M3}<tool_call>{M3}<invoke name="f">{M3}<city>x{M3}</ciy>{M3}</invoke>{M3}</tool_call>', f"{M3}</ciy>", ONE),
    ("minimax-m3", f'{M3}<tool_call>{M3}<invoke name="f">{M3}<any>oops{M3}<a>1{M3}</a>{M3}</any>{M3}</invoke>{M3}</tool_call>',
     "oops", [("f", {"any": {"a": 1}})]),
    ("minimax-m3", f'{M3}<tool_call>{M3}<invoke name="f">{M3}<city>x{M3}</city>{M3}<city>y{M3}</city>{M3}</invoke>{M3}</tool_call>',
     None, [("f", '{"city": "x", "city": "y"}')]),
    # Elements of one name are a list, where the schema does not say otherwise.
    ("minimax-m3", f'{M3}<tool_call>{M3}<invoke name="f">{M3}<list>x{M3}</list>{M3}<city>x{M3}</city>{M3}<list>2{M3}</list>'
     f'{M3}</invoke>{M3}</tool_call>', None, [("f", {"list": ["x", 2], "city": "x"})]),
    ("minimax-m3", f'{M3}<tool_call>{M3}<invoke name="f">{M3}<any>{M3}<a>1{M3}</a>{M3}<a>y{M3}</a>{M3}</any>{M3}</invoke>{M3}</tool_call>',
     None, [("f", {"any": {"a": [1, "y"]}})]),
    # Tags and markers within JSON's quotes are text, unless nothing closes these.
    ("minimax-m3", f'{M3}<tool_call>{M3}<invoke name="f">{M3}<list>["a{M3}</list>\\"", {{}}]{M3}</list>{M3}</invoke>{M3}</tool_call>',
     None, [("f", {"list": [f'a{M3}</list>"', {}]})]),
    ("minimax-m3", f'{M3}<tool_call>{M3}<invoke name="f">{M3}<list>["a]{M3}</list>{M3}<city>x{M3}</city>{M3}</invoke>{M3}</tool_call>',
     None, [("f", {"list": '["a]', "city": "x"})]),
    ("qwen3-coder", '<tool_call>\n<function=f>\n<parameter=list>\n["</parameter></function>", "a\\\\"]\n</parameter>\n</function>\n</tool_call>',
     None, [("f", {"list": ["</parameter></function>", "a\\"]})]),
    ("qwen3-coder", '<tool_call>\n<function=f>\n<parameter=list>\n["a]\n</parameter>\n<parameter=city>\nx\n</parameter>\n</function>\n</tool_call>',
     None, [("f", {"list": '["a]', "city": "x"})]),
    ("gemma4", '<|tool_call>call:f{list:[{"k,":"<tool_call|>:}\\""}],city:<|"|>x<|"|>}<tool_call|>', None,
     [("f", {"list": [{"k,": '<tool_call|>:}"'}], "city": "x"})]),
    ("gemma4", '<|tool_call>call:f{list:["a],city:<|"|>x<|"|>}<tool_call|>', None, [("f", {"list": ["a"], "city": "x"})]),
    ("minimax-m3", f'{M3}<tool_call>{M3}<invoke name="f">{M3}<any>{M3}<a>1{M3}</any>{M3}<city>x{M3}</city>{M3}</invoke>{M3}</tool_call>',
     None, [("f", {"any": {"a": 1}, "city": "x"})]),
    # A closing tag that is broken: its beginning is dropped, any other text is shown.
    ("minimax-m3", f'{M3}<tool_call>{M3}<invoke name="f">{M3}<city>x{M3}</ci{M3}<tool_call>{M3}<invoke name="f">{M3}</invoke>{M3}</tool_call>',
     None, [*ONE, ("f", {})]),
    ("minimax-m3", f'{M3}<tool_call>{M3}<invoke name="f">{M3}<city>x{M3}</oops{M3}<tool_call>{M3}<invoke name="f">{M3}</invoke>{M3}</tool_call>',
     f"{M3}</oops", [*ONE, ("f", {})]),
    ("minimax-m3", f'{M3}<tool_call>{M3}<invoke name="f">{M3}<list>["a]", 1]', None, [("f", {"list": ["a]", 1]})]),
    ("hermes", '<tool_call>{"name": "f", "oops: <tool_call>{"name": "f", "arguments": {"city": "x"}}</tool_call>',
     '"oops: <tool_call>{"name": "f", "arguments": {"city": "x"}}', [("f", "")]),
    ("hermes", '<tool_call>{"name": "f", "id": oops, "arguments": {"city": "x"}}</tool_call>',
     '"id": oops, "arguments": {"city": "x"}}', [("f", "")]),
    ("lfm2", "<|tool_call_start|>[f(city='x', oops<|tool_call_start|>[f(city='x')]<|tool_call_end|>", " oops",
     [("f", '{"city": "x"'), *ONE]),
    # All arguments in one parameter that the tool does not have.
    ("deepseek-v32", '<｜DSML｜function_calls><｜DSML｜invoke name="f"><｜DSML｜parameter name="arguments" string="false">{"city": "x"}'
     "</｜DSML｜parameter></｜DSML｜invoke></｜DSML｜function_calls>", None, ONE),
    ("qwen3-coder", '<tool_call><function=f><parameter=input>\n{"city": "x"}\n</parameter><parameter=days>3</parameter></function></tool_call>',
     None, [("f", {"city": "x", "days": 3})]),
    ("qwen3-coder", "<tool_call><function=f><parameter=input>{}</parameter></function></tool_call>", None, [("f", {})]),
    ("qwen3-coder", '<tool_call><function=f><parameter=input>{"other": 1}</parameter></function></tool_call>', None,
     [("f", {"input": {"other": 1}})]),
    ("minicpm5", '<function name="f"><param name="arguments"><![CDATA[{"city": "x"}]]></param></function>', None, ONE),
    # Other ways to write calls that a format's models fall into.
    ("dots", '<dots_function_call>{"name": "f", "arguments": {"city": "x"}}</dots_function_call>', None, ONE),
    ("gemma4", '<|tool_call>:f{city:<|"|>x<|"|>}<tool_call|>', None, ONE),
    ("gemma4", '<|tool_call>callback{}<tool_call|>', None, [("callback", {})]),
    ("xlam", '[{"name": "f", "arguments": {"city": "x"}}]', None, ONE),
    ("xlam", 'So:\n```json\n[{"name": "f", "arguments": {"city": "x"}}]\n```', "So:\n", ONE),
    ("xlam", '```json\n[{"name": "NAME", "arguments": {"city": "x"}}]\n```', '```json\n[{"name": "NAME", "arguments": {"city": "x"}}]\n```', []),
    ("xlam", '[{"name": "NAME", "arguments": {}}, {"name": "f"}]', '[{"name": "NAME", "arguments": {}}, {"name": "f"}]', []),
    # Behind calls that only the reply's end closes stands an answer: what is no marker there is text.
    ("xlam", '```json\n[{"name": "f"}]\n```\nRun\n```\nls\n```\nfor `json`.', "\n\nRun\n```\nls\n```\nfor `json`.", [("f", {})]),
    ("granite", '<|tool_call|>[{"name": "f"}]</tool_call> ends in </tool_call>.', " ends in </tool_call>.", [("f", {})]),
    ("xlam", "So:\n```json\n[1, 2]\n``` it is", "So:\n```json\n[1, 2]\n``` it is", []),
    ("lfm2", "<|tool_call_start|>[f(city='a -n '1,2p' b')]<|tool_call_end|>", None, [("f", {"city": "a -n '1,2p' b"})]),
    ("glm45", '<tool_call>f<arg_key>list</arg_key><arg_value>[{\\"a\\": \\"1\\"}]</arg_value></tool_call>', None, [("f", {"list": [{"a": "1"}]})]),
    ("lfm2", "<|tool_call_start|>[f(city='don't stop', days=1), f(city='x')]<|tool_call_end|>", None,
     [("f", {"city": "don't stop", "days": 1}), *ONE]),
    ("pythonic", "[f(city='don't stop')]", None, [("f", {"city": "don't stop"})]),
    ("olmo3", "<function_calls>\nf(list=['it's', 1e400])\n</function_calls>", None, [("f", '{"list": ["it\'s", 1e400]}')]),
    ("lfm2", "<|tool_call_start|>[g(any='a -n '1,2p' b')]<|tool_call_end|>", None, [("g", {"any": "a -n '1,2p' b"})]),
    ("xlam", 'So.[TOOL_CALLS][{"name": "f", "arguments": {"city": "[TOOL_CALLS]"}}]', "So.", [("f", {"city": "[TOOL_CALLS]"})]),
    ("minicpm5", '<functionname="f"><paramname="city">x</param><paramname="days">3</param></function>', None,
     [("f", {"city": "x", "days": 3})]),
    ("minicpm5", '<function name="f"><param name="city">a <paramname="no"> b<paramname="days">3</function><functionname="f"></function>',
     None, [("f", {"city": 'a <paramname="no"> b', "days": 3}), ("f", {})]),
    ("minicpm5", "<function name=\"f\"><param name=\"properties\">{'city': 'x'}</param></function>", None, ONE),
    # Tags in a value that can only be a string are part of it; one that opens the next parameter ends it.
    ("minimax-m3", f'{M3}<tool_call>{M3}<invoke name="f">{M3}<city>a{M3}<b>x{M3}</b>{M3}</city>{M3}</invoke>{M3}</tool_call>', None,
     [("f", {"city": f"a{M3}<b>x{M3}</b>"})]),
    ("minimax-m3", f'{M3}<tool_call>{M3}<invoke name="f">{M3}<city>x{M3}<days>3{M3}</days>{M3}</invoke>{M3}</tool_call>', None,
     [("f", {"city": "x", "days": 3})]),
    # A key without a value is no argument: it is shown, and the call stays JSON.
    *((name, f"{begin}<arg_key>city</arg_key><arg_value>x</arg_value><arg_key>days</arg_key>{end}", "<arg_key>days</arg_key>", ONE)
      for name, begin, end in KEYED),
    *((name, f"{begin}<arg_key>days</arg_key>\n<arg_key>city</arg_key><arg_value>x</arg_value>{end}", "<arg_key>days</arg_key>", ONE)
      for name, begin, end in KEYED),
    *((name, f"{begin}<arg_key>a b</arg_key>oops{end}", "oops<arg_key>a b</arg_key>", [("f", {})]) for name, begin, end in KEYED),
    # A section within a line needs a tool's name; one that begins a line or follows a call takes any.
    ("hermes", 'So <tool_call>{"name": "g", "arguments": {}}</tool_call> is one', 'So <tool_call>{"name": "g", "arguments": {}}</tool_call> is one', []),
    ("hermes", 'So <tool_call>{"name": "f", "arguments": {}}</tool_call><tool_call>{"name": "g"}</tool_call>', "So ", [("f", {}), ("g", {})]),
    ("hermes", 'So\n<tool_call>{"name": "g", "arguments": {}}</tool_call>', "So", [("g", {})]),
    ("minimax-m2", 'So <minimax:tool_call><invoke name="g"></invoke></minimax:tool_call> it is', 'So <minimax:tool_call><invoke name="g"></invoke></minimax:tool_call> it is', []),
    ("minimax-m2", 'So <minimax:tool_call><invoke name="f"></invoke><invoke name="g"></invoke></minimax:tool_call>', "So ", [("f", {}), ("g", {})]),
    ("minimax-m2", 'So <minimax:tool_call><invoke name="g"></invoke><invoke name="f"></invoke></minimax:tool_call>', 'So <invoke name="g"></invoke>', [("f", {})]),
    ("minimax-m3", f'So:\n{M3}<invoke name="g">{M3}</invoke>', f'So:\n{M3}<invoke name="g">{M3}</invoke>', []),
    ("k2-horizon", "So <ifm|tool_calls><ifm|tool_call>g</ifm|tool_call></ifm|tool_calls>", "So <ifm|tool_calls><ifm|tool_call>g</ifm|tool_call></ifm|tool_calls>", []),
    # What follows a bare call.
    ("llama3", '{"name": "f" } thanks', " thanks", [("f", {})]),
]  # fmt: skip
CUT: list[tuple[str, str, str | None, list[Call]]] = [
    # Cut by `max_tokens`: the beginning of a call without a name is nothing, and a value keeps its type.
    ("hermes", '<tool_call>\n{"name": "', None, []),
    ("hermes", "so\n<tool_call>\n", "so", []),
    (
        "hermes",
        """<tool_call>\n{"name": "f", "arguments": {"a": {"b": 1}]'word, [more""",
        "'word, [more",
        [("f", '{"a": {"b": 1}]')],
    ),
    ("hermes", """<tool_call>\n{"name": "f", "arguments": {"a": 1}, 'wor""", None, [("f", '{"a": 1}')]),
    ("kimi-k2", f"{K2_SECTION}{K2}", None, []),
    ("qwen3-coder", "<tool_call>\n<function=f", None, []),
    ("qwen3-coder", "<tool_call>\n<function=f>\n<parameter=days>\n3", None, [("f", '{"days": 3')]),
    ("qwen3-coder", "<tool_call>\n<function=f>\n<parameter=list>\n[1, 2", None, [("f", '{"list": [1, 2')]),
    (
        "qwen3-coder",
        '<tool_call><function=f><parameter=input>{"city": "x',
        None,
        [("f", '{"input": "{\\"city\\": \\"x"')],
    ),
    ("glm45", "<tool_call>f\n<arg_key>days</arg_key>\n<arg_value>12", None, [("f", '{"days": 12')]),
    (
        "glm45",
        "<tool_call>f<arg_key>city</arg_key><arg_value>x</arg_value><arg_key>days</arg_key>\n",
        None,
        [("f", '{"city": "x"')],
    ),
    ("kimi-k2", f"{K2_SECTION}{K2}oops this is no name", f"{K2_SECTION}{K2}oops this is no name", []),
    ("lfm2", "<|tool_call_start|>[f(city='x', da", None, [("f", '{"city": "x"')]),
    ("lfm2", "<|tool_call_start|>[f(days=1, city='x \\'y\\' z", None, [("f", '{"days": 1, "city": "x \'y\' z')]),
    ("lfm2", f"<|tool_call_start|>[f(city='{LONG}\\", None, [("f", f'{{"city": "{LONG}')]),
    ("pythonic", "[g(any='x'", None, [("g", '{"any": "x"')]),
    ("pythonic", f"[g(any='a -n '{LONG}, b", None, [("g", f'{{"any": "a -n \'{LONG}, b')]),
    ("pythonic", f"[f(days=1, list=['{LONG}", f" list=['{LONG}", [("f", '{"days": 1')]),
    ("gemma4", '<|tool_call>call:f{city:<|"|>x<|"|>,da', None, [("f", '{"city": "x"')]),
    ("gemma4", '<|tool_call>call:f{city:<|"|>x<|"|>,days:', None, [("f", '{"city": "x", "days": ')]),
    # What cannot be a name is shown.
    ("minimax-m2", f'<minimax:tool_call><invoke name="{LONG}', f'<minimax:tool_call><invoke name="{LONG}', []),
    ("minicpm5", f'<function name="{LONG}', f'<function name="{LONG}', []),
    (
        "minimax-m2",
        '<minimax:tool_call><invoke name="what is no name',
        '<minimax:tool_call><invoke name="what is no name',
        [],
    ),
    ("minimax-m3", f'{M3}<tool_call>{M3}<invoke name="f">{M3}<city>x{M3}</ci', None, [("f", '{"city": "x"}')]),
    (
        "minimax-m3",
        f'{M3}<tool_call>{M3}<invoke name="f">{M3}<city>x{M3}</{LONG}',
        f"{M3}</{LONG}",
        [("f", '{"city": "x"}')],
    ),
    ("llama3", '{"name": "', None, []),
    ("llama3", '{"name": "Bo', '{"name": "Bo', []),
    ("llama3", '{"answer": "', '{"answer": "', []),
]


def made(name: str, tokenizer: Tokenizer | None, reasoning: str | None = None) -> IncrementalParser:
    spec = FormatSpec()
    for group, key in (("reasoning_parsers", reasoning), ("tool_parsers", name)):
        if key is None:
            continue
        (entry,) = entry_points(group=f"dovetail.{group}.v1", name=key)
        plugin = entry.load()()
        if group == "reasoning_parsers":
            spec = plugin.spec(tokenizer, NoTemplate(), ParserRequest())
        else:
            spec = plugin.extend(spec, [*TOOLS, *OTHER_TOOLS])
    return make_parser(spec, tokenizer)


def replies(machine: Any, text: str, tokenizer: Tokenizer, reason: str = "stop") -> list[Any]:
    """Read as text and as tokens, whole, singly and in two parts, cut at many places."""
    found = []
    ids = tokenizer.encode(text, add_special_tokens=False)
    for whole, vocabulary in ((text, None), (ids, tokenizer)):
        chunkings = [[whole[:cut], whole[cut:]] for cut in range(0, len(whole), 1 + len(whole) // 9)]
        for chunks in [*chunkings, [whole[at : at + 1] for at in range(len(whole))]]:
            parser = machine(vocabulary)
            events = [e for c in chunks for e in (parser.feed((), c) if isinstance(c, str) else parser.feed(c))]
            reply = fold([*events, *parser.finish(reason)])
            calls = [(call.name, call.arguments) for call in reply.tool_calls]
            found.append((reply.reasoning, reply.content, calls))
    return found


def check(name: str, text: str, content: str | None, calls: list[Call], tokenizer: Tokenizer, reason: str) -> None:
    for _, got_content, got_calls in replies(lambda vocabulary: made(name, vocabulary), text, tokenizer, reason):
        read = [
            (called, arguments if isinstance(want, str) else json.loads(arguments))
            for (called, arguments), (_, want) in zip(got_calls, calls, strict=True)
        ]
        assert (got_content, read) == (content, calls)


@pytest.mark.parametrize(("name", "text", "content", "calls"), ROWS)
def test_recovery(name: str, text: str, content: str | None, calls: list[Call], tokenizer: Tokenizer) -> None:
    """Each line of the recovery table, as text and as tokens."""
    check(name, text, content, calls, tokenizer, "stop")


@pytest.mark.parametrize(("name", "text", "content", "calls"), CUT)
def test_what_max_tokens_cuts(
    name: str, text: str, content: str | None, calls: list[Call], tokenizer: Tokenizer
) -> None:
    """Nothing raw leaks out of a call that was cut before it had a name."""
    check(name, text, content, calls, tokenizer, "length")


def sections() -> list[str]:
    """The formats whose calls stand between two markers of a section."""
    found = []
    for entry in entry_points(group="dovetail.tool_parsers.v1"):
        spec = entry.load()().extend(FormatSpec(), TOOLS)
        if spec.machine is None and spec.tools is not None and spec.tools.start and spec.tools.end:
            found.append(entry.name)
    return sorted(found)


@pytest.mark.sampled
@pytest.mark.parametrize("name", sections())
@pytest.mark.parametrize("blanks", ["", "\n", " " * 600], ids=["empty", "newline", "long"])
def test_a_closed_section_in_which_nothing_stands_is_nothing(name: str, blanks: str, tokenizer: Tokenizer) -> None:
    """It holds no text that could be lost, and its markers do not leak; a section with text is content."""
    tools = made(name, None)._tools  # type: ignore[attr-defined]
    for inner, shown in ((blanks, None), (f"{blanks}?", f"{tools.start}{blanks}?{tools.end}")):
        text = f"{tools.start}{inner}{tools.end}"
        for whole in replies(lambda vocabulary: made(name, vocabulary), text, tokenizer):
            assert whole[1:] == (shown, [])


@pytest.mark.parametrize("name", sorted(CONTENT_FIRST))
@pytest.mark.parametrize(
    "reasoning", ["qwen3", *(pytest.param(name, marks=pytest.mark.full) for name in ("deepseek-v3", "minimax-m2"))]
)
def test_calls_inside_thinking(name: str, reasoning: str, tokenizer: Tokenizer) -> None:
    """A call that is made without closing the thinking is a call."""
    text = f"<think>Let me check\n{CALLS[name]}"
    for thought, content, calls in replies(lambda v: made(name, v, reasoning), text, tokenizer):
        assert (thought.strip(), content, len(calls)) == ("Let me check", None, len(TWO))
