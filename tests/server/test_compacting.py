"""Conversations that are compacted on the way: `context_management` and `compaction_trigger` of `/v1/responses`."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import requests
from exchanges import error_of
from harness import Harness
from openai import OpenAI
from replies import response_events, strict_response
from websockets.sync.client import connect

from dovetail.messages import Finish, Submit
from dovetail_server.apis.responses.compaction import boundaries, plans_of
from dovetail_server.apis.responses.items import Sealed, seal, unseal

LONG = "The first topic was a long story about foxes and dogs. " * 20
OLD: list[dict[str, Any]] = [
    {"role": "developer", "content": "Stay calm."},
    {"role": "user", "content": LONG},
    {"role": "assistant", "content": "An old answer."},
    {"role": "user", "content": "A short wish"},
    {"type": "function_call", "call_id": "c1", "name": "look", "arguments": "{}"},
    {"type": "function_call_output", "call_id": "c1", "output": "found it " * 60},
]
NEW = {"role": "user", "content": "And now?"}
AT = [{"type": "compaction", "compact_threshold": 400}]
RESUME = "a-key-for-gateways-0123456789"


@pytest.fixture
def server(make_harness: Callable[..., Harness], tmp_path: Path) -> Harness:
    made = make_harness(
        context_len=8192, file_storage_path=tmp_path, min_free_disk_bytes=0, resume_key=RESUME, api_key=["k"]
    )
    made.http.headers["authorization"] = "Bearer k"
    return summing_up(made)


def summing_up(harness: Harness, summary: str = "Foxes. It was found.") -> Harness:
    """Have the engine tell whether it was asked for a summary."""

    def script(submit: Submit) -> list[int]:
        asks = "Summarize this conversation" in text_of(harness, submit)
        ids = harness.tokenizer.encode(summary if asks else harness.text, add_special_tokens=False)
        return ids[len(submit.output_ids) :]

    harness.engine.script = script
    return harness


def text_of(harness: Harness, submit: Submit) -> str:
    return harness.tokenizer.decode(submit.prompt_ids, skip_special_tokens=False)


def prompts(harness: Harness) -> list[str]:
    return [text_of(harness, submit) for submit in harness.engine.submits]


def timeless(event: bytes) -> bytes:
    return re.sub(rb'"completed_at":\d+', b"", event)


def ask(harness: Harness, given: Any, **fields: Any) -> dict[str, Any]:
    reply = harness.post("/v1/responses", {"model": "tiny", "input": given, **fields})
    assert reply.status_code == 200, reply.text
    return strict_response(reply.json())


def kinds(response: dict[str, Any]) -> list[str]:
    return [item["type"] for item in response["output"]]


def test_a_long_conversation_is_compacted_and_answered(server: Harness) -> None:
    """The model sums up the old part, and answers what is left; both count as usage."""
    found = ask(server, [*OLD, NEW], context_management=AT)
    assert kinds(found) == ["compaction", "message"]
    asked, answered = prompts(server)
    assert LONG.strip() in asked
    assert "found it" in asked
    assert "And now?" not in asked
    assert LONG[:40] not in answered
    assert "found it" not in answered
    order = ["Stay calm.", "A short wish", "so far:\nFoxes. It was found.", "And now?"]
    assert [answered.index(text) for text in order] == sorted(answered.index(text) for text in order)
    usage = found["usage"]
    assert usage["input_tokens"] == sum(len(submit.prompt_ids) for submit in server.engine.submits)
    assert usage["output_tokens"] > len(server.tokenizer.encode(server.text, add_special_tokens=False))
    assert usage["total_tokens"] == usage["input_tokens"] + usage["output_tokens"]


def test_what_comes_back_goes_on_from_the_summary(server: Harness) -> None:
    """With the items that it replaced or without them, stored or in a conversation, the model sees the same."""
    first = ask(server, [*OLD, NEW], context_management=AT)
    more = {"role": "user", "content": "Go on"}
    talk = server.post("/v1/conversations", {"items": OLD}).json()["id"]
    ask(server, [NEW], conversation=talk, context_management=AT)
    server.engine.submits.clear()
    ask(server, [*OLD, NEW, *first["output"], more])
    ask(server, [*first["output"], more])
    ask(server, [more], previous_response_id=first["id"])
    ask(server, [more], conversation=talk)
    assert len(set(prompts(server))) == 1
    [seen, *_] = prompts(server)
    assert "And now?" in seen
    assert server.text in seen
    assert LONG[:40] not in seen


def test_a_stream_tells_of_the_item_first(server: Harness) -> None:
    """It begins before the summary is written, and is there before the first word of the answer."""
    body = {"model": "tiny", "input": [*OLD, NEW], "context_management": AT}
    events = response_events(server.post("/v1/responses", {**body, "stream": True}))
    names = [event["type"].removeprefix("response.") for event in events]
    item = ["output_item.added", "compaction.compacting", "output_item.done", "output_item.added"]
    assert names[:6] == ["created", "in_progress", *item]
    assert (events[2]["item"]["encrypted_content"], events[4]["output_index"], events[5]["output_index"]) == ("", 0, 1)
    whole = ask(server, **{"given": body["input"], "context_management": AT})
    told, again = events[-1]["response"], whole
    assert [item["type"] for item in told["output"]] == kinds(again)
    contents = [unseal(one["output"][0]["encrypted_content"]) for one in (told, again)]
    assert contents[0].summary == contents[1].summary == "Foxes. It was found."
    assert told["usage"] == again["usage"]


def test_openais_client_compacts(server: Harness) -> None:
    """With its types: `create`, `stream`, and what it was given sent back."""
    client = OpenAI(base_url=f"{server.base}/v1", api_key="k")
    items: Any = [*OLD, NEW]
    limits: Any = AT
    made = client.responses.create(model="tiny", input=items, context_management=limits)
    with client.responses.stream(model="tiny", input=items, context_management=limits) as stream:
        streamed = stream.get_final_response()
    for found in (made, streamed):
        assert found.output[0].type == "compaction"
        assert found.output_text == server.text
        again = client.responses.create(model="tiny", input=[*items, *found.output, {"role": "user", "content": "x"}])
        assert again.output_text == server.text
    window = client.responses.compact(model="tiny", input=[*items, *made.output])
    assert window.output[-1].type == "compaction"
    sent: Any = [item.model_dump(exclude_none=True, warnings=False) for item in window.output]
    assert client.responses.create(model="tiny", input=[*sent, NEW]).output_text == server.text
    client.close()


def test_nothing_is_compacted_where_it_is_not_worth_it(server: Harness) -> None:
    """Below the threshold, and where one item alone is beyond it: the model has to read that one."""
    for given, at in ((OLD, 7000), ([{"role": "user", "content": LONG * 2}], 100), ([OLD[0], NEW], 1)):
        server.engine.submits.clear()
        limits = [{"type": "compaction", "compact_threshold": at}]
        assert kinds(ask(server, given, context_management=limits)) == ["message"]
        assert len(server.engine.submits) == 1
    big = {"role": "user", "content": "Look: " + LONG * 2}
    found = ask(server, [*OLD, big], context_management=AT)
    assert kinds(found) == ["compaction", "message"]
    assert big["content"].strip() in prompts(server)[-1]


def test_left_out_the_threshold_is_three_quarters_of_the_context(server: Harness) -> None:
    """And a prompt that no context holds is compacted, too, as far as the summary's own prompt fits."""
    half = [{"role": "user", "content": LONG * 4}, {"role": "assistant", "content": "Yes."}]
    assert kinds(ask(server, [*half, NEW], context_management=[{"type": "compaction"}])) == ["message"]
    assert kinds(ask(server, [*half, *half, NEW], context_management=[{"type": "compaction"}]))[0] == "compaction"
    third = {"role": "user", "content": "x " * 2500}
    refused = server.post("/v1/responses", {"input": [*half, third]})
    assert error_of(refused)["code"] == "context_length_exceeded"
    assert kinds(ask(server, [*half, third], context_management=[{"type": "compaction"}]))[0] == "compaction"


def test_an_agents_loop_is_cut_between_calls(server: Harness) -> None:
    """Its task stays, the last call and its result stay; the rest is summed up, again and again."""
    given: list[dict[str, Any]] = [{"role": "user", "content": "Mend the file"}]
    for at in range(12):
        call = {"type": "function_call", "call_id": f"c{at}", "name": "look", "arguments": json.dumps({"at": at})}
        given += [call, {"type": "function_call_output", "call_id": f"c{at}", "output": f"result {at} " * 30}]
        given += ask(server, given, context_management=AT)["output"]
        *_, answered = prompts(server)
        assert f"result {at} " in answered
        assert "Mend the file" in answered
    sealed = [unseal(item["encrypted_content"]) for item in given if item.get("type") == "compaction"]
    assert len(sealed) > 2
    for found in sealed:
        calls, results = (
            [item["call_id"] for item in found.after if item["type"] == kind]
            for kind in ("function_call", "function_call_output")
        )
        assert calls == results != []
    assert len(prompts(server)[-1]) < 3000


def test_a_summary_is_half_of_what_it_replaces(server: Harness) -> None:
    """A longer one is cut off there, and the model is told."""
    summing_up(server, "all of it " * 3000)
    found = ask(server, [*OLD, NEW], context_management=AT)
    first, second = server.engine.submits
    assert first.params.max_tokens < len(first.prompt_ids) // 2
    assert len(second.prompt_ids) < len(first.prompt_ids)
    assert "[The summary ended here, at its limit.]" in prompts(server)[-1]
    assert found["status"] == "completed"


def test_errors_of_the_summary_say_so(server: Harness) -> None:
    """No summary, an engine that gives up: over HTTP a status, in a stream its last event."""
    body = {"model": "tiny", "input": [*OLD, NEW], "context_management": AT}
    summing_up(server, "  ")
    error = error_of(server.post("/v1/responses", body))
    assert error["code"] == "no_summary"
    assert error["message"].startswith("compacting the conversation: ")
    events = response_events(server.post("/v1/responses", {**body, "stream": True}))
    assert events[-1]["response"]["status"] == "failed"
    assert "compacting the conversation" in events[-1]["response"]["error"]["message"]
    assert events[-1]["response"]["usage"]["input_tokens"] > 0
    server.engine.give_up = Finish(reason="abort", message="told to")
    text = "compacting the conversation: the engine gave the request up: told to"
    assert error_of(server.post("/v1/responses", body))["message"] == text


@pytest.mark.parametrize(
    "content",
    [
        "gAAAAABpM0Yj-token",
        "Zm9v",
        "dovetail-compaction-1.@@",
        "dovetail-compaction-1.Zm9v",
        seal(Sealed(summary="", before=[{"type": "compaction", "encrypted_content": "x"}])),
        seal(Sealed(summary="", after=[{"type": "item_reference", "id": "msg_1"}])),
        seal(Sealed(summary="", before=[{"type": "message", "role": "user", "content": [{"type": "input_file"}]}])),
        seal(Sealed(summary="", before=[{"type": "summary", "text": "x"}])),
        seal(Sealed(summary="", before=[{"role": 7}])),
    ],
)
def test_an_item_of_another_server_is_refused(server: Harness, content: str) -> None:
    """Also one that a client has made up, whose items could not have stood in an input."""
    for path in ("/v1/responses", "/v1/responses/compact", "/v1/responses/input_tokens"):
        reply = server.post(path, {"input": [{"type": "compaction", "encrypted_content": content}, NEW]})
        error = error_of(reply)
        assert (reply.status_code, error["param"]) == (400, "input[0].encrypted_content")
        assert "not written by this server" in error["message"]


def test_a_trigger_compacts_and_does_not_answer(server: Harness) -> None:
    """As Codex sends it, with its tools; it keeps what the user said and puts the item behind."""
    tools = [{"type": "function", "name": "look", "parameters": {}}, {"type": "web_search"}]
    asked = {"tools": tools, "stream": True, "store": False, "include": ["reasoning.encrypted_content"]}
    body = {"model": "tiny", "input": [*OLD, {"type": "compaction_trigger"}], **asked}
    events = response_events(server.post("/v1/responses", body))
    [item] = [event["item"] for event in events if event["type"] == "response.output_item.done"]
    assert item["type"] == "compaction"
    assert events[-1]["response"]["output"] == [item]
    assert not unseal(item["encrypted_content"]).replaces
    ask(server, [OLD[1], OLD[3], item, NEW])
    seen = prompts(server)[-1]
    assert LONG.strip() in seen
    assert "A short wish" in seen
    assert "found it" not in seen
    first = ask(server, [*OLD, {"type": "compaction_trigger"}])
    ask(server, [NEW], previous_response_id=first["id"])
    assert "An old answer" not in prompts(server)[-1]
    assert "Stay calm." in prompts(server)[-1]
    ask(server, [*OLD, {"type": "compaction_trigger"}, *first["output"], NEW])
    assert len(set(prompts(server)[-2:])) == 1
    error = error_of(server.post("/v1/responses", {"input": [{"type": "compaction_trigger"}, NEW]}))
    assert (error["param"], error["code"]) == ("input[0]", "invalid_value")
    assert error_of(server.post("/v1/responses", {"input": [{"type": "compaction_trigger"}]}))["param"] == "input"


def test_the_endpoint_takes_what_codex_sends(server: Harness) -> None:
    """Tools, reasoning and text of its requests; a conversation; nothing is stored."""
    codex = {
        "tools": [{"type": "local_shell"}], "parallel_tool_calls": True, "reasoning": {"effort": "high"},
        "text": {"verbosity": "low"}, "prompt_cache_key": "k", "service_tier": "auto", "instructions": "Code.",
    }  # fmt: skip
    found = server.post("/v1/responses/compact", {"model": "tiny", "input": OLD, **codex, "store": False}).json()
    assert [item.get("role", item["type"]) for item in found["output"]] == ["developer", "user", "user", "compaction"]
    talk = server.post("/v1/conversations", {"items": OLD}).json()["id"]
    same = server.post("/v1/responses/compact", {"conversation": talk}).json()
    assert same["output"][-1]["encrypted_content"] == found["output"][-1]["encrypted_content"]
    assert len(server.get(f"/v1/conversations/{talk}/items").json()["data"]) == len(OLD)
    assert error_of(server.post("/v1/responses/compact", {"input": OLD, "store": True}))["param"] == "store"


def test_what_was_compacted_does_not_come_back(server: Harness) -> None:
    """Compacted again in another way: of what an item replaced only what it holds stays, once."""
    first = ask(server, [*OLD, NEW], context_management=AT)
    items = [*OLD, NEW, *first["output"]]
    found = server.post("/v1/responses/compact", {"input": items}).json()["output"]
    assert [item.get("role", item["type"]) for item in found] == ["developer", "user", "user", "compaction"]
    assert [part["text"] for item in found[1:3] for part in item["content"]] == ["A short wish", "And now?"]
    ask(server, [*items, {"type": "compaction_trigger"}])
    again = ask(server, [*items, {"type": "compaction_trigger"}])["output"]
    server.engine.submits.clear()
    ask(server, [*items, *again, {"role": "user", "content": "x"}])
    ask(server, [*found, {"role": "user", "content": "x"}])
    assert len(set(prompts(server))) == 1
    assert LONG[:40] not in prompts(server)[0]


def test_in_the_background_and_over_a_websocket(server: Harness) -> None:
    """A background response is queued at once; a connection goes on with what it has not stored."""
    server.loop.call_soon_threadsafe(server.engine.hold.clear)
    server.eventually(lambda: not server.engine.hold.is_set())
    begun = ask(server, [*OLD, NEW], context_management=AT, background=True)
    assert (begun["status"], begun["output"]) == ("queued", [])
    server.loop.call_soon_threadsafe(server.engine.hold.set)
    path = f"/v1/responses/{begun['id']}"
    server.eventually(lambda: server.get(path).json()["status"] == "completed")
    assert kinds(server.get(path).json()) == ["compaction", "message"]
    headers = {"authorization": "Bearer k"}
    with connect(f"ws://127.0.0.1:{server.port}/v1/responses", additional_headers=headers) as link:
        sent = {"type": "response.create", "model": "tiny", "store": False, "context_management": AT}
        for given in ([*OLD, NEW], [{"role": "user", "content": "More"}]):
            link.send(json.dumps({**sent, "input": given}))
            while (event := json.loads(link.recv(timeout=60)))["type"] != "response.completed":
                assert event["type"] != "error", event
            sent["previous_response_id"] = event["response"]["id"]
    assert "And now?" in prompts(server)[-1]
    assert LONG[:40] not in prompts(server)[-1]


def test_a_large_rest_is_read_elsewhere(make_harness: Callable[..., Harness]) -> None:
    """What stays may be as large as a body: it goes through the processes that read those."""
    server = summing_up(make_harness(context_len=1 << 18))
    blob = "".join(f"{at:x} " for at in range(1500)) + " " * 80_000
    found = ask(server, [*OLD, {"role": "user", "content": blob}], context_management=AT)
    assert kinds(found) == ["compaction", "message"]
    assert "5da 5db" in prompts(server)[-1]
    assert LONG[:40] not in prompts(server)[-1]


@pytest.mark.parametrize("share", [0.1, 0.5, 0.8])
def test_another_server_goes_on_with_the_stream(
    server: Harness, make_harness: Callable[..., Harness], share: float
) -> None:
    """Wherever it was cut, in the summary or in the answer, the client gets the same events, each once."""
    server.text, summary = "one two three four five six", "seven eight nine ten"
    summing_up(server, summary)
    body = {"model": "tiny", "input": [*OLD, NEW], "context_management": AT, "stream": True, "store": False}
    key = {"x-dovetail-resume-key": RESUME}
    whole = server.post("/v1/responses", body, headers=key)
    pieces = whole.content.split(b"\n\n")[:-1]
    cut = int(len(pieces) * share)
    lines = [piece for piece in pieces[:cut] if piece.startswith(b":")]
    events = [piece for piece in pieces if not piece.startswith(b":")]
    skip = sum(not piece.startswith(b":") for piece in pieces[:cut])
    other = make_harness(context_len=8192, resume_key=RESUME)
    other.text = server.text
    summing_up(other, summary)
    head = {"path": "/v1/responses", "journal": whole.headers["x-dovetail-journal"], "skip": skip}
    head["deltas"] = [json.loads(line.removeprefix(b": dovetail ")) for line in lines]
    sent = json.dumps(head).encode() + b"\n" + json.dumps(body).encode()
    again = requests.post(f"{other.base}/v1/resume", data=sent, headers={**key, "content-type": "application/json"})
    left = [piece for piece in again.content.split(b"\n\n")[:-1] if not piece.startswith(b":")]
    assert [timeless(event) for event in left] == [timeless(event) for event in events[skip:]]
    asked = other.engine.submits[-1]
    assert (asked.seed if hasattr(asked, "seed") else asked.params.seed) == server.engine.submits[-1].params.seed


def test_a_call_is_never_parted_from_its_result() -> None:
    """Also where calls of a turn are answered late, out of order, or never."""

    def call(name: str) -> dict[str, Any]:
        return {"type": "function_call", "call_id": name, "name": "f", "arguments": "{}"}

    def result(name: str) -> dict[str, Any]:
        return {"type": "function_call_output", "call_id": name, "output": "x"}

    user = {"type": "message", "role": "user", "content": [{"type": "input_text", "text": "y" * 4000}]}
    thought = {"type": "reasoning", "summary": [], "content": None}
    items = [user, thought, call("a"), call("b"), result("b"), user, result("a"), thought, call("c"), user, call("d")]
    assert boundaries(items) == [1, 7, 9, 10]
    found = list(plans_of(items, 4000, 3000, 0))
    assert len(found) > 2
    for old, plan in found:
        calls = [{one["call_id"] for one in side if "call_id" in one} for side in (old, plan.after)]
        assert calls[0].isdisjoint(calls[1])
