"""Tools that nobody here runs, in chats and messages: left out and named, or refused where they could be meant."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any, get_args

import pytest
from harness import Harness

from dovetail_parsers.tools.hermes import HermesTools

USER = [{"role": "user", "content": "hi"}]
FUNCTION = {"type": "function", "function": {"name": "look", "parameters": {"type": "object"}}}
CLIENT = {"name": "look", "input_schema": {"type": "object"}}
APIS: dict[str, tuple[dict[str, Any], dict[str, Any], dict[str, Any], Any]] = {
    "/v1/chat/completions": ({"messages": USER}, FUNCTION, {"type": "web_search", "size": "low"}, "required"),
    "/v1/messages": (
        {"messages": USER, "max_tokens": 9},
        CLIENT,
        {"type": "web_search_20250305", "name": "web_search", "max_uses": 3},
        {"type": "any"},
    ),
}
SERVED = {
    "bash_20250124": ("bash", ["command", "restart"]),
    "text_editor_20250124": ("str_replace_editor", ["undo_edit", "new_str"]),
    "text_editor_20250728": ("str_replace_based_edit_tool", ["view_range", "insert_text"]),
    "memory_20250818": ("memory", ["rename", "new_path"]),
}
"""Tools of Anthropic's API that the client runs: by type, the name and words of the description."""
ROWS = [pytest.param(path, *row, id=path) for path, row in APIS.items()]


@pytest.fixture
def calling(make_harness: Callable[..., Harness]) -> Harness:
    return make_harness(tools=HermesTools(), context_len=8192)


@pytest.mark.parametrize(("path", "body", "served", "hosted", "must"), ROWS)
def test_it_is_left_out_and_named(calling: Harness, path: str, body: Any, served: Any, hosted: Any, must: Any) -> None:
    """The prompt is that of the other tools; the reply, the stream's first event and the header name it."""
    plain = calling.post(path, {**body, "tools": [served]})
    prompt = calling.engine.submits[-1].prompt_ids
    assert "x-dovetail-dropped" not in plain.headers
    assert "dovetail" not in plain.json()
    asked = {**body, "tools": [hosted, served, hosted]}
    reply = calling.post(path, asked)
    assert calling.engine.submits[-1].prompt_ids == prompt
    assert reply.headers["x-dovetail-dropped"] == hosted["type"]
    named = [{"param": f"tools[{at}].type", "type": hosted["type"]} for at in (0, 2)]
    assert reply.json()["dovetail"]["dropped"] == named
    streamed = calling.post(path, {**asked, "stream": True})
    assert streamed.headers["x-dovetail-dropped"] == hosted["type"]
    first = json.loads(next(line for line in streamed.text.splitlines() if line.startswith("data: "))[6:])
    assert first.get("message", first)["dovetail"]["dropped"] == named
    alone = calling.post(path, {**body, "tools": [hosted]})
    assert (alone.status_code, alone.headers["x-dovetail-dropped"]) == (200, hosted["type"])


@pytest.mark.parametrize(("path", "body", "served", "hosted", "must"), ROWS)
def test_it_is_refused_where_a_call_is_asked_for(
    calling: Harness, path: str, body: Any, served: Any, hosted: Any, must: Any
) -> None:
    """It could be the one that is meant. A refusal of another tool names its place in the body."""
    reply = calling.post(path, {**body, "tools": [served, hosted], "tool_choice": must})
    assert reply.status_code == 400
    assert f"tools[1].type '{hosted['type']}'" in reply.json()["error"]["message"]
    bad = json.loads(json.dumps(served).replace('"object"', '"no-type"'))
    for tools, at in (([hosted, bad], 1), ([hosted, hosted, served, bad], 3)):
        assert f"tools[{at}]" in calling.post(path, {**body, "tools": tools}).text


@pytest.mark.parametrize(("path", "body", "served", "hosted", "must"), ROWS)
def test_an_operator_may_refuse_it(
    make_harness: Callable[..., Harness], path: str, body: Any, served: Any, hosted: Any, must: Any
) -> None:
    """With `--unservable-tools refuse`."""
    server = make_harness(tools=HermesTools(), context_len=8192, unservable_tools="refuse")
    reply = server.post(path, {**body, "tools": [served, hosted]})
    assert reply.status_code == 400
    assert "tools[1].type" in reply.json()["error"]["message"]


def test_functions_of_old_are_shown(calling: Harness) -> None:
    """A `function_call` and its result make the prompt of a tool's call and its result."""
    call = {"name": "look", "arguments": '{"a":1}'}
    old = [
        *USER,
        {"role": "assistant", "content": None, "function_call": call},
        {"role": "function", "name": "look", "content": "seen"},
    ]
    new = [
        *USER,
        {"role": "assistant", "content": None, "tool_calls": [{"id": "look", "type": "function", "function": call}]},
        {"role": "tool", "name": "look", "tool_call_id": "look", "content": "seen"},
    ]
    prompts = []
    for messages in (old, new):
        assert calling.post("/v1/chat/completions", {"messages": messages}).status_code == 200
        prompts.append(calling.engine.submits[-1].prompt_ids)
    assert prompts[0] == prompts[1]


@pytest.mark.parametrize("told", ["clamp", "refuse", None])
def test_responses_obey_max_tokens_beyond(make_harness: Callable[..., Harness], told: str | None) -> None:
    """A limit beyond the context is refused by default, and where the operator says so."""
    server = make_harness(**({} if told is None else {"max_tokens_beyond": told}))
    reply = server.post("/v1/responses", {"model": "tiny", "input": "hi", "max_output_tokens": 100_000})
    assert reply.status_code == (200 if told == "clamp" else 400)


@pytest.mark.parametrize("kind", SERVED)
def test_what_the_client_runs_is_a_tool_by_its_type(
    make_harness: Callable[..., Harness], kind: str, tmp_path: Path
) -> None:
    """The model is told of its published input, a call of it is a `tool_use`, and goes back with its result."""
    template = tmp_path / "template.jinja"
    template.write_text("{% for tool in tools %}{{ tool | tojson }}{% endfor %}{{ messages | tojson }}")
    server = make_harness(tools=HermesTools(), context_len=8192, chat_template=str(template))
    name, words = SERVED[kind]
    server.text = f'<tool_call>\n{{"name": "{name}", "arguments": {{"command": "view"}}}}\n</tool_call>'
    body: dict[str, Any] = {"messages": USER, "max_tokens": 99, "tools": [{"type": kind, "name": name}]}
    found = server.post("/v1/messages", body).json()
    assert found["content"][0] | {"id": ""} == {
        "type": "tool_use", "id": "", "name": name, "input": {"command": "view"}, "caller": {"type": "direct"}
    }  # fmt: skip
    prompt = server.tokenizer.decode(server.engine.submits[-1].prompt_ids, skip_special_tokens=False)
    assert all(word in prompt for word in (f'"name": "{name}"', *words))
    result = {"type": "tool_result", "tool_use_id": found["content"][0]["id"], "content": "done"}
    turns = [{"role": "assistant", "content": found["content"]}, {"role": "user", "content": [result]}]
    assert server.post("/v1/messages", {**body, "messages": [*USER, *turns]}).status_code == 200
    chosen = {
        **body,
        "tools": [{"type": "computer_20250124", "name": "computer", "display_width_px": 9}, *body["tools"]],
    }
    assert server.post("/v1/messages", chosen).headers["x-dovetail-dropped"] == "computer_20250124"


def test_memory_takes_what_anthropics_client_reads() -> None:
    """Each command of its helper has its fields in the tool's input."""
    from anthropic.types.beta import BetaMemoryTool20250818Command

    from dovetail_server.apis.messages.request import CLIENT_TOOLS

    properties = CLIENT_TOOLS["memory_20250818"]["parameters"]["properties"]
    kinds = get_args(get_args(BetaMemoryTool20250818Command)[0])
    assert {name for kind in kinds for name in kind.model_fields} == set(properties)
    commands = {get_args(kind.model_fields["command"].annotation)[0] for kind in kinds}
    assert commands == set(properties["command"]["enum"])
