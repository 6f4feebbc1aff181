"""`custom` tools of `/v1/chat/completions`: served by what Responses serves them with."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from exchanges import error_of, events
from harness import Harness
from test_response_tools import LARK, PATCH, TEMPLATE, call, prompt_of

from dovetail_parsers.tools.hermes import HermesTools
from dovetail_server.apis.chat.request import tool_choice

CUSTOM = {"type": "custom", "custom": {"name": "patch", "description": "Edit files."}}
FUNCTION = {"type": "function", "function": {"name": "lookup", "parameters": {"type": "object", "properties": {}}}}
USER = {"role": "user", "content": "x"}
CHAT = "/v1/chat/completions"


def with_format(**grammar: str) -> dict[str, Any]:
    return {"type": "custom", "custom": {**CUSTOM["custom"], "format": {"type": "grammar", "grammar": grammar}}}


@pytest.fixture
def calling(make_harness: Callable[..., Harness], tmp_path: Path) -> Harness:
    template = tmp_path / "template.jinja"
    template.write_text(TEMPLATE)
    return make_harness(tools=HermesTools(), context_len=8192, chat_template=str(template))


def ask(harness: Harness, **fields: Any) -> Any:
    return harness.post(CHAT, {"model": "tiny", "messages": [USER], **fields})


def streamed(harness: Harness, **fields: Any) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    """Return the chunks, and the calls that they add up to."""
    chunks = events(ask(harness, stream=True, **fields))
    calls: list[dict[str, Any]] = []
    for chunk in chunks:
        for piece in chunk["choices"][0]["delta"].get("tool_calls", ()) if chunk["choices"] else ():
            if piece["index"] == len(calls):
                calls.append({key: value for key, value in piece.items() if key != "index"})
                continue
            ((kind, more),) = ((key, value) for key, value in piece.items() if key != "index")
            ((field, text),) = more.items()
            calls[piece["index"]][kind][field] += text
    return chunks, calls


def test_a_call_of_a_custom_tool_is_its_text(calling: Harness) -> None:
    """Whole and streamed alike, beside a function's call, which is as it always was."""
    calling.text = call("patch", {"input": PATCH}) + call("lookup", {"a": 1})
    choice = ask(calling, tools=[CUSTOM, FUNCTION]).json()["choices"][0]
    custom, function = choice["message"]["tool_calls"]
    assert (custom["type"], custom["custom"]) == ("custom", {"name": "patch", "input": PATCH})
    assert (function["type"], function["function"]["name"]) == ("function", "lookup")
    assert choice["finish_reason"] == "tool_calls"
    chunks, calls = streamed(calling, tools=[CUSTOM, FUNCTION])
    assert [{**made, "id": None} for made in calls] == [{**made, "id": None} for made in (custom, function)]
    assert chunks[-1]["choices"][0]["finish_reason"] == "tool_calls"
    two = ask(calling, tools=[CUSTOM, FUNCTION], n=2, stream=True)
    inputs = [
        piece["custom"]["input"]
        for chunk in events(two)
        for piece in chunk["choices"][0]["delta"].get("tool_calls", ())
        if "custom" in piece and "id" not in piece
    ]
    assert inputs == [PATCH, PATCH]


def test_an_input_that_was_cut_off_is_sent_as_far_as_it_came(calling: Harness) -> None:
    """As in Responses."""
    calling.text = '<tool_call>\n{"name": "patch", "arguments": {"input": "*** Beg'
    (whole,) = ask(calling, tools=[CUSTOM]).json()["choices"][0]["message"]["tool_calls"]
    _, (made,) = streamed(calling, tools=[CUSTOM])
    assert whole["custom"] == made["custom"] == {"name": "patch", "input": "*** Beg"}


def test_what_a_reply_held_goes_back_in(calling: Harness) -> None:
    """The model sees the call as it made it, and what it gave; fields of a client's object beside are no error."""
    calling.text = "done"
    sent = {"id": "call_1", "type": "custom", "custom": {"name": "patch", "input": PATCH, "parsed": None}, "extra": 1}
    messages = [
        USER,
        {"role": "assistant", "content": None, "tool_calls": [sent]},
        {"role": "tool", "tool_call_id": "call_1", "content": "applied"},
    ]
    assert ask(calling, messages=messages, tools=[CUSTOM]).status_code == 200
    prompt = prompt_of(calling)
    assert "applied" in prompt
    (made,) = (json.loads(text.split("</tool_call>")[0]) for text in prompt.split("<tool_call>")[1:])
    assert made["name"] == "patch"
    arguments = made["arguments"]
    assert (json.loads(arguments) if isinstance(arguments, str) else arguments) == {"input": PATCH}


def test_grammars_are_told_to_the_model_and_enforced_where_that_can_be(calling: Harness) -> None:
    """A Lark grammar that becomes no expression is named as unenforced, whole and streamed; one of text has none."""
    calling.text = "hi"
    recursive = with_format(syntax="lark", definition=LARK + '\nx: "(" x ")"\ny: x')
    told = ask(calling, tools=[FUNCTION, recursive]).json()
    first = events(ask(calling, tools=[FUNCTION, recursive], stream=True))[0]
    assert told["dovetail"] == first["dovetail"] == {"dropped": [], "unenforced": ["tools[1].custom.format"]}
    assert json.dumps(LARK)[1:-1] in prompt_of(calling)
    plain = {"type": "custom", "custom": {"name": "patch", "format": {"type": "text"}}}
    assert "dovetail" not in ask(calling, tools=[plain]).json()


def test_a_custom_tool_can_be_chosen() -> None:
    """By its own type, alone or among the allowed ones; what names a function is as it was."""
    chosen, function = ({"type": kind, kind: {"name": "patch"}} for kind in ("custom", "function"))
    for choice, types in ((chosen, {"patch": "custom"}), (function, {"patch": "function"})):
        assert tool_choice(choice, types) == function
        given = {"type": "allowed_tools", "allowed_tools": {"mode": "required", "tools": [choice]}}
        assert tool_choice(given, types) == {**given, "allowed_tools": {"mode": "required", "tools": [function]}}
    assert tool_choice("auto", {}) == "auto"


@pytest.mark.parametrize(
    ("choice", "said"),
    [
        ({"type": "custom", "custom": {"name": "lookup"}}, "the type of 'lookup' is 'function' in tools"),
        ({"type": "function", "function": {"name": "patch"}}, "the type of 'patch' is 'custom' in tools"),
        ({"type": "custom", "custom": 1}, 'must be {"type": "custom", "custom": {"name": …}}'),
        ({"type": "custom", "name": "patch"}, 'must be {"type": "custom", "custom": {"name": …}}'),
        ({"type": "custom", "custom": {"name": "other"}}, "which is not in tools: patch, lookup"),
        ({"type": "tool", "name": "patch"}, "of type function, custom or allowed_tools"),
        ({"type": ["custom"]}, "of type function, custom or allowed_tools"),
    ],
)
def test_a_choice_that_names_no_tool_of_its_type_is_refused(
    calling: Harness, choice: dict[str, Any], said: str
) -> None:
    """Alone and among the allowed ones, with what is possible."""
    reply = ask(calling, tools=[CUSTOM, FUNCTION], tool_choice=choice)
    assert (reply.status_code, error_of(reply)["param"]) == (400, "tool_choice")
    assert said in error_of(reply)["message"]
    allowed = {"type": "allowed_tools", "allowed_tools": {"mode": "auto", "tools": [choice]}}
    assert ask(calling, tools=[CUSTOM, FUNCTION], tool_choice=allowed).status_code == 400


def test_a_wrong_type_names_every_possible_one(calling: Harness) -> None:
    """Of a call in the history and of a tool, whatever else is in it."""
    for inner in ({}, {"function": {"name": "lookup", "arguments": "{}"}}, {"custom": {"name": "patch", "input": ""}}):
        for kind in ("tool", 3, ["function"]):
            message = {"role": "assistant", "tool_calls": [{"id": "a", "type": kind, **inner}]}
            error = error_of(ask(calling, messages=[USER, message]))
            assert error["param"] == "messages[1].tool_calls[0]"
            assert error["message"].endswith("possible: function, custom")
            error = error_of(ask(calling, tools=[{"type": kind, **inner}]))
            assert error["param"] == "tools[0]"
            assert "possible: function, custom, builtin_function, web_search," in error["message"]
    without = error_of(ask(calling, tools=[{"function": {"name": "lookup"}}]))
    assert (without["param"], without["message"]) == ("tools[0].type", "tools[0].type is required")


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"tools": [{"type": "custom"}]}, "tools[0].custom"),
        ({"tools": [{"type": "custom", "custom": {"name": ""}}]}, "tools[0].custom.name"),
        ({"tools": [with_format(syntax="yacc", definition="x")]}, "tools[0].custom.format.grammar.syntax"),
        ({"tools": [CUSTOM, {"type": "function", "function": {"name": "patch"}}]}, "tools[0]"),
        (
            {"messages": [USER, {"role": "assistant", "tool_calls": [{"id": "a", "type": "custom"}]}]},
            "messages[1].tool_calls[0].custom",
        ),
    ],
)
def test_what_is_wrong_is_refused_where_it_stands(calling: Harness, fields: dict[str, Any], param: str) -> None:
    """With the place in the body that the client wrote."""
    reply = ask(calling, **fields)
    assert reply.status_code == 400
    assert error_of(reply)["param"].startswith(param)
