"""Tools of `/v1/responses` beside functions: those that the client runs, and those that nobody here does."""

from __future__ import annotations

import json
import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from exchanges import error_of
from harness import Harness
from replies import response_events, strict_response

from dovetail_parsers.tools.hermes import HermesTools
from dovetail_server.apis.custom import custom_input
from dovetail_server.apis.responses.tools import ReadTools, chat_choice
from dovetail_server.serving.job import log_dropped

PATCH = '*** Begin Patch\n+ "x"\n*** End Patch'
LARK = 'start: "*** Begin Patch" /(.|\\n)+/'
FUNCTION = {"type": "function", "name": "lookup", "parameters": {"type": "object", "properties": {}}, "strict": False}
CUSTOM = {"type": "custom", "name": "patch", "description": "Edit files."}
AGENT = {
    "model": "tiny",
    "instructions": "You are a coding agent.",
    "input": [{"type": "message", "role": "user", "content": [{"type": "input_text", "text": "fix it"}]}],
    "tools": [
        {**FUNCTION, "name": "update_plan"},
        {**CUSTOM, "format": {"type": "grammar", "syntax": "lark", "definition": LARK}},
        {"type": "namespace", "name": "mcp__docs", "description": "Pages.", "tools": [FUNCTION]},
        {"type": "web_search", "external_web_access": False, "filters": {"allowed_domains": ["example.com"]}},
    ],
    "tool_choice": "auto",
    "parallel_tool_calls": True,
    "reasoning": None,
    "store": False,
    "stream": True,
    "include": ["reasoning.encrypted_content"],
    "prompt_cache_key": "session",
    "client_metadata": {"installation": "abc"},
}
"""What an agent's first request has."""
USER = {"role": "user", "content": "x"}
KINDS: list[tuple[str, dict[str, Any], str, dict[str, Any]]] = [
    ("local_shell", {"command": ["ls", "-l"], "timeout_ms": 5}, "action", {"output": "one file"}),
    (
        "shell",
        {"commands": ["ls"]},
        "action",
        {"output": [{"stdout": "one file", "stderr": "", "outcome": {"type": "exit", "exit_code": 0}}]},
    ),
    (
        "apply_patch",
        {"type": "update_file", "path": "a", "diff": "+x"},
        "operation",
        {"output": "one file", "status": "completed"},
    ),
]
"""Tools that the client runs: arguments, the field of the item that has them, and what a call's result says."""


TEMPLATE = """
{%- for tool in tools or [] %}{{ tool | tojson }}{% endfor %}
{%- for message in messages %}<|im_start|>{{ message.role }}
{{ message.content or "" }}
{%- for call in message.tool_calls or [] %}<tool_call>{{ call.function | tojson }}</tool_call>{% endfor %}<|im_end|>
{% endfor %}<|im_start|>assistant
"""


@pytest.fixture
def calling(make_harness: Callable[..., Harness], tmp_path: Path) -> Harness:
    template = tmp_path / "template.jinja"
    template.write_text(TEMPLATE)
    return make_harness(tools=HermesTools(), context_len=8192, chat_template=str(template))


def call(name: str, arguments: Any) -> str:
    return f"<tool_call>\n{json.dumps({'name': name, 'arguments': arguments})}\n</tool_call>"


def prompt_of(harness: Harness) -> str:
    return harness.tokenizer.decode(harness.engine.submits[-1].prompt_ids, skip_special_tokens=False)


def items_of(harness: Harness, **fields: Any) -> list[dict[str, Any]]:
    """Return the output, which a stream and a whole reply have alike."""
    body = {"model": "tiny", "input": "hi", **fields}
    whole = strict_response(harness.post("/v1/responses", body).json())["output"]
    events = response_events(harness.post("/v1/responses", {**body, "stream": True}))
    streamed = events[-1]["response"]["output"]
    done = [event["item"] for event in events if event["type"] == "response.output_item.done"]
    assert done == streamed

    def bare(items: list[dict[str, Any]]) -> list[dict[str, Any]]:
        return [{key: value for key, value in item.items() if key not in ("id", "call_id")} for item in items]

    assert bare(whole) == bare(streamed)
    return list(whole)


def test_an_agents_first_request_is_served(calling: Harness, caplog: pytest.LogCaptureFixture) -> None:
    """A tool that the server would have to run is left out of the prompt; reply, header and log name it."""
    log_dropped.cache_clear()
    calling.text = call("patch", {"input": PATCH}) + call("mcp__docs__lookup", {})
    with caplog.at_level(logging.WARNING, "dovetail.server"):
        reply = calling.post("/v1/responses", AGENT)
        assert calling.post("/v1/responses", AGENT).status_code == 200
    events = response_events(reply)
    assert reply.headers["x-dovetail-dropped"] == "web_search"
    assert [record.args for record in caplog.records if "left out" in record.msg] == [("web_search",)]
    last = events[-1]["response"]
    assert last["dovetail"] == {
        "dropped": [{"param": "tools[3].type", "type": "web_search"}],
        "unenforced": ["tools[1].format"],
    }
    custom, function = last["output"]
    assert (custom["type"], custom["name"], custom["input"]) == ("custom_tool_call", "patch", PATCH)
    assert (function["type"], function["name"], function["namespace"]) == ("function_call", "lookup", "mcp__docs")
    told = [event for event in events if "custom_tool_call_input" in event["type"]]
    assert "".join(event.get("delta", "") for event in told) == told[-1]["input"] == PATCH
    prompt = prompt_of(calling)
    assert "web_search" not in prompt
    assert "mcp__docs__lookup" in prompt
    assert json.dumps(LARK)[1:-1] in prompt


def test_calls_of_custom_tools_and_namespaces_go_back_as_the_model_made_them(calling: Harness) -> None:
    """The next prompt has the calls under the names that the model knows, and what they gave."""
    calling.text = call("patch", {"input": PATCH}) + call("mcp__docs__lookup", {"a": 1})
    custom, function = items_of(calling, tools=AGENT["tools"])
    history = [
        {"role": "user", "content": "fix it"},
        {"type": "web_search_call", "id": "ws_1", "status": "completed", "action": {"type": "search", "query": "q"}},
        custom,
        function,
        {"type": "custom_tool_call_output", "call_id": custom["call_id"], "output": "patched"},
        {"type": "function_call_output", "call_id": function["call_id"], "output": "found"},
    ]
    items_of(calling, input=history, tools=AGENT["tools"])
    prompt = prompt_of(calling)
    said = [json.loads(part.split("</tool_call>")[0]) for part in prompt.split("<tool_call>")[-2:]]
    assert said == [
        {"name": "patch", "arguments": {"input": PATCH}},
        {"name": "mcp__docs__lookup", "arguments": {"a": 1}},
    ]
    assert prompt.index("patched") < prompt.index("found")


def test_tools_may_stand_in_the_conversation(calling: Harness) -> None:
    """Codex sends an item with them and no `tools`; a stored conversation keeps them."""
    more = {
        "type": "additional_tools",
        "role": "developer",
        "tools": [{"type": "namespace", "name": "functions", "tools": [CUSTOM, FUNCTION]}, {"type": "web_search"}],
    }
    question = [more, {"role": "user", "content": "fix it"}]
    fields = {"model": "tiny", "reasoning": {"context": "all_turns"}}
    calling.text = call("functions__patch", {"input": PATCH})
    reply = calling.post("/v1/responses", {**fields, "input": question}).json()
    (item,) = reply["output"]
    assert (item["type"], item["name"], item["namespace"]) == ("custom_tool_call", "patch", "functions")
    assert [dropped["param"] for dropped in reply["dovetail"]["dropped"]] == ["input[0].tools[1].type"]
    result = {"type": "custom_tool_call_output", "call_id": item["call_id"], "output": "patched"}
    again = {**fields, "previous_response_id": reply["id"], "input": [result]}
    (item,) = calling.post("/v1/responses", again).json()["output"]
    assert item["type"] == "custom_tool_call"
    assert "functions__patch" in prompt_of(calling)
    shown = calling.get(f"/v1/responses/{reply['id']}/input_items?order=asc").json()["data"]
    assert shown[0]["tools"] == more["tools"]
    search = {"type": "web_search_call", "action": {"query": "x" * 100_000}}  # read by another process, not shown
    (item,) = calling.post("/v1/responses", {**fields, "input": [search, *question]}).json()["output"]
    assert (item["type"], item["namespace"]) == ("custom_tool_call", "functions")


@pytest.mark.parametrize(("kind", "arguments", "field", "result"), KINDS, ids=[kind[0] for kind in KINDS])
def test_tools_that_the_client_runs(
    calling: Harness, kind: str, arguments: dict[str, Any], field: str, result: dict[str, Any]
) -> None:
    """The model calls a function, the client gets the API's item, and sends it back with what came of it."""
    calling.text = call(kind, arguments)
    (item,) = items_of(calling, tools=[{"type": kind}], tool_choice="auto")
    assert (item["type"], item["status"]) == (f"{kind}_call", "completed")
    assert arguments.items() <= item[field].items()
    back = {"type": f"{kind}_call_output", "call_id": item["call_id"], **result}
    if kind == "local_shell":
        back["id"] = back.pop("call_id")
    items_of(calling, input=[{"role": "user", "content": "hi"}, item, back], tools=[{"type": kind}])
    prompt = prompt_of(calling)
    said = json.loads(prompt.split("<tool_call>")[-1].split("</tool_call>")[0])
    assert said["name"] == kind
    assert arguments.items() <= said["arguments"].items()
    assert "one file" in prompt


@pytest.mark.parametrize("arguments", [{"command": "ls"}, {"cmd": ["ls"]}, {}, {"command": ["ls"], "more": 1}])
def test_a_call_that_fits_no_item_stays_a_function_call(calling: Harness, arguments: dict[str, Any]) -> None:
    """Nothing is made up for the client to run: it gets what the model wrote."""
    calling.text = call("local_shell", arguments)
    (item,) = items_of(calling, tools=[{"type": "local_shell"}])
    assert (item["type"], item["name"]) == ("function_call", "local_shell")
    assert json.loads(item["arguments"]) == arguments


def test_an_input_that_was_cut_off_is_given_as_far_as_it_came() -> None:
    """Of arguments that end within the text the text is given, without the JSON around it."""
    assert custom_input('{"input": "a\\nb') == "a\nb"
    assert custom_input('{"input": "a"') == "a"
    assert custom_input('{"other": 1}') == '{"other": 1}'
    assert custom_input('{"inp') == '{"inp'


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"tools": [{"type": "web_search"}], "tool_choice": "required"}, "tools[0].type 'web_search'"),
        ({"tools": [FUNCTION, {"type": "mcp"}], "tool_choice": {"type": "mcp"}}, "tools[1].type 'mcp'"),
        ({"tools": [{"type": "no-such-tool"}]}, "tools[0]"),
        ({"tools": [{"type": "namespace", "name": "n", "tools": [{"type": "web_search"}]}]}, "tools[0].tools[0]"),
        ({"tools": [{**CUSTOM, "parameters": {}}]}, "tools[0].parameters"),
        (
            {"tools": [{**CUSTOM, "format": {"type": "grammar", "syntax": "bnf", "definition": ""}}]},
            "tools[0].format.syntax",
        ),
        ({"tools": [CUSTOM, {**FUNCTION, "name": "patch"}]}, "tools[1]"),
        ({"tools": [{"type": "shell", "name": "x"}]}, "tools[0].name"),
        (
            {"input": ["hi", {"type": "additional_tools", "tools": [{"type": "no-such-tool"}]}]},
            "input[0]",
        ),
        ({"input": [{"type": "additional_tools", "tools": [{**FUNCTION, "name": "a b"}]}]}, "input[0].tools[0].name"),
        ({"input": [{"type": "additional_tools", "tools": [FUNCTION] * 513}] * 2 + [USER]}, "tools"),
        (
            {
                "tools": [CUSTOM],
                "input": [
                    {"type": "additional_tools", "tools": [{**FUNCTION, "name": "patch"}]},
                    {"role": "user", "content": "x"},
                ],
            },
            "input[0].tools[0]",
        ),
        ({"tool_choice": {"type": "shell"}}, "tool_choice"),
        ({"tools": [{"type": "namespace", "name": "n", "tools": [FUNCTION] * 600}] * 2}, "tools"),
        (
            {"tools": [{"type": "namespace", "name": "n", "tools": [{**FUNCTION, "parameters": {"type": 3}}]}]},
            "tools[0].tools[0].parameters",
        ),
    ],
)
def test_tools_that_are_refused(calling: Harness, fields: dict[str, Any], param: str) -> None:
    """What cannot be left out, has a wrong field or a type that nobody knows is a 400 that says where."""
    reply = calling.post("/v1/responses", {"model": "tiny", "input": "hi", **fields})
    assert reply.status_code == 400, reply.text
    assert error_of(reply)["param"] == param


def test_an_operator_may_refuse_tools_that_cannot_be_run(make_harness: Callable[..., Harness]) -> None:
    """With `--unservable-tools refuse` such a tool is a 400, whatever else there is."""
    server = make_harness(tools=HermesTools(), context_len=8192, unservable_tools="refuse")
    reply = server.post("/v1/responses", AGENT)
    assert reply.status_code == 400
    assert error_of(reply)["param"] == "tools[3].type 'web_search'"


@pytest.mark.parametrize(
    ("choice", "name"),
    [
        ({"type": "custom", "name": "patch"}, "patch"),
        ({"type": "apply_patch"}, "apply_patch"),
        ({"type": "function", "name": "lookup", "namespace": "mcp__docs"}, "mcp__docs__lookup"),
        ({"type": "function", "name": "lookup", "namespace": "crm_"}, "crm_lookup"),
    ],
)
def test_a_choice_names_the_function_that_the_model_sees(choice: dict[str, Any], name: str) -> None:
    """`tool_choice` may name a custom tool, one that the client runs, or one in a namespace."""
    assert chat_choice(choice, ReadTools()) == {"type": "function", "function": {"name": name}}


def test_a_choice_of_another_type_than_the_tool_s_is_refused(calling: Harness) -> None:
    """Alone and among the allowed ones, with the type that is right; what the server leaves out is no reason."""
    for choice, is_of in (
        ({"type": "custom", "name": "lookup"}, "function"),
        ({"type": "function", "name": "patch"}, "custom"),
        ({"type": "function", "name": "shell"}, "shell"),
    ):
        for given in (choice, {"type": "allowed_tools", "mode": "auto", "tools": [choice]}):
            tools = [{**FUNCTION, "name": "lookup"}, CUSTOM, {"type": "shell"}]
            reply = calling.post(
                "/v1/responses", {"model": "tiny", "input": "hi", "tools": tools, "tool_choice": given}
            )
            assert (reply.status_code, error_of(reply)["param"]) == (400, "tool_choice")
            assert f"the type of {choice['name']!r} is {is_of!r} in tools" in error_of(reply)["message"]
    namespace = {"type": "namespace", "name": "docs", "tools": [{**FUNCTION, "name": "lookup"}]}
    named = [
        {"type": "function", "name": "lookup", "namespace": "docs"},
        {"type": "shell"},
        {"type": "web_search"},
    ]
    body = {
        "model": "tiny",
        "input": "hi",
        "tools": [namespace, {"type": "shell"}, {"type": "web_search"}, CUSTOM],
        "tool_choice": {"type": "allowed_tools", "mode": "auto", "tools": named},
    }
    assert calling.post("/v1/responses", body).status_code == 200
    assert "docs__lookup" in prompt_of(calling)
    assert '"patch"' not in prompt_of(calling)
