"""History: what a template renders, the parser reads back, so that a next turn hits the prefix cache."""

from __future__ import annotations

import json
import re
from dataclasses import dataclass, field
from functools import cache
from importlib import metadata
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dovetail.contracts.output import FormatSpec
from dovetail.contracts.reasoning import ParserRequest
from dovetail.sdk.formats.output import make_parser, parse_full
from dovetail.sdk.formats.place import Place
from dovetail.text.chat.template import ChatTemplate
from dovetail.text.chat.templates import FOLDER, builtin_templates
from dovetail.text.tokenizer.tokenizer import Tokenizer

entry_points = cache(metadata.entry_points)
"""All metadata is read for it, and most tests ask."""

STYLES = Path(__file__).parents[1] / "text" / "templates"


@dataclass(frozen=True)
class Case:
    """How to read a template's replies. `end` is what it puts behind one; `off` closes thinking in the prompt."""

    reasoning: str | None = None
    tools: str | None = None
    end: tuple[str, ...] = ("<|im_end|>\n",)
    on: dict[str, Any] = field(default_factory=dict)
    off: dict[str, Any] | None = None
    calls_alone: bool = False
    opens: bool = False
    """The prompt opens thinking, and the template writes a reply without any as if it had not."""


_DS = ("<｜end▁of▁sentence｜>",)
_GLM = ("",)
_OFF = {"enable_thinking": False}
_THINK = {"thinking": True}
CASES = {
    "chatml": Case(None, "hermes"),
    "qwen3": Case("qwen3", "hermes", off=_OFF),
    "qwen3-default-off": Case("qwen3", "hermes", on={"enable_thinking": True}, off={}),
    "qwen3-thinking": Case("qwen3-thinking", "hermes"),
    "qwen3-coder": Case(None, "qwen3-coder"),
    "qwen3-coder-tight": Case(None, "qwen3-coder"),
    "deepseek-r1": Case("deepseek-r1", "deepseek-v3", _DS),
    "deepseek-r1-untagged": Case("deepseek-r1", "deepseek-v3", _DS),
    "deepseek-v31": Case("deepseek-v3", "deepseek-v31", _DS, on=_THINK, off={}, opens=True),
    "deepseek-v31-pair": Case("deepseek-v3", "deepseek-v31", _DS, on=_THINK, off={}, opens=True),
    "deepseek-v32": Case("deepseek-v3", "deepseek-v32", _DS, on=_THINK, off={}, opens=True),
    "kimi": Case("kimi", None, ("<|im_end|>",)),
    "kimi-k2": Case("kimi-k2", "kimi-k2", ("<|im_end|>",)),
    "gpt-oss": Case("gpt-oss", "gpt-oss", ("<|return|>", "<|call|>")),
    "gpt-oss-role": Case("gpt-oss", "gpt-oss", ("<|return|>", "<|call|>")),
    "glm45": Case("glm45", "glm45", _GLM, off=_OFF),
    "glm47": Case("glm45", "glm45", _GLM, off=_OFF, opens=True),
    "llama3": Case(None, "llama3", ("<|eot_id|>",), calls_alone=True),
    "llama3-tagged": Case(None, "llama3", ("<|eot_id|>",)),
    "llama4": Case(None, "pythonic", ("<|eot|>",), calls_alone=True),
    "llama4-marked": Case(None, "pythonic", ("<|eot|>",)),
    "llama4-json": Case(None, "llama3", ("<|eot|>",), calls_alone=True),
    "mistral": Case("mistral", "mistral", ("</s>",)),
    "mistral-ids": Case("mistral", "mistral", ("</s>",)),
    "mistral-json": Case("mistral", "mistral", ("</s>",)),
    "minimax-m2": Case("minimax-m2", "minimax-m2", ("[e~[\n",)),
    "seed-oss": Case("seed-oss", "seed-oss", ("<seed:eos>",), off={"thinking_budget": 0}),
    "step3": Case("step3", None, ("<|EOT|>",)),
}
QUESTION = [{"role": "user", "content": "what is </think>, and <tool_call>, <|channel|>analysis and [TOOL_CALLS]?"}]
TYPES = {str: "string", bool: "boolean", int: "integer", list: "array", type(None): "null"}
# Hypothesis draws from the texts in modules that are loaded, too: those that are markers of some format are left out.
MARKER = re.compile(r"[<\[\u25c1].+[>\]\u25b7]", re.DOTALL)
plain = st.text(st.characters(exclude_categories=["Cs"], exclude_characters="\0"), min_size=1, max_size=12).filter(
    lambda text: MARKER.search(text) is None
)
names = st.text("abc_", min_size=1, max_size=6)
values = plain | st.integers() | st.booleans() | st.none() | st.lists(plain | st.integers(), max_size=2)


def test_every_template_is_tested() -> None:
    """A template cannot ship without a round trip here."""
    assert {*builtin_templates(), *(path.stem for path in STYLES.glob("*.jinja"))} == CASES.keys()


@cache
def template(name: str) -> ChatTemplate:
    path = next(path for folder in (FOLDER, STYLES) if (path := folder / f"{name}.jinja").is_file())
    return ChatTemplate({"default": path.read_text(encoding="utf-8")})


@cache
def plugin(group: str, name: str) -> Any:
    (entry,) = entry_points(group=f"dovetail.{group}.v1", name=name)
    return entry.load()()


@pytest.mark.parametrize(
    "around", [("", ""), ("<|python_start|>", "<|python_end|>"), ("<|python_start|><|python_end|>", "")]
)
def test_llama4_writes_json_with_its_markers_or_without(around: tuple[str, str]) -> None:
    """Its markers mean nothing in front of a call or around it; Llama 3, which has none, keeps them as text."""
    call = around[0] + '{"name": "f", "parameters": {"q": "<|python_end|>"}}' + around[1]
    for name, is_call in (("llama4-json", True), ("llama3", around[0] == "")):
        bound = plugin("tool_parsers", "llama3").for_template(template(name))
        reply = parse_full(make_parser(bound.extend(FormatSpec(), schemas([("f", {"q": ""})]))), text=call)
        calls = [(one.name, json.loads(one.arguments)) for one in reply.tool_calls]
        assert (reply.content, calls) == ((None, [("f", {"q": "<|python_end|>"})]) if is_call else (call, []))


def message(reasoning: str | None, content: str | None, calls: list[tuple[str, dict[str, Any]]]) -> dict[str, Any]:
    functions = [{"name": name, "arguments": json.dumps(arguments, ensure_ascii=False)} for name, arguments in calls]
    tool_calls = [{"id": f"abcdef{n:03}", "type": "function", "function": f} for n, f in enumerate(functions)]
    return {"role": "assistant", "content": content, "reasoning_content": reasoning, "tool_calls": tool_calls}


def schemas(calls: list[tuple[str, dict[str, Any]]]) -> list[dict[str, Any]]:
    """Tools that fit the calls. A name that is called twice has the properties of both."""
    found: dict[str, dict[str, Any]] = {}
    for name, arguments in calls:
        for key, value in arguments.items():
            kinds = found.setdefault(name, {}).setdefault(key, {"type": []})["type"]
            kinds.append(TYPES[type(value)])
    return [
        {
            "type": "function",
            "function": {"name": name, "parameters": {"type": "object", "properties": found.get(name, {})}},
        }
        for name, _ in calls
    ]


def leaves_open(text: str) -> bool:
    """Whether code or a quotation is open at the end of a text: what follows is part of it."""
    place = Place()
    place.feed(text + " ")
    return place.is_quoted


def read_back(
    name: str,
    written: dict[str, Any],
    tools: list[dict[str, Any]],
    switches: dict[str, Any],
    tokenizer: Tokenizer | None,
) -> tuple[object, ...]:
    """Parse what the template renders for a reply behind the prompt for it."""
    case, chat = CASES[name], template(name)
    prompt = chat.render(QUESTION, tools=tools, template_kwargs=switches)
    whole = chat.render([*QUESTION, written], tools=tools, template_kwargs=switches, add_generation_prompt=False).text
    assert whole.startswith(prompt.text)
    output = whole.removeprefix(prompt.text)
    end = next(end for end in case.end if output.endswith(end))
    output = output.removesuffix(end)
    spec = FormatSpec()
    if case.reasoning is not None:
        spec = plugin("reasoning_parsers", case.reasoning).spec(
            tokenizer, chat, ParserRequest(template_kwargs=switches)
        )
    if case.tools is not None:
        spec = plugin("tool_parsers", case.tools).for_template(chat).extend(spec, tools)
    parser = make_parser(spec, tokenizer)
    parser.prime(prompt.tail)
    ids = [] if tokenizer is None else tokenizer.encode(output, add_special_tokens=False)
    reply = parse_full(parser, ids, output)
    return reply.reasoning, reply.content, [(call.name, json.loads(call.arguments)) for call in reply.tool_calls]


@pytest.mark.parametrize("name", CASES)
@given(
    reasoning=st.none() | plain,
    content=st.none() | plain,
    calls=st.lists(st.tuples(names, st.dictionaries(names, values, max_size=2)), max_size=2),
    thinks=st.booleans(),
    as_tokens=st.booleans(),
)
def test_a_rendered_reply_is_read_back(
    tokenizer: Tokenizer,
    name: str,
    reasoning: str | None,
    content: str | None,
    calls: list[tuple[str, dict[str, Any]]],
    thinks: bool,
    as_tokens: bool,
) -> None:
    """Reasoning, content and calls survive a round trip through the template, newlines at their edges included."""
    case = CASES[name]
    thinks = thinks or case.off is None
    switches = case.on if thinks else case.off or {}
    if case.reasoning is None or not thinks:
        reasoning = None
    if thinks and case.opens and reasoning is None:
        reasoning = "hm"
    if case.tools is None or len({call for call, _ in calls}) < len(calls):
        calls = []
    if calls and (case.calls_alone or (content is not None and (content.isspace() or leaves_open(content)))):
        content = None
    tools = schemas(calls)
    expected = (reasoning, content, calls)
    assert read_back(name, message(*expected), tools, switches, tokenizer if as_tokens else None) == expected


@pytest.mark.parametrize(
    "name", [name for name, case in CASES.items() if case.reasoning and case.reasoning != "gpt-oss"]
)
def test_an_empty_thought_is_no_reasoning(name: str) -> None:
    """A reply that does not think has null reasoning in every state that the template can leave."""
    case = CASES[name]
    for switches in [case.off] if case.opens else [{}, case.on, case.off or {}]:
        assert switches is not None
        assert read_back(name, message(None, "so", []), [], switches, None) == (None, "so", [])
