"""Batches over HTTP: life cycle, results, what validation finds, and cancelling."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from dovetail.messages import BACKGROUND
from dovetail_server.batches import runner

from .conftest import CHAT, Api, jsonl, line


def test_a_batch_answers_every_line(api: Api) -> None:
    """Outputs stand in the order of the input, counts, usage, model and times are filled in."""
    batch = api.run(line("b"), line("a", url="/chat/completions"), "", line("c"), metadata={"k": "v"})
    assert batch["status"] == "completed"
    outputs, errors = api.results(batch)
    assert [o["custom_id"] for o in outputs] == ["b", "a", "c"]
    assert not errors
    assert batch.get("error_file_id") is None
    first = outputs[0]
    assert set(first) == {"id", "custom_id", "response", "error"}
    assert first["id"].startswith("batch_req_")
    assert first["error"] is None
    assert first["response"]["status_code"] == 200
    assert first["response"]["request_id"]
    choices = first["response"]["body"]["choices"]
    assert isinstance(choices, list)
    assert choices[0]["message"]["content"] == "Hello, world"
    assert batch["request_counts"] == {"total": 3, "completed": 3, "failed": 0}
    assert batch["model"] == "tiny"
    assert batch["metadata"] == {"k": "v"}
    total = sum(o["response"]["body"]["usage"]["total_tokens"] for o in outputs)
    assert batch["usage"]["total_tokens"] == total > 0
    assert batch["created_at"] <= batch["in_progress_at"] <= batch["finalizing_at"] <= batch["completed_at"]
    assert batch["expires_at"] == batch["created_at"] + 86400


def test_a_batch_begins_when_it_is_created(
    make_harness: Callable[..., Any], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """And not when the server next looks for work of others."""
    monkeypatch.setattr(runner, "POLL_S", 3600.0)
    api = Api(make_harness(file_storage_path=tmp_path, min_free_disk_bytes=0))
    assert api.run(line("a"))["status"] == "completed"


def test_completions_too(api: Api) -> None:
    """The other endpoint, several choices, and prompts as ids."""
    batch = api.run(
        line("x", url="/v1/completions", n=2), line("y", url="/completions", prompt=[1, 2]), endpoint="/v1/completions"
    )
    outputs, errors = api.results(batch)
    assert not errors
    assert [len(o["response"]["body"]["choices"]) for o in outputs] == [2, 1]
    assert outputs[1]["response"]["body"]["choices"][0]["text"] == "Hello, world"


def responses_line(custom_id: str, **fields: Any) -> dict[str, Any]:
    body = {"model": "tiny", "input": "hi", **fields}
    return {"custom_id": custom_id, "method": "POST", "url": "/v1/responses", "body": body}


def test_responses_too(api: Api) -> None:
    """Whole responses stand in the output, their tokens in the batch's usage; only what asks for it is stored."""
    lines = [responses_line("a"), responses_line("b", store=True, priority=3), responses_line("c", stream=True)]
    more = [responses_line("d", background=True), responses_line("e", previous_response_id="resp_none")]
    batch = api.run(*lines, *more, endpoint="/v1/responses")
    outputs, errors = api.results(batch)
    bodies = [o["response"]["body"] for o in outputs]
    assert [o["custom_id"] for o in outputs] == ["a", "b"]
    assert [body["output"][0]["content"][0]["text"] for body in bodies] == ["Hello, world"] * 2
    assert batch["usage"]["total_tokens"] == sum(body["usage"]["total_tokens"] for body in bodies) > 0
    assert batch["usage"]["input_tokens_details"]["cached_tokens"] == 6
    assert [api.harness.get(f"/v1/responses/{body['id']}").status_code for body in bodies] == [404, 200]
    assert {submit.priority for submit in api.harness.engine.submits} == {-(1 << 31)}
    refused = [(e["custom_id"], e["response"]["status_code"], e["response"]["body"]["error"]["param"]) for e in errors]
    assert refused == [("c", 400, "stream"), ("d", 400, "background"), ("e", 404, "previous_response_id")]
    follow = api.run(responses_line("f", previous_response_id=bodies[1]["id"]), endpoint="/v1/responses")
    assert follow["request_counts"]["completed"] == 1


def test_embeddings_are_made_line_by_line(api: Api) -> None:
    """A line's vectors stand in the output file, a wrong line in the error file; tokens are summed up."""
    bodies = {"a": {"input": "one"}, "b": {"input": [[1, 2], [3]]}, "c": {"input": ""}}
    lines = [{**responses_line(name), "url": "/v1/embeddings", "body": body} for name, body in bodies.items()]
    batch = api.run(*lines, endpoint="/v1/embeddings")
    outputs, errors = api.results(batch)
    assert [len(o["response"]["body"]["data"]) for o in outputs] == [1, 2]
    assert [e["response"]["body"]["error"]["param"] for e in errors] == ["input"]
    assert batch["usage"]["input_tokens"] == sum(o["response"]["body"]["usage"]["prompt_tokens"] for o in outputs)
    assert {submit.priority for submit in api.harness.engine.submits} == {-(1 << 31)}


def test_lines_run_at_the_lowest_priority_with_the_servers_own_checks(api: Api) -> None:
    """What HTTP would refuse is refused in the error file, and a line's own priority changes nothing."""
    batch = api.run(
        line("good", priority=7),
        line("hot", temperature=-1),
        line("long", messages=[{"role": "user", "content": "x" * 2000}]),
        line("odd", no_such_field=1),
        line("stream", stream=True),
        line("none", messages="hi"),
    )
    outputs, errors = api.results(batch)
    assert [o["custom_id"] for o in outputs] == ["good"]
    assert [e["custom_id"] for e in errors] == ["hot", "long", "odd", "stream", "none"]
    assert {e["response"]["status_code"] for e in errors} == {400}
    assert all(e["error"] is None for e in errors)
    found = [e["response"]["body"]["error"] for e in errors]
    assert [(e["param"], e["code"]) for e in found[:4]] == [
        ("temperature", "invalid_value"),
        ("messages", "context_length_exceeded"),
        ("no_such_field", "unknown_parameter"),
        ("stream", "unsupported_parameter"),
    ]
    assert batch["request_counts"] == {"total": 6, "completed": 1, "failed": 5}
    assert {submit.priority for submit in api.harness.engine.submits} == {-(1 << 31)}


def test_a_batch_whose_lines_all_fail_is_completed_without_output(api: Api) -> None:
    """`completed`, no output file, an error file."""
    batch = api.run(line("a", temperature=9000), line("b", n=0))
    assert batch["status"] == "completed"
    assert batch.get("output_file_id") is None
    assert len(api.lines(batch.get("error_file_id"))) == 2
    assert batch["request_counts"] == {"total": 2, "completed": 0, "failed": 2}


def test_parsers_run(make_harness: Callable[..., Any], tmp_path: Path) -> None:
    """Reasoning and tool calls are taken apart as over HTTP."""
    from dovetail_parsers.reasoning.think_tags import Qwen3Reasoning
    from dovetail_parsers.tools.hermes import HermesTools

    harness = make_harness(
        reasoning=Qwen3Reasoning(), tools=HermesTools(), file_storage_path=tmp_path, min_free_disk_bytes=0
    )
    harness.text = '<think>\nHm.\n</think>\n\n<tool_call>\n{"name": "f", "arguments": {"a": 1}}\n</tool_call>'
    api = Api(harness)
    tools = [{"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}]
    outputs, _ = api.results(api.run(line("a", tools=tools, max_tokens=200)))
    choice = outputs[0]["response"]["body"]["choices"][0]
    assert choice["finish_reason"] == "tool_calls"
    assert choice["message"]["reasoning_content"] == "Hm."
    assert json.loads(choice["message"]["tool_calls"][0]["function"]["arguments"]) == {"a": 1}


GOOD = line("good")
BAD_FILES = {
    "truncated": ([GOOD, '{"custom_id": "b", "method": "POST", "url"'], "invalid_json_line", 2, None),
    "no object": ([GOOD, "[1]"], "invalid_json_line", 2, None),
    "no custom_id": ([{k: v for k, v in GOOD.items() if k != "custom_id"}], "invalid_json_line", 1, None),
    "no body": ([{k: v for k, v in GOOD.items() if k != "body"}], "invalid_json_line", 1, None),
    "body is text": ([GOOD | {"body": "hi"}], "invalid_json_line", 1, None),
    "custom_id is a number": ([GOOD | {"custom_id": 5}], "invalid_json_line", 1, None),
    "empty custom_id": ([GOOD | {"custom_id": ""}], "invalid_json_line", 1, "custom_id"),
    "long custom_id": ([GOOD | {"custom_id": "x" * 513}], "invalid_json_line", 1, "custom_id"),
    "NUL in custom_id": ([GOOD | {"custom_id": "a\0b"}], "invalid_json_line", 1, "custom_id"),
    "lone surrogate": ([rb'{"custom_id": "\ud800", "method": "POST"}'], "invalid_json_line", 1, None),
    "lone surrogate in a body": (
        [b'{"custom_id": "a", "method": "POST", "url": "/v1/chat/completions", "body": {"user": "\\ud800"}}'],
        *("invalid_json_line", 1, None),
    ),
    "no UTF-8": ([b'{"custom_id": "\xff\xfe", "method": "POST"}'], "invalid_json_line", 1, None),
    "deep": ([b"[" * 1000 + b"]" * 1000], "invalid_json_line", 1, None),
    "deep body": (
        [b'{"custom_id": "a", "method": "POST", "url": "/", "body": {"a": ' + b"[" * 1000 + b"]" * 1000 + b"}}"],
        *("invalid_json_line", 1, None),
    ),
    "deep custom_id": ([b'{"custom_id":' + b"[" * 100_000], "invalid_json_line", 1, None),
    "duplicate": ([GOOD, line("other"), GOOD], "duplicate_custom_id", 3, "custom_id"),
    "other url": ([GOOD, line("b", url="/v1/completions")], "url_mismatch", 2, "url"),
    "strange url": ([GOOD | {"url": "http://elsewhere/v1/chat/completions"}], "url_mismatch", 1, "url"),
    "method": ([GOOD | {"method": "GET"}], "invalid_method", 1, "method"),
    "model": ([GOOD, line("b", model="other-9")], "model_mismatch", 2, "body.model"),
    "empty": ([], "empty_file", None, "input_file_id"),
    "blank": (["", "  ", ""], "empty_file", None, "input_file_id"),
}


@pytest.mark.parametrize("name", list(BAD_FILES))
def test_a_bad_input_file_fails_the_batch(shared: Api, name: str) -> None:
    """Found after the reply: the batch is `failed`, says what and where, and nothing of it ran."""
    content, code, line_no, param = BAD_FILES[name]
    num_before = len(shared.harness.engine.submits)
    batch = shared.run(*content)
    assert batch["status"] == "failed"
    assert batch["failed_at"] >= batch["created_at"]
    assert batch["errors"]["object"] == "list"
    assert [(e["code"], e["line"], e["param"]) for e in batch["errors"]["data"]] == [(code, line_no, param)]
    assert batch["errors"]["data"][0]["message"]
    assert batch.get("output_file_id") is None
    assert len(shared.harness.engine.submits) == num_before


def test_every_mistake_is_listed_up_to_a_limit(shared: Api) -> None:
    """Several mistakes are told at once, and no more than a hundred."""
    batch = shared.run(GOOD, GOOD, "{", line("c", model="x"))
    assert [e["code"] for e in batch["errors"]["data"]] == [
        "duplicate_custom_id",
        "invalid_json_line",
        "model_mismatch",
    ]
    assert len(shared.run(*(["{"] * 300))["errors"]["data"]) == 100


def test_a_line_over_the_body_limit_and_too_many_lines(make_harness: Callable[..., Any], tmp_path: Path) -> None:
    """Both are told by line or code, whatever the line ends with."""
    api = Api(make_harness(file_storage_path=tmp_path, max_batch_lines=3, max_body_bytes=2000, min_free_disk_bytes=0))
    long = line("long", user="u" * 3000)
    found = api.run(GOOD, long, line("c"))["errors"]["data"]
    assert [(e["code"], e["line"]) for e in found] == [("invalid_json_line", 2)]
    found = api.run(*(line(str(i)) for i in range(4)))["errors"]["data"]
    assert [e["code"] for e in found] == ["too_many_tasks"]
    assert api.run(*(line(str(i)) for i in range(3)))["status"] == "completed"


def test_deep_and_strange_bodies_are_refused_line_by_line(shared: Api) -> None:
    """JSON that is too deep for a request and NUL inside a body are that line's 400."""
    body = '{"model": "tiny", "messages": [{"role": "user", "content": %s}]}'
    texts = ["[" * 300 + "]" * 300, '"a\\u0000b"']
    lines = [
        f'{{"custom_id": "{i}", "method": "POST", "url": "{CHAT}", "body": {body % text}}}'
        for i, text in enumerate(texts)
    ]
    batch = shared.run(*lines, GOOD)
    assert batch["status"] == "completed", batch["errors"]
    outputs, errors = shared.results(batch)
    assert [o["custom_id"] for o in outputs] == ["good"]
    assert [e["custom_id"] for e in errors] == ["0", "1"]
    assert {e["response"]["status_code"] for e in errors} == {400}


def test_bodies_of_nothing_but_faults_are_refused_line_by_line(shared: Api) -> None:
    """A line with a hundred thousand faults, or values, is one line of the error file, and is not run again."""
    bodies: list[dict[str, Any]] = [
        {"messages": [{}] * 100_000 + [1]},
        {"messages": [[]] * 400_000},
        {f"unknown_{i}": i for i in range(100_000)},
    ]
    batch = shared.run(*(line(str(i), **body) for i, body in enumerate(bodies)), GOOD)
    outputs, errors = shared.results(batch)
    assert [o["custom_id"] for o in outputs] == ["good"]
    assert [(e["custom_id"], e["response"]["status_code"]) for e in errors] == [("0", 400), ("1", 400), ("2", 400)]
    assert batch["request_counts"] == {"total": 4, "completed": 1, "failed": 3}


def test_a_missing_or_unsuitable_file_fails_the_batch_later(shared: Api) -> None:
    """POST answers `validating` even so."""
    for file_id, code in (("file-none", "file_not_found"), ("../../etc/passwd", "file_not_found")):
        reply = shared.harness.post(
            "/v1/batches", {"input_file_id": file_id, "endpoint": CHAT, "completion_window": "24h"}
        )
        assert reply.json()["status"] == "validating"
        batch = shared.wait(reply.json()["id"])
        assert batch["status"] == "failed"
        error = batch["errors"]["data"][0]
        assert (error["code"], error["param"]) == (code, "input_file_id")
    other = shared.upload(jsonl(GOOD), purpose="user_data").json()["id"]
    reply = shared.harness.post("/v1/batches", {"input_file_id": other, "endpoint": CHAT, "completion_window": "24h"})
    assert shared.wait(reply.json()["id"])["errors"]["data"][0]["code"] == "invalid_file_purpose"


BAD_REQUESTS = [
    ({"endpoint": "/v1/moderations"}, "endpoint", "unsupported_parameter"),
    ({"endpoint": "/v1/nothing"}, "endpoint", "invalid_value"),
    ({"endpoint": 5}, "endpoint", "invalid_type"),
    ({"completion_window": "1h"}, "completion_window", "invalid_value"),
    ({"input_file_id": "x" * 65}, "input_file_id", "invalid_value"),
    ({"metadata": {str(i): "v" for i in range(17)}}, "metadata", "invalid_value"),
    ({"metadata": {"k" * 65: "v"}}, None, None),
    ({"metadata": {"k": "v" * 513}}, "metadata.k", "invalid_value"),
    ({"metadata": {"k": 1}}, "metadata.k", "invalid_type"),
    ({"output_expires_after": {"anchor": "created_at", "seconds": 10}}, "output_expires_after.seconds", None),
    ({"output_expires_after": {"anchor": "now", "seconds": 3600}}, "output_expires_after.anchor", None),
    ({"surprise": 1}, "surprise", "unknown_parameter"),
]


@pytest.mark.parametrize(("change", "param", "code"), BAD_REQUESTS)
def test_a_bad_request_is_refused_at_once(shared: Api, change: Any, param: str | None, code: str | None) -> None:
    """What the body of `POST /v1/batches` itself gets wrong is a 400 that names the field."""
    body = {"input_file_id": "file-x", "endpoint": CHAT, "completion_window": "24h"} | change
    reply = shared.harness.post("/v1/batches", body)
    assert reply.status_code == 400, reply.text
    error = reply.json()["error"]
    if param is not None:
        assert error["param"] == param
    if code is not None:
        assert error["code"] == code


def test_unknown_batches_and_wrong_content_types(shared: Api) -> None:
    """404 and 415, in the usual form."""
    for reply in (shared.harness.get("/v1/batches/batch_none"), shared.harness.post("/v1/batches/none/cancel")):
        assert reply.status_code == 404
        assert reply.json()["error"]["code"] == "batch_not_found"
    reply = shared.harness.post("/v1/batches", data=b"a=b", headers={"content-type": "text/plain"})
    assert reply.status_code == 415


def test_listing_pages(api: Api) -> None:
    """Newest first, in pages, with a cursor; a wrong cursor is a 400."""
    ids = [api.start(line("a")) for _ in range(5)]
    for batch_id in ids:
        api.wait(batch_id)
    first = api.harness.get("/v1/batches", params={"limit": 2}).json()
    assert [b["id"] for b in first["data"]] == ids[:2:-1]
    assert (first["first_id"], first["last_id"], first["has_more"]) == (ids[4], ids[3], True)
    rest = api.harness.get("/v1/batches", params={"limit": 3, "after": ids[3]}).json()
    assert [b["id"] for b in rest["data"]] == ids[2::-1]
    assert rest["has_more"] is False
    for params in ({"limit": -1}, {"limit": 101}, {"after": "batch_none"}, {"limit": "x"}):
        assert api.harness.get("/v1/batches", params=params).status_code == 400


def test_cancelling_keeps_what_is_done(api: Api) -> None:
    """`cancelling`, then `cancelled`; every line is in one of the two files, once."""
    engine = api.harness.engine
    engine.delay_s = 0.02
    batch_id = api.start(*(line(str(i)) for i in range(300)))
    api.harness.eventually(lambda: api.batch(batch_id)["request_counts"]["completed"] > 0)
    reply = api.harness.post(f"/v1/batches/{batch_id}/cancel")
    assert reply.json()["status"] == "cancelling"
    assert reply.json()["cancelling_at"]
    batch = api.wait(batch_id)
    assert batch["status"] == "cancelled"
    assert batch["cancelled_at"] >= batch["cancelling_at"]
    outputs, errors = api.results(batch)
    assert 0 < len(outputs) == batch["request_counts"]["completed"]
    assert {e["error"]["code"] for e in errors} == {"batch_cancelled"}
    assert all(e["response"] is None for e in errors)
    assert sorted(int(x["custom_id"]) for x in outputs + errors) == list(range(300))
    api.harness.eventually(lambda: not engine.live)
    assert api.harness.state.num_live == 0
    again = api.harness.post(f"/v1/batches/{batch_id}/cancel")
    assert (again.status_code, again.json()["status"]) == (200, "cancelled")


def test_a_batch_that_has_ended_cannot_be_cancelled(shared: Api) -> None:
    """409 with the state it is in."""
    batch = shared.run(line("a"))
    reply = shared.harness.post(f"/v1/batches/{batch['id']}/cancel")
    assert reply.status_code == 409
    assert "completed" in reply.json()["error"]["message"]


def test_interactive_requests_go_first(make_harness: Callable[..., Any], tmp_path: Path) -> None:
    """Lines are in no hurry for the engine, which holds them back beside others; it gets as many as may run at once."""
    api = Api(make_harness(file_storage_path=tmp_path, max_batch_requests=16, min_free_disk_bytes=0))
    engine = api.harness.engine
    engine.hold.clear()
    batch_id = api.start(*(line(str(i)) for i in range(100)))
    api.harness.eventually(lambda: len(engine.live) == 16)
    body = {"model": "tiny", "messages": [{"role": "user", "content": "hi"}]}
    asking = threading.Thread(target=api.harness.post, args=("/v1/chat/completions", body))
    asking.start()
    api.harness.eventually(lambda: len(engine.live) == 17)
    assert sorted(submit.priority for submit in engine.submits) == [BACKGROUND] * 16 + [0]
    engine.hold.set()
    asking.join()
    assert api.wait(batch_id)["request_counts"]["completed"] == 100
