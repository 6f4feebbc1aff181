"""`--unknown-fields`: what nobody knows is refused, or left out of the request and counted, whichever way it comes."""

from __future__ import annotations

import json
import logging
from collections.abc import Callable
from typing import Any

import pytest
from exchanges import error_of
from harness import Harness

from dovetail_server.reading.wire import LARGE
from dovetail_server.schema.unknown import MAX_NAMES, MAX_OF_BODY, OTHER, LeftOut, UnknownFields

USER = [{"role": "user", "content": "hi"}]
BODIES: dict[str, dict[str, Any]] = {
    "/v1/chat/completions": {"messages": USER},
    "/v1/completions": {"prompt": "hi"},
    "/v1/responses": {"input": "hi"},
    "/v1/responses/input_tokens": {"input": "hi"},
    "/v1/messages": {"messages": USER, "max_tokens": 4},
    "/v1/messages/count_tokens": {"messages": USER},
    "/generate": {"text": "hi"},
    "/tokenize": {"prompt": "hi"},
}


@pytest.fixture
def warning(make_harness: Callable[..., Harness]) -> Harness:
    return make_harness(context_len=1 << 17, unknown_fields="warn", body_processes=1)


def counted(server: Harness) -> dict[str, int]:
    """What the metric says, by field."""
    start = "dovetail_unknown_fields_total{"
    lines = [line for line in server.get("/metrics").text.splitlines() if line.startswith(start)]
    return {line.split('field="')[1].split('"')[0]: int(float(line.rsplit(" ", 1)[1])) for line in lines}


@pytest.mark.parametrize("path", BODIES)
def test_it_is_left_out_and_counted(warning: Harness, path: str) -> None:
    """The reply is that of the body without it, on every route; a request counts once, however often it is read."""
    body = {"model": "tiny", **BODIES[path]}
    reply = warning.post(path, {**body, "no_such_field": 1})
    assert reply.status_code == 200, reply.text
    assert counted(warning) == {"no_such_field": 1}


@pytest.mark.parametrize("path", BODIES)
def test_it_is_refused_by_default(harness: Harness, path: str) -> None:
    """As ever."""
    reply = harness.post(path, {"model": "tiny", **BODIES[path], "no_such_field": 1})
    assert reply.status_code == 400
    assert "no_such_field" in reply.text


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/responses"])
def test_a_large_body_is_read_elsewhere(warning: Harness, path: str) -> None:
    """The process that reads it tells what it left out, and the field counts once."""
    text = "hello " * (LARGE // 5)
    body: dict[str, Any] = (
        {"input": text} if path.endswith("responses") else {"messages": [{**USER[0], "content": text}]}
    )
    reply = warning.post(path, {"model": "tiny", **body, "no_such_field": {"a": [1]}})
    assert reply.status_code == 200, reply.text
    assert counted(warning) == {"no_such_field": 1}


def test_what_others_know_is_refused_all_the_same(warning: Harness) -> None:
    """It would have changed the reply; of inner objects an unknown field is left out, too."""
    error = error_of(warning.post("/v1/chat/completions", {"messages": USER, "lora_path": "a", "no_such_field": 1}))
    assert (error["param"], error["code"]) == ("lora_path", "unsupported_parameter")
    error = error_of(warning.post("/v1/chat/completions", {"prompt": "hi", "messages": USER}))
    assert error["param"] == "prompt"
    options = {"stream_options": {"include_usage": True, "inner": 1}, "stream": True}
    reply = warning.post("/v1/chat/completions", {"messages": USER, **options})
    assert reply.status_code == 200
    assert '"usage":{' in reply.text
    assert counted(warning)["inner"] == 1


def test_a_batch_leaves_it_out_as_well(warning: Harness) -> None:
    """A line of a file is read as a request is."""
    line = {"custom_id": "a", "method": "POST", "url": "/v1/chat/completions"}
    text = json.dumps({**line, "body": {"model": "tiny", "messages": USER, "no_such_field": 1}})
    file = warning.post("/v1/files", files={"file": ("in.jsonl", text)}, data={"purpose": "batch"}).json()["id"]
    wanted = {"input_file_id": file, "endpoint": "/v1/chat/completions", "completion_window": "24h"}
    batch = warning.post("/v1/batches", wanted).json()["id"]
    warning.eventually(lambda: warning.get(f"/v1/batches/{batch}").json()["status"] in ("completed", "failed"))
    found = warning.get(f"/v1/batches/{batch}").json()
    assert found["request_counts"] == {"total": 1, "completed": 1, "failed": 0}
    assert counted(warning) == {"no_such_field": 1}


def test_names_are_bounded(caplog: pytest.LogCaptureFixture) -> None:
    """A client chooses them: beyond 100, and in a request beyond 16, they count as one; each is logged once."""
    fields = UnknownFields()
    with caplog.at_level(logging.WARNING, "dovetail.server"):
        LeftOut(fields.count).add(f"first{i}" for i in range(1_000_000))
        assert len(fields.counted()) == MAX_OF_BODY + 1
        for i in range(1000):
            LeftOut(fields.count).add([f"name{i}" * 50])
            LeftOut(fields.count).add([f"name{i}" * 50])
    counts = fields.counted()
    assert len(counts) == MAX_NAMES
    assert counts[OTHER] == 1 + 2 * (1000 - (MAX_NAMES - MAX_OF_BODY - 1))
    assert max(map(len, counts)) <= 64
    assert len(caplog.records) == MAX_NAMES - 1


CALL = {"type": "function", "id": "a", "function": {"name": "f", "arguments": "{}", "zork": 1}, "zork": 1}
HISTORIES: list[tuple[str, dict[str, Any]]] = [
    ("/v1/chat/completions", {"messages": [*USER, {"role": "assistant", "tool_calls": [CALL], "zork": 1}, *USER]}),
    (
        "/v1/responses",
        {
            "input": [
                {
                    "type": "message",
                    "role": "user",
                    "content": [{"type": "input_text", "text": "a", "zork": 1}],
                    "zork": 1,
                },
                {"type": "reasoning", "summary": [{"type": "summary_text", "text": "a", "zork": 1}], "zork": 1},
                {"type": "function_call", "call_id": "a", "name": "f", "arguments": "{}", "zork": 1},
                {"type": "function_call_output", "call_id": "a", "output": "a", "zork": 1},
            ]
        },
    ),
    (
        "/v1/messages",
        {
            "max_tokens": 4,
            "system": [{"type": "text", "text": "a", "zork": 1}],
            "messages": [
                {"role": "user", "content": [{"type": "text", "text": "a", "zork": 1}], "zork": 1},
                {
                    "role": "assistant",
                    "content": [{"type": "tool_use", "id": "a", "name": "f", "input": {}, "zork": 1}],
                },
                {"role": "user", "content": [{"type": "tool_result", "tool_use_id": "a", "content": "a", "zork": 1}]},
            ],
        },
    ),
]
"""What clients send back, with fields that another server gave them."""


@pytest.mark.parametrize(("path", "body"), HISTORIES)
def test_fields_within_a_history_are_never_refused(
    path: str, body: dict[str, Any], make_harness: Callable[..., Harness]
) -> None:
    """Whatever is in a message, an item or one of their parts; the same name beside them is refused."""
    server = make_harness(context_len=1 << 12)
    reply = server.post(path, body)
    assert reply.status_code == 200, reply.text
    refused = server.post(path, body | {"zork": 1})
    assert refused.status_code == 400
    assert refused.json()["error"]["message"].startswith("unknown field 'zork'")


def test_fields_of_the_form_of_a_reply_are_no_history(make_harness: Callable[..., Harness], warning: Harness) -> None:
    """A field beside `schema` that means nothing is refused by its place, or counted."""
    server = make_harness()
    schema = {"name": "a", "schema": {"type": "object"}}
    for place, form in {
        "response_format.json_schema.zork": {"type": "json_schema", "json_schema": schema | {"zork": 1}},
        "response_format.schema": {"type": "json_schema", "json_schema": schema, "schema": {}},
        "response_format.json_schema": {"type": "text", "json_schema": schema},
        "response_format.zork": {"type": "text", "zork": 1},
    }.items():
        body = {"messages": USER, "response_format": form}
        error = error_of(server.post("/v1/chat/completions", body))
        assert (error["param"], error["code"]) == (place, "unknown_parameter")
    assert warning.post("/v1/chat/completions", body).status_code == 200
    assert counted(warning) == {"zork": 1}
