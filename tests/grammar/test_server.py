"""Structured outputs over HTTP, with the demo model's own engine behind the server."""

from __future__ import annotations

import json
import re
from typing import Any

import jsonschema
import pytest
import requests
from served import ASK, Served

SCHEMA = {
    "type": "object",
    "properties": {"country": {"type": "string", "maxLength": 20}, "rank": {"type": "integer", "minimum": 1}},
    "required": ["country", "rank"],
    "additionalProperties": False,
}
TOOLS = [
    {
        "type": "function",
        "function": {
            "name": name,
            "description": f"{name} something",
            "parameters": {
                "type": "object",
                "properties": {key: {"type": "string", "maxLength": 16}},
                "required": [key],
                "additionalProperties": False,
            },
        },
    }
    for name, key in (("get_weather", "city"), ("get_time", "zone"))
]


NARROW = {"enum": ["France", 1]}


@pytest.mark.parametrize(
    ("fields", "pattern"),
    [
        ({"response_format": {"type": "json_object"}}, r"(?s)\s*\{.*\}\s*"),
        ({"response_format": {"type": "json_schema", "json_schema": {"name": "x", "schema": NARROW}}}, None),
        ({"response_format": {"type": "json_object", "schema": NARROW}}, None),
        (
            {
                "response_format": {
                    "type": "json_schema",
                    "json_schema": {"name": "x", "strict": True, "schema": NARROW},
                }
            },
            None,
        ),
        ({"response_format": {"type": "text"}}, r"(?s).*"),
        ({"json_schema": NARROW}, None),
        ({"json_schema": json.dumps(NARROW)}, None),
        ({"regex": "[A-C]{2}-[0-9]{3}"}, r"[A-C]{2}-[0-9]{3}"),
        ({"ebnf": 'root ::= "yes" | "no"'}, "yes|no"),
        ({"ebnf": 'start: "yes" | "no"'}, "yes|no"),
        ({"structured_outputs": {"json": NARROW}}, None),
        ({"structured_outputs": {"regex": "a{3}"}}, "aaa"),
        ({"structured_outputs": {"choice": ["left", "right"]}}, "left|right"),
        ({"structured_outputs": {"grammar": 'root ::= "q" [0-9]'}}, "q[0-9]"),
        (
            {"structural_tag": {"type": "structural_tag", "format": {"type": "const_string", "value": "fixed"}}},
            "fixed",
        ),
    ],
    ids=lambda value: json.dumps(value)[:60] if isinstance(value, dict) else "",
)
def test_every_spelling(served: Served, fields: dict[str, Any], pattern: str | None) -> None:
    """Each spelling of a grammar constrains chat and completions, and the reply reports it."""
    chat = served.chat(chat_template_kwargs={"enable_thinking": False}, **fields)
    completion = served.post("/v1/completions", prompt="France:", max_tokens=200, seed=3, **fields).json()["choices"][0]
    for text, choice in ((chat["message"]["content"], chat), (completion["text"], completion)):
        if choice["finish_reason"] == "length":
            continue
        if pattern is None:
            assert json.loads(text) in NARROW["enum"]
        else:
            assert re.fullmatch(pattern, text), text
        if fields.get("response_format") != {"type": "text"}:
            assert choice["structured_output"] == {
                "backend": "llguidance",
                "enforcement": "full",
                "ignored": [],
                "valid": True,
            }


def test_generate_takes_grammars_in_its_sampling_params(served: Served) -> None:
    """`/generate` constrains single prompts and batches, each with its own grammar."""
    one = served.post("/generate", text="x", sampling_params={"regex": "[ab]{4}"}).json()
    assert re.fullmatch("[ab]{4}", one["text"])
    assert one["meta_info"]["structured_output"]["enforcement"] == "full"
    params = [{"regex": "c{2}"}, {"json_schema": json.dumps({"enum": ["é", 1]})}]
    two = served.post("/generate", text=["x", "y"], sampling_params=params).json()
    assert two[0]["text"] == "cc"
    assert json.loads(two[1]["text"]) in ("é", 1)


@pytest.mark.parametrize("thinking", [False, True])
def test_a_stream_says_the_same_as_a_full_reply(served: Served, thinking: bool) -> None:
    """Streamed content equals the full reply's, thinking or not, and the last chunk carries the report."""
    body = {
        "model": "dovetail-demo",
        "messages": ASK,
        "seed": 5,
        "max_tokens": 300,
        "chat_template_kwargs": {"enable_thinking": thinking},
        "response_format": {"type": "json_schema", "json_schema": {"name": "x", "schema": SCHEMA}},
    }
    full = served.chat(**{key: value for key, value in body.items() if key != "model"})
    reply = requests.post(f"{served.base}/v1/chat/completions", json={**body, "stream": True}, timeout=120)
    chunks = [json.loads(line[6:]) for line in reply.text.splitlines() if line.startswith("data: {")]
    text = "".join(chunk["choices"][0]["delta"].get("content") or "" for chunk in chunks)
    assert text == full["message"]["content"]
    assert (full["message"]["reasoning_content"] is not None) == thinking
    jsonschema.validate(json.loads(text), SCHEMA)
    last = chunks[-1]["choices"][0]
    assert last["structured_output"] == full["structured_output"]
    assert last["structured_output"]["valid"] is True


def test_several_choices_share_a_grammar(served: Served) -> None:
    """`n` choices each conform."""
    reply = served.post(
        "/v1/chat/completions", messages=ASK, n=4, seed=1, max_tokens=100, regex="[a-f]{6}", temperature=1.5
    ).json()
    assert all(re.fullmatch("[a-f]{6}", choice["message"]["content"]) for choice in reply["choices"])
    assert len({choice["message"]["content"] for choice in reply["choices"]}) > 1


def test_a_stop_string_cuts_a_constrained_text(served: Served) -> None:
    """A stop string ends the text within its grammar; nothing is said of its validity then."""
    choice = served.chat(regex="[0-9]{3}END[0-9]{5}", stop="END", chat_template_kwargs={"enable_thinking": False})
    assert re.fullmatch("[0-9]{3}", choice["message"]["content"])
    assert choice["finish_reason"] == "stop"
    assert choice["structured_output"]["valid"] is None


@pytest.mark.parametrize(
    ("fields", "param", "code"),
    [
        ({"response_format": {"type": "json_schema"}}, "response_format.json_schema", "invalid_value"),
        ({"response_format": {"type": "yaml"}}, "response_format", "invalid_value"),
        ({"json_schema": {"type": "foo"}}, "json_schema", "invalid_json_schema"),
        ({"json_schema": "[1]"}, "json_schema", "invalid_json_schema"),
        ({"json_schema": "{"}, "json_schema", "invalid_json_schema"),
        ({"json_schema": {"$ref": "#/$defs/nothing"}}, "json_schema", "invalid_json_schema"),
        ({"json_schema": {"$ref": "http://example.com/x"}}, "json_schema", "invalid_json_schema"),
        ({"json_schema": {"properties": {"a": {"minLength": -1}}}}, "json_schema", "invalid_json_schema"),
        (
            {"response_format": {"type": "json_schema", "json_schema": {"name": "a\0", "schema": {}}}},
            "response_format.json_schema.name",
            "invalid_value",
        ),
        ({"regex": "a\0"}, "regex", "invalid_value"),
        ({"regex": "("}, "regex", "invalid_grammar"),
        ({"regex": ""}, "regex", "invalid_grammar"),
        ({"ebnf": 'root ::= missing "x"'}, "ebnf", "invalid_grammar"),
        ({"ebnf": "start: missing"}, "ebnf", "invalid_grammar"),
        ({"regex": "a", "ebnf": 'root ::= "a"'}, "ebnf", "invalid_value"),
        ({"structured_outputs": {"regex": "a", "choice": ["b"]}}, "structured_outputs", "invalid_value"),
        ({"structured_outputs": {"yaml": "a"}}, "structured_outputs.yaml", "invalid_value"),
        ({"structured_outputs": {"choice": []}}, "structured_outputs.choice", "invalid_value"),
        ({"regex": "a" * 600_000}, "regex", "grammar_too_large"),
        ({"json_schema": '{"items":' * 100 + "{}" + "}" * 100}, "json_schema", "grammar_too_complex"),
        ({"structural_tag": {"format": {"type": "tag"}}}, "structural_tag", "invalid_grammar"),
        ({"json_schema": {"minimum": 5, "maximum": 3, "type": "integer"}}, "json_schema", "invalid_grammar"),
    ],
    ids=lambda value: json.dumps(value)[:50] if isinstance(value, dict) else "",
)
@pytest.mark.parametrize("stream", [False, True])
def test_bad_grammars_are_refused(served: Served, fields: dict[str, Any], param: str, code: str, stream: bool) -> None:
    """A wrong grammar is a 400 that names field and code, streaming or not."""
    reply = served.post("/v1/chat/completions", messages=ASK, stream=stream, **fields)
    error = reply.json()["error"]
    assert (reply.status_code, error["param"], error["code"]) == (400, param, code), error


def test_a_schema_that_cannot_be_enforced_is_validated(served: Served) -> None:
    """What no backend enforces is named in the reply, and the finished text is judged."""
    items = {"enum": list(range(1, 30))}
    schema = {"type": "array", "items": items, "minItems": 2, "maxItems": 2, "contains": {"const": 1}}
    choice = served.chat(json_schema=schema, chat_template_kwargs={"enable_thinking": False})
    report = choice["structured_output"]
    assert report["enforcement"] == "approximate"
    assert report["ignored"] == ["/contains"]
    assert report["valid"] is (1 in json.loads(choice["message"]["content"]))


def test_items_differ(served: Served) -> None:
    """`uniqueItems`, which no grammar says, is enforced as the text is generated, whatever the model would write."""
    items = {"enum": [f"value {i}" for i in range(12)]}  # more orders than are written out
    schema = {"type": "array", "items": items, "minItems": 12, "uniqueItems": True}
    fields: dict[str, Any] = {"json_schema": schema, "chat_template_kwargs": {"enable_thinking": False}}
    choice = served.chat(**fields, max_tokens=600, logit_bias={"16": 100}, temperature=0.0)  # "1", if it may
    assert (choice["structured_output"]["enforcement"], choice["finish_reason"]) == ("full", "stop")
    assert sorted(json.loads(choice["message"]["content"])) == sorted(items["enum"])


def test_required_and_named_tools_are_called(served: Served) -> None:
    """`required` makes a call of some tool, a named choice one of that tool, and `parallel_tool_calls` bounds them."""
    required = served.chat(tools=TOOLS, tool_choice="required", parallel_tool_calls=False)
    assert required["finish_reason"] == "tool_calls"
    assert len(required["message"]["tool_calls"]) == 1
    for name, key in (("get_weather", "city"), ("get_time", "zone")):
        named = served.chat(tools=TOOLS, tool_choice={"type": "function", "function": {"name": name}})
        [call] = named["message"]["tool_calls"]
        assert call["function"]["name"] == name
        assert set(json.loads(call["function"]["arguments"])) == {key}
        assert named["message"]["content"] is None


def test_strict_tools_constrain_only_calls(served: Served) -> None:
    """With `strict` and `auto` the model may answer in text; a call that it makes conforms."""
    tools = [{**tool, "function": {**tool["function"], "strict": True}} for tool in TOOLS]
    asked = [{"role": "user", "content": "What is the weather in Paris?"}]
    choice = served.chat(messages=asked, tools=tools, temperature=0, chat_template_kwargs={"enable_thinking": False})
    for call in choice["message"].get("tool_calls") or []:
        jsonschema.validate(json.loads(call["function"]["arguments"]), tools[0]["function"]["parameters"])


def test_a_grammar_beside_tools_leaves_the_choice_to_the_model(served: Served) -> None:
    """`response_format` with tools and `auto` gives a call or a conforming text."""
    choice = served.chat(tools=TOOLS, json_schema=SCHEMA, chat_template_kwargs={"enable_thinking": False})
    if not choice["message"].get("tool_calls"):
        jsonschema.validate(json.loads(choice["message"]["content"]), SCHEMA)


def test_allowed_tools_and_unknown_names(served: Served) -> None:
    """`allowed_tools` restricts the call; a name that is not among the tools is a 400."""
    allowed = {"type": "allowed_tools", "allowed_tools": {"mode": "required", "tools": [TOOLS[1]]}}
    [call] = served.chat(tools=TOOLS, tool_choice=allowed, parallel_tool_calls=False)["message"]["tool_calls"]
    assert call["function"]["name"] == "get_time"
    unknown = {"type": "function", "function": {"name": "nope"}}
    reply = served.post("/v1/chat/completions", messages=ASK, tools=TOOLS, tool_choice=unknown)
    assert (reply.status_code, reply.json()["error"]["param"]) == (400, "tool_choice")


def test_a_thinking_budget_over_http(served: Served) -> None:
    """`thinking_budget` bounds the reasoning tokens, with and without a grammar."""
    ask = [{"role": "user", "content": "What is the capital of France?"}]
    for extra in ({}, {"regex": "[A-Z][a-z]{2,9}"}):
        reply = served.post(
            "/v1/chat/completions",
            messages=ask,
            thinking_budget=3,
            max_tokens=100,
            chat_template_kwargs={"enable_thinking": True},
            **extra,
        ).json()
        assert reply["usage"]["reasoning_tokens"] <= 3
        assert reply["choices"][0]["finish_reason"] == "stop"


@pytest.mark.parametrize(
    ("schema", "place"),
    [
        ({"properties": {"a": {"minLength": -1}}}, "/properties/a/minLength (minLength)"),
        ({"items": {"type": "strange"}}, "/items/type (type)"),
        ({"$defs": {"n": {"$ref": "#/$defs/m"}}, "$ref": "#/$defs/n"}, "#/$defs/m"),
        ({"anyOf": []}, "/anyOf (anyOf)"),
        ({"required": "a"}, "/required (required)"),
        ({"pattern": 3}, "/pattern (pattern)"),
        ({"$ref": "https://example.com/schema"}, "nothing is fetched"),
    ],
    ids=lambda value: json.dumps(value)[:40] if isinstance(value, dict) else "",
)
def test_a_wrong_schema_is_told_where(served: Served, schema: dict[str, Any], place: str) -> None:
    """The message of the 400 holds the place and the keyword."""
    reply = served.post("/v1/completions", prompt="x", json_schema=schema)
    error = reply.json()["error"]
    assert (reply.status_code, error["code"]) == (400, "invalid_json_schema")
    assert place in error["message"]


@pytest.mark.parametrize(
    ("fields", "codes"),
    [
        ({"regex": "[ab]*a[ab]{20}"}, {200}),
        ({"regex": "(x+x+)+y"}, {200}),
        ({"json_schema": '{"items":' * 10_000 + "{}" + "}" * 10_000}, {400}),
        ({"json_schema": {"enum": [f"v{i}" for i in range(100_000)]}}, {400}),
        ({"json_schema": {"anyOf": [{"$ref": "#"}, {"$ref": "#"}]}}, {400, 200}),
        ({"json_schema": {"type": "object", "properties": {"n": {"$ref": "#"}}}}, {200}),
        ({"structured_outputs": {"regex": "(((a{0,60}b){0,60}c){0,60}d){0,60}"}}, {400, 200}),
    ],
    ids=lambda value: json.dumps(value)[:40] if isinstance(value, dict) else "",
)
def test_hostile_grammars_are_answered(served: Served, fields: dict[str, Any], codes: set[int]) -> None:
    """Explosive patterns, deep nesting, huge enums and endless references are answered, and the server goes on."""
    reply = served.post("/v1/completions", prompt="x", max_tokens=8, **fields)
    assert reply.status_code in codes, reply.text
    if reply.status_code == 400:
        assert reply.json()["error"]["code"] in (
            *("grammar_too_large", "grammar_too_complex", "invalid_grammar", "unsupported_grammar"),
            "invalid_json_schema",
        )
    assert served.post("/v1/completions", prompt="x", max_tokens=2).status_code == 200


@pytest.mark.parametrize(
    ("path", "field"),
    [
        ("/v1/chat/completions", {"messages": ASK, "structured_outputs": {"regex": "[a-c]{4}"}}),
        ("/v1/completions", {"prompt": "France", "regex": "[a-c]{4}"}),
    ],
)
@pytest.mark.parametrize("backend", ["llguidance", "outlines"])
def test_a_request_chooses_its_backend(served: Served, path: str, field: dict[str, Any], backend: str) -> None:
    """As `--grammar-backend` does for all; the reply names it."""
    reply = served.post(path, **field, grammar_backend=backend).json()
    assert reply["choices"][0]["structured_output"]["backend"] == backend


def test_generate_takes_a_backend_among_its_parameters(served: Served) -> None:
    """As other fields of grammars."""
    params = {"regex": "[a-c]{4}", "grammar_backend": "outlines"}
    reply = served.post("/generate", text="France", sampling_params=params).json()
    assert reply["meta_info"]["structured_output"]["backend"] == "outlines"


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/completions", "/generate"])
def test_a_backend_that_is_not_loaded_is_refused_with_those_that_are(served: Served, path: str) -> None:
    """Also where the request has no grammar: the name would be wrong for any."""
    body = {"/generate": {"text": "x", "sampling_params": {"grammar_backend": "none-such"}}}.get(
        path, {"messages": ASK, "prompt": "x", "grammar_backend": "none-such"}
    )
    body.pop("prompt" if "chat" in path else "messages", None)
    reply = served.post(path, **body)
    assert reply.status_code == 400
    error = reply.json()["error"]
    assert error["param"] == "grammar_backend"
    assert "llguidance" in error["message"]


def test_messages_and_responses_choose_their_backend(served: Served) -> None:
    """The same field in all ways to ask; a schema that two backends enforce is enforced by the one that is named."""
    schema = {"type": "object", "properties": {"a": {"enum": [1, 2]}}, "required": ["a"], "additionalProperties": False}
    body = {"messages": ASK, "max_tokens": 40, "output_config": {"format": {"type": "json_schema", "schema": schema}}}
    for backend in ("llguidance", "outlines"):
        reply = served.post("/v1/messages", **body, grammar_backend=backend).json()
        assert reply["structured_output"]["backend"] == backend
    text = {"format": {"type": "json_schema", "name": "x", "schema": schema, "strict": True}}
    reply = served.post("/v1/responses", input="Go on.", text=text, store=False, grammar_backend="outlines")
    assert reply.status_code == 200, reply.text
    for path, fields in (("/v1/messages", body), ("/v1/responses", {"input": "Go on.", "store": False})):
        refused = served.post(path, **fields, grammar_backend="none-such")
        assert refused.status_code == 400
        assert all(word in refused.text for word in ("grammar_backend", "none-such", "llguidance"))


def test_a_backend_that_cannot_take_the_kind_says_so(served: Served) -> None:
    """Calls are structural grammars, which `outlines` does not read."""
    reply = served.post(
        "/v1/chat/completions", messages=ASK, tools=TOOLS, tool_choice="required", grammar_backend="outlines"
    )
    assert reply.status_code == 400
    assert "no backend here reads" in reply.json()["error"]["message"]
