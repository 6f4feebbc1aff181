"""`auto` never chooses a parser that reads back something else than the template wrote: for every template of the tree,
and for some that look like a family and write otherwise."""

# ruff: noqa: E501 - templates, one a line

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

from dovetail.text.chat.template import ChatTemplate
from dovetail.text.chat.templates import FOLDER

sys.path.insert(0, str(Path(__file__).parents[1] / "benchmarks"))  # the replies beside the benchmark

import round_trip

STYLES = Path(__file__).parents[1] / "text" / "templates"
OWN = {path.stem: path.read_text(encoding="utf-8") for folder in (FOLDER, STYLES) for path in folder.glob("*.jinja")}
HEAD = "{% for m in messages %}<|im_start|>{{ m.role }}\n"
THOUGHT = "{% if m.reasoning_content %}<think>\n{{ m.reasoning_content }}\n</think>\n\n{% endif %}"
CONTENT = "{{ m.content or '' }}"
EACH = "{% for c in m.tool_calls or [] %}{% set f = c.function %}"
END = "<|im_end|>\n{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
ARGUMENTS = "{{ f.arguments | tojson }}"
SAID = '{# <tool_call>\n{"name": <function-name>, "arguments": <args-json-object>}\n</tool_call> #}'


def calls(text: str) -> str:
    """A template in the style of ChatML that writes each call this way."""
    return HEAD + THOUGHT + CONTENT + EACH + text + "{% endfor %}" + END


LOOK_ALIKES = {
    "hermes with other keys": calls('\n<tool_call>\n{"tool": "{{ f.name }}", "input": ' + ARGUMENTS + "}\n</tool_call>"),
    "hermes with the name in front": calls("\n<tool_call>{{ f.name }}\n" + ARGUMENTS + "</tool_call>"),
    "hermes without an end": calls('\n<tool_call>{"name": "{{ f.name }}", "arguments": ' + ARGUMENTS + "}"),
    "hermes said, tags written": SAID + calls("\n<invoke={{ f.name }}>{% for k, v in f.arguments.items() %}<arg={{ k }}>"
                                             "{{ v if v is string else v | tojson }}</arg>{% endfor %}</invoke>"),
    "hermes said, nothing written": SAID + HEAD + CONTENT + END,
    "tags of qwen3-coder the other way round": calls(
        "\n<tool_call>\n<parameter=name>{{ f.name }}</parameter>\n<function=arguments>" + ARGUMENTS + "</function>\n</tool_call>"
    ),
    "mistral's marker with another list": calls('[TOOL_CALLS][{"{{ f.name }}": ' + ARGUMENTS + "}]"),
    "thinking between tool markers": HEAD + "{% if m.reasoning_content %}<tool_call>{{ m.reasoning_content }}</tool_call>{% endif %}"
    + CONTENT + END,
    "thinking behind the answer": HEAD + CONTENT + "{% if m.reasoning_content %}<think>{{ m.reasoning_content }}</think>{% endif %}" + END,
    "thinking without an end": HEAD + "{% if m.reasoning_content %}<think>{{ m.reasoning_content }}\n\n{% endif %}" + CONTENT + END,
    "the markers of thinking exchanged": HEAD
    + "{% if m.reasoning_content %}</think>{{ m.reasoning_content }}<think>{% endif %}" + CONTENT + END,
}  # fmt: skip


@pytest.mark.parametrize("name", [*LOOK_ALIKES, *(pytest.param(name, marks=pytest.mark.full) for name in OWN)])
def test_no_wrong_parser(name: str, tmp_path: Path) -> None:
    """Every reply that the template shows is read back, or no other parsers would read back more of them."""
    source = OWN.get(name) or LOOK_ALIKES[name]
    config = {"chat_template": source, "tokenizer_class": "PreTrainedTokenizerFast", **round_trip.SPECIAL}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(config), encoding="utf-8")
    template = ChatTemplate({"default": source}, special_tokens=round_trip.SPECIAL)
    parsers = round_trip.Parsers(template, tmp_path)
    bad = [
        said
        for case in round_trip.CASES
        for switches in round_trip.SWITCHES.values()
        if isinstance(said := round_trip.wrong(parsers, case, switches), str)
    ]
    others = round_trip.better(parsers, tmp_path) if bad else None
    assert others is None, (parsers.names, bad)
    assert not (bad and name in LOOK_ALIKES) or parsers.names == (None, None), (parsers.names, bad)
