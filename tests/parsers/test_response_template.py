"""What a checkpoint's `response_template` says of replies: taken where its chat template shows nothing."""

from __future__ import annotations

import json
import logging
from pathlib import Path
from typing import Any

import pytest

from dovetail.checkpoint.tokenizer_files import TokenizerFiles
from dovetail.contracts.reasoning import ParserRequest
from dovetail.plugins.loader import import_planned
from dovetail.plugins.plan import as_planned
from dovetail.plugins.registry import Registry
from dovetail.sdk.formats.output import make_parser, parse_full
from dovetail.text.chat.template import ChatTemplate
from dovetail.text.detection.detect import detect
from dovetail.text.parsing.fitted import bound_reasoning, bound_tools
from dovetail_parsers.derived import response_template
from dovetail_parsers.derived.derive import derive

PLAIN = (
    "{% for m in messages %}<|{{ m.role }}|>{{ m.content }}{% endfor %}{% if add_generation_prompt %}<|a|>{% endif %}"
)
CALLS = {
    "open": "<do>",
    "close": "</do>",
    "repeats": True,
    "content": "json",
    "transform": {"type": "function", "function": {"name": "{tool}", "arguments": "{content.args}"}},
}
SAID: dict[str, Any] = {
    "start_anchor": "<|a|>",
    "fields": {
        "thinking": {"open": "<why>", "close": ["</why>", "</because>"]},
        "content": {"close": "<|end|>"},
        "tool_calls": CALLS,
    },
}
TOOLS = [{"type": "function", "function": {"name": "now", "parameters": {}}}]


def test_markers_and_calls_are_read() -> None:
    """Thinking between literals, calls as JSON under the keys that the transform names."""
    found = derive(ChatTemplate({"default": PLAIN}, response_template=SAID))
    reply = parse_full(
        make_parser(found.spec(TOOLS)), text='<why>\nhm\n</why>\n\nso\n<do>{"tool": "now", "args": {"a": 1}}</do>'
    )
    assert (reply.reasoning, reply.content) == ("hm", "so")
    assert [(call.name, call.arguments) for call in reply.tool_calls] == [("now", '{"a": 1}')]


def test_auto_takes_it_where_nothing_else_is_known(tmp_path: Path) -> None:
    """The parser `template` is chosen for both, and `dovetail info` can say why."""
    config = {"chat_template": PLAIN, "response_template": SAID}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(config), encoding="utf-8")
    for found in detect(Registry.scan(), TokenizerFiles.read(tmp_path)).values():
        assert found.name == "template"
        assert "response_template" in found.why


def test_auto_takes_patterns_where_nothing_else_is_known(tmp_path: Path) -> None:
    """Both parsers are `template`, and together they read thinking, the answer and calls."""
    function = {"function": {"name": "{name}", "arguments": "{content}"}}
    call = {"open_pattern": r"<do=(?P<name>\w+)>", "close": "</do>", "content": "json", "transform": function}
    thinking = {"open_pattern": r"<why\d>", "close": "</why>"}
    said = {"start_anchor": "<|a|>", "fields": {"thinking": thinking, "content": {}, "tool_calls": call}}
    config = {"chat_template": PLAIN, "response_template": said}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(config), encoding="utf-8")
    registry, template = Registry.scan(), ChatTemplate({"default": PLAIN}, response_template=said)
    found = detect(registry, TokenizerFiles.read(tmp_path))
    assert [one.name for one in found.values()] == ["template", "template"]
    plugins = [import_planned(as_planned(registry.resolve(kind, "template")))() for kind in found]
    spec = bound_reasoning(plugins[0], template).spec(None, template, ParserRequest())
    reply = parse_full(
        make_parser(bound_tools(plugins[1], template).extend(spec, TOOLS)), text='<why1>hm</why>so<do=now>{"a": 1}</do>'
    )
    assert (reply.reasoning, reply.content) == ("hm", "so")
    assert [(call.name, call.arguments) for call in reply.tool_calls] == [("now", '{"a": 1}')]


@pytest.mark.parametrize(
    "broken",
    [
        {"fields": {"thinking": {"open_pattern": "(", "close": "x"}}},
        {"fields": {"thinking": {"open": 3, "close": "x"}}},
        {"fields": {"thinking": ["<a>"]}},
        {"fields": []},
        {"version": 9, "fields": {}},
        {"fields": {"thinking": {"open_pattern": "<a>", "close_pattern": 7}}},
        {"fields": {"thinking": {"open_pattern": "<a>" * 9999, "close": "</a>"}}},
        {"fields": {"thinking": {"open_pattern": "<a>", "close": []}}},
        {"fields": {"thinking": {"open_pattern": "<a>", "content": "yaml"}}},
        {"fields": {"tool_calls": {**CALLS, "content": "xml-inline"}}},
        {"fields": {"tool_calls": {**CALLS, "content": "xml-inline", "content_args": {"tag_pattern": "("}}}},
        {"fields": {"tool_calls": {**CALLS, "content_args": 3, "transform": None}}},
        {"fields": {"tool_calls": {"close": "x"}, "content": {}}},
        {"fields": {"tool_calls": {**CALLS, "transform": {"function": {"name": "{a} {b}"}}}}},
    ],
)
def test_what_cannot_be_read_is_told_once(
    broken: dict[str, Any], caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An invalid pattern, or what no field may be, is a line in the log, and replies arrive as content."""
    monkeypatch.setattr(response_template, "_COMPLAINTS", set())
    with caplog.at_level(logging.WARNING, logger="dovetail.text"):
        found = [derive(ChatTemplate({"default": PLAIN}, response_template=broken)) for _ in range(3)]
    assert sum("response_template" in record.message for record in caplog.records) == 1
    assert all(each.reasoning is None and each.calls is None and each.regions is None for each in found)
    reply = parse_full(make_parser(found[0].spec(TOOLS)), text="<a>hm</a>so")
    assert reply.content == "<a>hm</a>so"
