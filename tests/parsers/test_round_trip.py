"""History: what a template renders, the parser reads back, so that a next turn hits the prefix cache."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dovetail.contracts.reasoning import ParserRequest
from dovetail.text.chat import ChatTemplate
from dovetail.text.output import FormatParser, parse_full
from dovetail.text.tokenizer import Tokenizer
from dovetail_parsers.reasoning.deepseek_r1 import DeepSeekR1
from dovetail_parsers.reasoning.qwen3 import Qwen3
from dovetail_parsers.tools.hermes import Hermes

TURNS = """\
{%- for m in messages %}
    {{- '<|im_start|>' + m.role + '\\n' }}
    {%- if m.role == 'assistant' %}THINK{{ m.content }}
        {%- for call in m.tool_calls or [] %}
            {%- if m.content or not loop.first %}{{ '\\n' }}{% endif %}
            {{- '<tool_call>\\n{"name": "' + call.function.name + '", "arguments": ' }}
            {{- call.function.arguments | tojson }}{{ '}\\n</tool_call>' }}
        {%- endfor %}
    {%- else %}{{ m.content }}{% endif %}
    {{- '<|im_end|>\\n' }}
{%- endfor %}
{%- if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}PROMPT{% endif %}"""
THOUGHT = "{{ '<think>\\n' + (m.reasoning_content or '') + '\\n</think>\\n\\n' }}"
TEMPLATES = {
    "qwen3": TURNS.replace("THINK", THOUGHT).replace("PROMPT", ""),
    "qwen3-thinking": TURNS.replace("THINK", THOUGHT).replace("PROMPT", "{{ '<think>\\n' }}"),
    "deepseek-r1": TURNS.replace("THINK", THOUGHT).replace("PROMPT", "{{ '<think>\\n' }}"),
    "no-think": TURNS.replace("THINK", THOUGHT).replace("PROMPT", "{{ '<think>\\n\\n</think>\\n\\n' }}"),
}
QUESTION = [{"role": "user", "content": "what is </think>, and <tool_call>?"}]
plain = st.text(st.characters(exclude_categories=["Cs"], exclude_characters="\0"), min_size=1, max_size=12)
names = st.text("abc_", min_size=1, max_size=6)


def message(reasoning: str | None, content: str | None, calls: list[tuple[str, dict[str, Any]]]) -> dict[str, Any]:
    functions = [{"name": name, "arguments": json.dumps(arguments, ensure_ascii=False)} for name, arguments in calls]
    tool_calls = [{"id": "call", "type": "function", "function": function} for function in functions]
    return {"role": "assistant", "content": content, "reasoning_content": reasoning, "tool_calls": tool_calls}


def read_back(name: str, written: dict[str, Any], tokenizer: Tokenizer, as_tokens: bool) -> tuple[object, ...]:
    """Parse what the template renders for a reply behind the prompt for it."""
    template = ChatTemplate({"default": TEMPLATES[name]})
    prompt = template.render(QUESTION)
    whole = template.render([*QUESTION, written], add_generation_prompt=False).text
    assert whole.startswith(prompt.text)
    output = whole.removeprefix(prompt.text).removesuffix("<|im_end|>\n")
    plugin = DeepSeekR1() if name == "deepseek-r1" else Qwen3()
    spec = plugin.spec(tokenizer, template, ParserRequest())
    parser = FormatParser(Hermes().extend(spec, []), tokenizer if as_tokens else None)
    parser.prime(prompt.tail)
    ids = tokenizer.encode(output, add_special_tokens=False) if as_tokens else []
    reply = parse_full(parser, ids, output)
    return reply.reasoning, reply.content, [(call.name, call.arguments) for call in reply.tool_calls]


@pytest.mark.parametrize("name", TEMPLATES)
@given(
    reasoning=st.none() | plain,
    content=st.none() | plain,
    calls=st.lists(st.tuples(names, st.dictionaries(plain, plain | st.integers(), max_size=2)), max_size=2),
    as_tokens=st.booleans(),
)
def test_a_rendered_reply_is_read_back(
    tokenizer: Tokenizer,
    name: str,
    reasoning: str | None,
    content: str | None,
    calls: list[tuple[str, dict[str, Any]]],
    as_tokens: bool,
) -> None:
    """Reasoning, content and calls survive a round trip through the template, newlines at their edges included."""
    if name == "no-think":
        reasoning = None
    if calls and content is not None and content.isspace():
        content = None
    written = message(reasoning, content, calls)
    expected = [(call, json.dumps(arguments, ensure_ascii=False)) for call, arguments in calls]
    assert read_back(name, written, tokenizer, as_tokens) == (reasoning, content, expected)
