"""Reading replies of the Responses and Messages APIs in tests, strictly by the types that their clients publish."""

from __future__ import annotations

import json
from functools import cache
from typing import Any

import requests
from pydantic import TypeAdapter

Event = dict[str, Any]
RESPONSE_KEYS = {
    *("id", "object", "created_at", "status", "error", "incomplete_details", "instructions", "metadata", "model"),
    *("output", "parallel_tool_calls", "temperature", "tool_choice", "tools", "top_p", "usage", "max_output_tokens"),
    *("previous_response_id", "reasoning", "text", "truncation", "background", "store", "service_tier"),
    *("presence_penalty", "frequency_penalty"),
    *("completed_at", "max_tool_calls", "prompt_cache_key", "safety_identifier", "top_logprobs"),
}


@cache
def adapter(kind: Any) -> TypeAdapter[Any]:
    """Return what validates a type; making one takes a second for the largest."""
    return TypeAdapter(kind)


def strict(kind: Any, body: Any) -> Any:
    """Validate a body as it stands, without conversions."""
    return adapter(kind).validate_json(json.dumps(body), strict=True)


def strict_response(body: Any) -> Event:
    """Check a response by OpenAI's types, and that all its keys are there."""
    from openai.types.responses import Response

    checked = strict(Response, body)
    assert set(body) >= RESPONSE_KEYS
    assert not (checked.__pydantic_extra__ or {}).keys() - {
        "store",
        "structured_output",
        "presence_penalty",
        "frequency_penalty",
        "dovetail",
    }
    found: Event = body
    return found


def response_events(reply: requests.Response) -> list[Event]:
    """Return the events of a finished stream, each checked by OpenAI's types, in an unbroken order."""
    from openai.types.responses import ResponseStreamEvent

    found = sse(reply)
    for number, event in enumerate(found):
        strict(ResponseStreamEvent, event)
        assert event["sequence_number"] == number
    assert found[0]["type"] == "response.created"
    assert found[-1]["type"] in ("response.completed", "response.incomplete", "response.failed")
    strict_response(found[-1]["response"])
    return found


def message_events(reply: requests.Response) -> list[Event]:
    """Return the events of a finished stream of messages, each checked by Anthropic's types."""
    from anthropic.types import RawMessageStreamEvent

    found = sse(reply)
    for event in found:
        if event["type"] not in ("ping", "error"):
            strict(RawMessageStreamEvent, event)
    assert found[0]["type"] == "message_start"
    assert [event["type"] for event in found].count("message_start") == 1
    return found


def sse(reply: requests.Response) -> list[Event]:
    """Return the data of a stream whose events are named after their type."""
    assert reply.status_code == 200, reply.text
    assert reply.headers["content-type"].startswith("text/event-stream")
    blocks = reply.text.split("\n\n")
    assert blocks[-1] == ""
    found = []
    for block in blocks[:-1]:
        if block.startswith(":"):
            continue
        name, data = block.split("\n")
        event = json.loads(data.removeprefix("data: "))
        assert name == f"event: {event['type']}"
        found.append(event)
    return found


def fold_response(events: list[Event]) -> list[Event]:
    """Put the output of a stream together from its deltas alone."""
    items: list[Event] = []
    for event in events:
        kind = event["type"].removeprefix("response.")
        if kind == "output_item.added":
            assert event["output_index"] == len(items)
            items.append({"type": event["item"]["type"], "text": "", "name": event["item"].get("name")})
        elif kind.endswith(".delta"):
            items[event["output_index"]]["text"] += event["delta"]
        elif kind in ("output_text.done", "reasoning_text.done", "reasoning_summary_text.done"):
            assert items[event["output_index"]]["text"] == event["text"]
        elif kind == "function_call_arguments.done":
            assert items[event["output_index"]]["text"] == event["arguments"]
    return items


def text_of(item: Event) -> str:
    """Return what an output item of a full response says."""
    if item["type"] == "function_call":
        return str(item["arguments"])
    parts = item["content"] or item["summary"]
    return "".join(part["text"] for part in parts)
