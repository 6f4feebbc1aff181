"""Formats read off chat templates: all of the tree, those of no known family, and those that fail."""

# ruff: noqa: E501 - templates, one a line

from __future__ import annotations

import json
from dataclasses import replace
from functools import cache
from importlib import metadata
from pathlib import Path
from typing import Any

import pytest

from dovetail.checkpoint.tokenizer_files import TokenizerFiles
from dovetail.contracts.output import FormatSpec
from dovetail.contracts.reasoning import ParserRequest
from dovetail.plugins.registry import Registry
from dovetail.sdk.formats.output import make_parser, parse_full
from dovetail.sdk.formats.samples import ANSWERED_AND_CALLED, CALLED, THOUGHTS, TWICE, reads_all, tools_of
from dovetail.sdk.schemas.structural import check
from dovetail.text.chat.budget import FULL
from dovetail.text.chat.template import ChatTemplate
from dovetail.text.chat.templates import FOLDER
from dovetail.text.detection.detect import detect, resolve_parsers
from dovetail.text.parsing.fitted import bound_reasoning, bound_tools
from dovetail.text.parsing.stream import NoTemplate
from dovetail_parsers.derived.derive import Derived, call_lines, derive, thinking_lines
from dovetail_testing.parsers import BytesTokenizer

entry_points = cache(metadata.entry_points)
"""All metadata is read for it, and most tests ask."""

STYLES = Path(__file__).parents[1] / "text" / "templates"
HEAD = "{% for m in messages %}<|{{ m.role }}|>{{ m.content }}"
TAIL = "<|stop|>{% endfor %}{% if add_generation_prompt %}<|assistant|>{% endif %}"
LOOP = "{% for c in m.tool_calls or [] %}{% set f = c.function %}"
END = "{% endfor %}"
ITEMS = "{% for k, v in f.arguments.items() %}"
VALUE = "{{ v if v is string else v | tojson }}"
CALLS = {
    "json, one section each": LOOP + '\n<c>{"name": "{{ f.name }}", "arguments": {{ f.arguments | tojson }}}</c>' + END,
    "json in a list": "{% if m.tool_calls %}<cs>[" + LOOP
    + '{% if not loop.first %}, {% endif %}{"tool": "{{ f.name }}", "args": {{ f.arguments | tojson }}}' + END + "]</cs>{% endif %}",
    "json in a list, two brackets": "{% if m.tool_calls %}<<CALLS>>[" + LOOP
    + '{% if not loop.first %}, {% endif %}{"tool": "{{ f.name }}", "args": {{ f.arguments | tojson }}}' + END + "]<</CALLS>>{% endif %}",
    "tags, two brackets": "{% if m.tool_calls %}<<cs>>" + LOOP + '<<call {{ f.name }}>>' + ITEMS
    + "<<arg {{ k }}>>" + VALUE + "<</arg>>" + END + "<</call>>" + END + "<</cs>>{% endif %}",
    "the name as the key": "{% if m.tool_calls %}<cs>[" + LOOP
    + '{% if not loop.first %}, {% endif %}{"{{ f.name }}": {{ f.arguments | tojson }}}' + END + "]</cs>{% endif %}",
    "bare json": LOOP + '{"name": "{{ f.name }}", "parameters": {{ f.arguments | tojson }}}' + END,
    "a head in a section": "{% if m.tool_calls %}<cs>" + LOOP
    + "<c>{{ f.name }}<args>{{ f.arguments | tojson }}</c>" + END + "</cs>{% endif %}",
    "a head, no section": LOOP + "<c={{ f.name }}>{{ f.arguments | tojson }}</c>" + END,
    "tags in a section": "{% if m.tool_calls %}\n\n<cs>\n" + LOOP + '<call name="{{ f.name }}">\n' + ITEMS
    + '<arg key="{{ k }}">' + VALUE + "</arg>\n" + END + "</call>\n" + END + "</cs>{% endif %}",
    "tags, one section each": LOOP + "\n<c>\n<fn={{ f.name }}>\n" + ITEMS + "<p={{ k }}>\n" + VALUE + "\n</p>\n" + END
    + "</fn>\n</c>" + END,
    "tags without a section": LOOP + '<fn name="{{ f.name }}">' + ITEMS + '<p name="{{ k }}">' + VALUE + "</p>" + END
    + "</fn>" + END,
    "tags with the type of a value": "{% if m.tool_calls %}<cs>" + LOOP + '<call name="{{ f.name }}">' + ITEMS
    + '<arg name="{{ k }}" type="{{ "str" if v is string else "json" }}">' + VALUE + "</arg>" + END + "</call>" + END + "</cs>{% endif %}",
    "keys and values": LOOP + "\n<c>{{ f.name }}\n" + ITEMS + "<k>{{ k }}</k>\n<v>" + VALUE + "</v>\n" + END + "</c>" + END,
    "python": "{% if m.tool_calls %}<cs>[" + LOOP + "{% if not loop.first %}, {% endif %}{{ f.name }}(" + ITEMS
    + "{% if not loop.first %}, {% endif %}{{ k }}={{ v | tojson }}" + END + ")" + END + "]</cs>{% endif %}",
}  # fmt: skip
THOUGHT = {
    "tags": ("<why>", "</why>"),
    "tags and newlines": ("<why>\n", "\n</why>\n\n"),
    "capitals": ("[REASON]", "[/REASON]"),
    "two angle brackets": ("<<why>>\n", "\n<</why>>\n"),
    "two brackets": ("[[reason]]\n", "\n[[/reason]]\n\n"),
    "brackets of another script": ("《思考》", "《/思考》\n"),
    "control characters": ("\x02", "\x03"),
    "with an answer": ("<|START_WHY|>", "<|END_WHY|><|START_SAY|>"),
}


def chat(source: str) -> ChatTemplate:
    return ChatTemplate({"default": source})


def plugin(group: str, name: str) -> Any:
    (entry,) = entry_points(group=f"dovetail.{group}.v1", name=name)
    return entry.load()()


def found_for(source: str, folder: Path) -> tuple[str | None, str | None]:
    (folder / "tokenizer_config.json").write_text(json.dumps({"chat_template": source}))
    given = {"reasoning_parser": "auto", "tool_parser": "auto"}
    found, _ = resolve_parsers(Registry.scan(), TokenizerFiles.read(folder), given)
    return found["reasoning_parser"], found["tool_parser"]


@pytest.mark.parametrize("path", [*FOLDER.glob("*.jinja"), *STYLES.glob("*.jinja")], ids=lambda path: path.stem)
def test_what_is_derived_reads_the_template_back(path: Path) -> None:
    """Whatever is derived from a template of the tree is right: nothing is better than something wrong."""
    template = chat(path.read_text(encoding="utf-8"))
    found = derive(template)
    tools = tools_of((TWICE,)) or ()
    if found.reasoning is not None:
        assert reads_all(template, found.spec(), THOUGHTS) is not False
    if found.calls is not None:
        replies = CALLED if found.calls.bare else (*CALLED, ANSWERED_AND_CALLED)
        assert reads_all(template, found.spec(tools), replies, {}) is True
    assert bool(thinking_lines(found)) == (found.reasoning is not None)
    assert bool(call_lines(found)) == (found.calls is not None)


@pytest.mark.parametrize("name", CALLS)
def test_calls_of_no_known_family(name: str, tmp_path: Path) -> None:
    """Every shape is read off the template, `auto` takes it, and it has a grammar that the engine understands."""
    source = HEAD + CALLS[name] + TAIL
    template = chat(source)
    found = derive(template)
    assert found.calls is not None
    replies = CALLED if found.calls.bare else (*CALLED, ANSWERED_AND_CALLED)
    assert reads_all(template, found.spec(tools_of((TWICE,)) or ()), replies, {}) is True
    parser = found_for(source, tmp_path)[1]
    assert parser is not None
    bound = bound_tools(plugin("tool_parsers", "template"), template)
    for choice in ("auto", "required"):
        grammar = bound.grammar(tools_of((TWICE,)) or (), choice, True, True)
        assert grammar is not None
        check(json.loads(grammar.source))


def test_markers_may_have_two_angle_brackets() -> None:
    """A marker is whole: what would be left of its end would stand in the content."""
    source = HEAD + CALLS["json in a list, two brackets"] + TAIL
    tools = derive(chat(source)).spec(tools_of((TWICE,)) or ()).tools
    assert tools is not None
    assert (tools.start, tools.end) == ("<<CALLS>>", "<</CALLS>>")


def test_attributes_of_a_key_may_differ() -> None:
    """A tag that says the type of its value is read whatever type that is; the schema decides."""
    template = chat(HEAD + CALLS["tags with the type of a value"] + TAIL)
    schema = {"type": "object", "properties": {"city": {"type": "string"}, "days": {"type": "integer"}}}
    tool = {"type": "function", "function": {"name": "f", "parameters": schema}}
    arguments = {"city": '3 "<b>', "days": 3}
    call = {"id": "a", "type": "function", "function": {"name": "f", "arguments": json.dumps(arguments)}}
    written = {"role": "assistant", "content": "", "tool_calls": [call]}
    text = template.render([written], add_generation_prompt=False).text
    text = text.partition("<|assistant|>")[2].removesuffix("<|stop|>")
    (read,) = parse_full(make_parser(derive(template).spec([tool])), text=text).tool_calls
    assert (read.name, json.loads(read.arguments)) == ("f", arguments)


@pytest.mark.parametrize("name", THOUGHT)
def test_thinking_of_no_known_family(name: str) -> None:
    """Its markers and newlines are read off, and those around the answer."""
    start, end = THOUGHT[name]
    say, unsay = ("<|START_SAY|>", "<|END_SAY|>") if name == "with an answer" else ("", "")
    source = (
        "{% for m in messages %}<|{{ m.role }}|>{% if m.reasoning_content %}" + start + "{{ m.reasoning_content }}"
        + end.removesuffix(say) + "{% endif %}" + say + "{{ m.content }}" + unsay + TAIL
    )  # fmt: skip
    found = derive(chat(source))
    assert found.reasoning is not None
    markers = found.reasoning
    assert markers.start + markers.after_start == start
    assert markers.before_end + markers.end + markers.after_end == end.removesuffix(say)
    assert (found.answer is not None) == bool(say)


def test_newlines_are_the_templates_own() -> None:
    """A named parser takes them over: what it drops is what the template writes."""
    source = (
        HEAD
        + LOOP
        + '{{ "\\n\\n" }}<tool_call>{"name": "{{ f.name }}", "arguments": {{ f.arguments | tojson }}}</tool_call>'
        + END
        + TAIL
    )
    fitted = bound_tools(plugin("tool_parsers", "hermes"), chat(source))
    tools = fitted.extend(FormatSpec(), []).tools
    assert tools is not None
    assert tools.before_start == "\n\n"
    template = chat((FOLDER / "seed-oss.jinja").read_text().replace("</seed:think>", "</seed:think>\n"))
    spec = bound_reasoning(plugin("reasoning_parsers", "seed-oss"), template).spec(
        BytesTokenizer(), template, ParserRequest()
    )
    derived = derive(template).reasoning
    assert derived is not None
    assert spec.reasoning is not None
    assert spec.reasoning.after_end == derived.after_end


@pytest.mark.parametrize(
    "source",
    [
        "{{ raise_exception('no') }}",
        "{% for i in range(100000000) %}x{% endfor %}",
        "{{ messages }}",
        "{{ messages[7].content }}",
        "no messages at all",
        "{% for m in messages %}{{ m.content }}{{ strftime_now('%f') }}{% endfor %}",
        "{% for m in messages %}{% if m.tool_calls %}{{ m.tool_calls[9].function.name }}{% endif %}{{ m.content }}{% endfor %}",
    ],
)
def test_templates_that_say_nothing(source: str, tmp_path: Path) -> None:
    """A template that refuses, loops, fails or writes differently each time gives no format, and no exception."""
    assert derive(ChatTemplate({"default": source}, limits=replace(FULL, seconds=0.2))) == Derived()
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"chat_template": source}))
    if "range" not in source:
        assert {one.name for one in detect(Registry.scan(), TokenizerFiles.read(tmp_path)).values()} == {None}


def test_without_a_template_nothing_is_derived() -> None:
    """Raw completions have no template."""
    assert derive(NoTemplate()) == Derived()


FORMS = "{% if m.reasoning_content %}<think>{{ m.reasoning_content }}</think>{% endif %}"
TIMED = (
    "[{{ strftime_now('%H:%M:%S.%f') }}]{{ messages | length }}"
    + HEAD.replace("{{ m.content }}", FORMS + "{{ m.content }}{{ strftime_now('%f') }}")
    + CALLS["tags in a section"]
    + TAIL
)


def test_a_template_that_writes_the_time() -> None:
    """All renders for one prompt see one time: the tail is what was appended, and the format is read."""
    for _ in range(5):
        chat = ChatTemplate({"default": TIMED.replace("{{ messages | length }}", "")})
        assert chat.render([{"role": "user", "content": "what is </think>?"}]).tail == "<|assistant|>"
    source = (
        "[{{ strftime_now('%S.%f') }}]"
        + HEAD.replace("{{ m.content }}", FORMS + "{{ m.content }}")
        + CALLS["tags in a section"]
        + TAIL
    )
    found = [derive(ChatTemplate({"default": source})) for _ in range(5)]
    assert all(each.reasoning is not None and each.calls is not None for each in found)
    assert len({each.reasoning for each in found}) == 1


def test_a_template_that_draws_lots(tmp_path: Path) -> None:
    """What it writes once says nothing of what it writes again: no format is read off, and `auto` does not waver."""
    drawn = "{{ ['<a>', '<think>', '<b>'] | random }}"
    source = HEAD.replace("{{ m.content }}", drawn + FORMS + "{{ m.content }}") + CALLS["tags in a section"] + TAIL
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"chat_template": source}))
    found = {
        tuple((one.name, one.why) for one in detect(Registry.scan(), TokenizerFiles.read(tmp_path)).values())
        for _ in range(4)
    }
    assert len(found) == 1
    assert derive(ChatTemplate({"default": source})) == Derived()
    for _ in range(20):
        tail = ChatTemplate({"default": source + drawn}).render([{"role": "user", "content": "hello"}]).tail
        assert "hello" not in tail
