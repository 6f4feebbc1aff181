"""`/v1/responses/compact` over a real HTTP server whose model says what it is told."""

from __future__ import annotations

from typing import Any

from exchanges import error_of
from harness import Harness
from replies import strict

from dovetail_server.apis.responses.items import unseal

ITEMS: list[dict[str, Any]] = [
    {"role": "user", "content": "First question"},
    {"role": "assistant", "content": "First answer"},
    {"type": "function_call", "call_id": "c1", "name": "look", "arguments": "{}"},
    {"type": "function_call_output", "call_id": "c1", "output": "found"},
    {"role": "user", "content": "Second question"},
]


def compact(harness: Harness, **fields: Any) -> dict[str, Any]:
    from openai.types.responses import CompactedResponse

    reply = harness.post("/v1/responses/compact", {"model": "tiny", **fields})
    assert reply.status_code == 200, reply.text
    found: dict[str, Any] = reply.json()
    strict(CompactedResponse, {**found, "output": found["output"][-1:]})
    return found


def prompt_of(harness: Harness) -> str:
    return harness.tokenizer.decode(harness.engine.submits[-1].prompt_ids, skip_special_tokens=False)


def test_users_messages_stay_and_the_rest_is_summed_up(harness: Harness) -> None:
    """The model sums up all of it; with what came back it goes on as if it had said the summary."""
    harness.text = "They asked and I looked."
    found = compact(harness, input=ITEMS, instructions="Be brief.")
    assert [item["type"] for item in found["output"]] == ["message", "message", "compaction"]
    assert [item["content"][0]["text"] for item in found["output"][:2]] == ["First question", "Second question"]
    assert found["usage"]["output_tokens"] > 0
    asked = prompt_of(harness)
    assert asked.startswith("<|im_start|>system\nBe brief.")
    assert "First answer" in asked
    assert "Summarize this conversation" in asked
    going = [*found["output"], {"role": "user", "content": "Third"}]
    assert harness.post("/v1/responses", {"input": going}).status_code == 200
    assert "Summary of the conversation so far:\nThey asked and I looked." in prompt_of(harness)
    assert "First answer" not in prompt_of(harness)


def test_a_stored_conversation_is_compacted_and_again(harness: Harness) -> None:
    """`previous_response_id` stands for the items; a summary goes into the next summary."""
    first = harness.post("/v1/responses", {"input": "Where is it?"}).json()["id"]
    harness.text = "One."
    found = compact(harness, previous_response_id=first)
    assert [item["type"] for item in found["output"]] == ["message", "compaction"]
    again = compact(harness, input=found["output"])
    assert [item["type"] for item in again["output"]] == ["message", "compaction"]
    assert "so far:\nOne." in prompt_of(harness)
    kept = harness.post("/v1/responses", {"input": again["output"]}).json()["id"]
    listed = harness.get(f"/v1/responses/{kept}/input_items").json()["data"]
    assert "compaction" in {item["type"] for item in listed}


def test_nothing_gives_an_empty_summary(harness: Harness) -> None:
    """Without a conversation there is nothing to ask the model."""
    before = len(harness.engine.submits)
    found = compact(harness)
    assert [item["type"] for item in found["output"]] == ["compaction"]
    assert unseal(found["output"][0]["encrypted_content"]).summary == ""
    assert found["usage"]["total_tokens"] == 0
    assert len(harness.engine.submits) == before
    going = [*found["output"], {"role": "user", "content": "Hi"}]
    assert harness.post("/v1/responses", {"input": going}).status_code == 200


def test_what_cannot_be_compacted_says_why(harness: Harness) -> None:
    """A summary that nobody wrote, one of another server, and a conversation beyond the context."""
    harness.text = "  "
    reply = harness.post("/v1/responses/compact", {"input": ITEMS})
    assert (reply.status_code, error_of(reply)["code"]) == (500, "no_summary")
    foreign = [{"type": "compaction", "encrypted_content": "gAAAA!"}]
    error = error_of(harness.post("/v1/responses/compact", {"input": foreign}))
    assert error["param"] == "input[0].encrypted_content"
    long = [{"role": "user", "content": "x" * 4000}]
    error = error_of(harness.post("/v1/responses/compact", {"input": long}))
    assert (error["param"], error["code"]) == ("input", "context_length_exceeded")
    assert error_of(harness.post("/v1/responses/compact", {"previous_response_id": "resp_1"}))["code"]
    assert error_of(harness.post("/v1/responses/compact", {"model": "x"}))["code"] == "model_not_found"
