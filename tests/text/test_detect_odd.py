"""Chat templates that name tags which they do not write: `auto` goes by what a template writes."""

from __future__ import annotations

from pathlib import Path

import pytest

from dovetail.checkpoint.tokenizer_files import TokenizerFiles
from dovetail.plugins import Registry
from dovetail.text.detection.detect import detect

REGISTRY = Registry.scan()
IM = "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
ASK = "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
PLAIN = IM + ASK
CALLS = (
    "{% if tools %}<|im_start|>system\nTools: {{ tools | tojson }}. NOTE<|im_end|>\n{% endif %}"
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}"
    "{% for c in m.tool_calls or [] %}\n<tool_call>\n"
    '{"name": "{{ c.function.name }}", "arguments": {{ c.function.arguments | tojson }}}\n</tool_call>'
    "{% endfor %}<|im_end|>\n{% endfor %}" + ASK
)
"""Hermes' calls, with a note to the model that a template may fill."""
CODER = (
    "{% if tools %}<|im_start|>system\nTools: {{ tools | tojson }}<|im_end|>\n{% endif %}"
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}"
    "{% for c in m.tool_calls or [] %}\n<tool_call>\n<function={{ c.function.name }}>\n"
    "{% for k, v in c.function.arguments.items() %}<parameter={{ k }}>\n{{ v }}\n</parameter>\n{% endfor %}"
    "</function>\n</tool_call>{% endfor %}<|im_end|>\n{% endfor %}" + ASK
)
THINKS = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{% if m.reasoning_content %}<think>\n{{ m.reasoning_content }}\n"
    "</think>\n\n{% endif %}{{ m.content }}<|im_end|>\n{% endfor %}" + ASK
)


SAID = "{{ m.content }}"


def changed(source: str, *texts: str) -> str:
    """A template with another text in place of each."""
    for old, new in zip(texts[::2], texts[1::2], strict=True):
        source = source.replace(old, new)
    return source


def says(text: str) -> str:
    """A system message that stands in every prompt."""
    return f"<|im_start|>system\n{text}<|im_end|>\n" + PLAIN


TEMPLATES = {
    "a warning in the system message": (says("Never write [TOOL_CALLS] or <TOOLCALL> lists."), None, None),
    "an example in the system message": (says('An old log: `[TOOL_CALLS][{"name": "f"}]`. You have none.'), None, None),
    "a tag of thinking by name": (says("Do not use [THINK] blocks, and never print </think>."), None, None),
    "both tags of thinking by name": (says("Leave out `<think>` and `</think>`; answer at once."), None, None),
    "tags of thinking without a word between": (says("Unlike other models you write no <think></think>."), None, None),
    "tags of thinking with a thought between": (
        says("Begin with <think> your thoughts </think>, then answer."),
        "qwen3",
        None,
    ),
    "DeepSeek's call in the system message": (says("Ignore <｜tool▁calls▁begin｜> in documents."), None, None),
    "a message for every user turn": (
        PLAIN.replace(SAID, SAID + "{% if m.role == 'user' %} (no <|python_tag|>, functools[){% endif %}"),
        None,
        None,
    ),
    "a comment": ("{# was [TOOL_CALLS], <seed:tool_call>, <think> </think> #}" + PLAIN, None, None),
    "a dead branch": ("{% if false %}<minimax:tool_call><think></think>{% endif %}" + PLAIN, None, None),
    "a dead branch behind a live one": (
        "{% if messages %}{% elif not true %}<｜DSML｜function_calls>{% endif %}" + PLAIN,
        None,
        None,
    ),
    "a dead else": ("{% if true %}{% else %}<seed:tool_call> <seed:think></seed:think>{% endif %}" + PLAIN, None, None),
    "a condition that is never true": (
        "{% if true and false or not true %}<|tool_call_start|> [THINK]{% endif %}" + PLAIN,
        None,
        None,
    ),
    "a dead alternative of an expression": ("{{ '' if true else '<seed:think> ◁think▷' }}" + PLAIN, None, None),
    "a constant that is not printed": (
        "{% set marker = '[TOOL_CALLS]' %}{% set thought = '[THINK]' %}" + PLAIN,
        None,
        None,
    ),
    "a table that is not printed": (
        "{% set tags = {'a': ['[TOOL_CALLS]', '[THINK]'], 'b': '◁think▷'} %}{% if tags %}{% endif %}" + PLAIN,
        None,
        None,
    ),
    "a macro that nobody calls": (
        "{% macro old(c) %}<seed:think>{{ c }}</seed:think>[TOOL_CALLS]{% endmacro %}" + PLAIN,
        None,
        None,
    ),
    "a text that is compared": ("{% if messages[0].content == '[TOOL_CALLS]' %}{% endif %}" + PLAIN, None, None),
    "a refusal": (
        "{% if tools %}{{ raise_exception('no tools: [TOOL_CALLS] is not mine') }}{% endif %}" + PLAIN,
        None,
        None,
    ),
    "calls, and another's tag in a comment": ("{# <function= and <arg_key> #}" + CALLS, None, "hermes"),
    "calls, and another's tag in the system message": (
        "<|im_start|>system\nNo <function=x> here.<|im_end|>\n" + CALLS,
        None,
        "hermes",
    ),
    "calls, and another's tag in the note on tools": (
        CALLS.replace("NOTE", "Not [TOOL_CALLS], not <TOOLCALL>."),
        None,
        "hermes",
    ),
    "calls, and another's tag in a constant": ("{% set old = '[TOOL_CALLS]' %}" + CODER, None, "qwen3-coder"),
    "calls, and another's tag in a dead branch": (
        "{% if false %}<｜tool▁calls▁begin｜>{% endif %}" + CODER,
        None,
        "qwen3-coder",
    ),
    "thinking, and another's tags in the system message": (
        "<|im_start|>system\nNot [THINK], not ◁think▷, not <seed:think>.<|im_end|>\n" + THINKS,
        "qwen3",
        None,
    ),
    "thinking that is dropped from the history": (
        PLAIN.replace(SAID, "{{ m.content.split('</think>')[-1] }}"),
        "qwen3",
        None,
    ),
    "a tag put together": (
        "{% set kind = 'TOOL' %}"
        + changed(CALLS, "<tool_call>\n", "{{ '[' ~ kind ~ '_CALLS]' }}[", "\n</tool_call>", "]"),
        None,
        "mistral",
    ),
    "a constant that is printed elsewhere": (
        "{% set a, b = '<seed:think>', '</seed:think>' %}"
        + changed(THINKS, "<think>\n", "{{ a }}", "\n</think>\n\n", "{{ b }}"),
        "seed-oss",
        None,
    ),
}
"""Name: the template, its reasoning parser, its tool-call parser."""


@pytest.mark.parametrize("name", TEMPLATES)
def test_a_template_is_what_it_writes(name: str, tmp_path: Path) -> None:
    """Tags count that replies are written with, not those that stand somewhere in the template."""
    source, reasoning, tools = TEMPLATES[name]
    (tmp_path / "chat_template.jinja").write_text(source, encoding="utf-8")
    found = detect(REGISTRY, TokenizerFiles.read(tmp_path))
    assert (found["reasoning_parser"].name, found["tool_parser"].name) == (reasoning, tools)


def test_calls_that_stand_beside_no_content_are_shown() -> None:
    """A template that writes calls only where content is none gets none, and the history keeps its calls."""
    from dovetail.text.chat.template import ChatTemplate

    source = (
        "{% for m in messages %}[{{ m.role }}]{% if m.content is none %}{% for c in m.tool_calls %}"
        "{{ c.function.name + c.function.arguments }}{% endfor %}{% else %}{{ m.content }}{% endif %}{% endfor %}"
    )
    call = {"id": "1", "type": "function", "function": {"name": "f", "arguments": '{"a": "é"}'}}
    messages = [{"role": "user", "content": "x"}, {"role": "assistant", "tool_calls": [call]}]
    template = ChatTemplate({"default": source})
    assert (template.beside_calls, template.arguments_format) == (None, "string")
    assert template.render(messages).text == '[user]x[assistant]f{"a": "é"}'
