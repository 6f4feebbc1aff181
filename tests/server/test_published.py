"""The golden exchanges against the types that OpenAI and Anthropic publish with their clients, strictly."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from anthropic.types import Message, MessageTokensCount, RawMessageStreamEvent
from anthropic.types.messages import DeletedMessageBatch, MessageBatch
from anthropic.types.shared import ErrorResponse
from openai.types import Batch, Completion, FileDeleted, FileObject
from openai.types.chat import ChatCompletion, ChatCompletionChunk
from openai.types.responses import Response, ResponseItem, ResponseStreamEvent
from openai.types.shared import ErrorObject
from pydantic import BaseModel
from replies import strict

GOLDEN = Path(__file__).parent / "golden"
TYPES: dict[str, dict[str, Any]] = {
    "openai": {"chat.completion": ChatCompletion, "chat.completion.chunk": ChatCompletionChunk},
    "files": {"file": FileObject, "batch": Batch},
    "responses": {"response": Response},
    "messages": {},
}
TYPES["openai"]["text_completion"] = Completion
EXTRAS = {
    "ChatCompletionMessage": {"reasoning_content", "reasoning"},
    "ChoiceDelta": {"reasoning_content", "reasoning"},
    "Choice": {"matched_stop"},
    "CompletionChoice": {"matched_stop"},
    "CompletionUsage": {"reasoning_tokens"},
    "Response": {"store", "presence_penalty", "frequency_penalty"},
}
"""Fields of ours beyond the published ones."""
NULLS = {"completion echo", "completion stream"}
"""Where OpenAI itself sends nulls that its types do not have: the first prompt token's probability, no finish yet."""


def bodies(family: str) -> Iterator[tuple[str, int, Any]]:
    """Yield every reply on record, and every event of streams, with its exchange and status."""
    text = (GOLDEN / f"{family}.json").read_text("utf-8").replace("<time>", "2026-11-22T00:00:00Z")
    for name, exchange in json.loads(text).items():
        reply = exchange["reply"]
        if reply["type"] == "text/event-stream":
            for block in reply["body"]:
                data = block.split("\n")[-1].removeprefix("data: ")
                if data != "[DONE]":
                    yield name, reply["status"], json.loads(data)
        elif reply["type"] == "application/json" and isinstance(reply["body"], dict):
            yield name, reply["status"], reply["body"]


def type_of(family: str, status: int, body: dict[str, Any]) -> Any:
    """Return the published type of a reply."""
    if family == "messages":
        if "input_tokens" in body:
            return MessageTokensCount
        kinds = {"error": ErrorResponse, "message": Message, "message_batch": MessageBatch}
        kinds["message_batch_deleted"] = DeletedMessageBatch
        return None if body.get("type", "ping") == "ping" else kinds.get(body["type"], RawMessageStreamEvent)
    if status >= 400:
        return ErrorObject
    if family == "responses" and "sequence_number" in body:
        return ResponseStreamEvent
    if "deleted" in body:
        return FileDeleted if family == "files" else None
    return TYPES[family].get(body.get("object", ""))


def extras(value: Any) -> Iterator[tuple[str, str]]:
    """Yield the fields of a validated reply that its types do not have, with the name of their type."""
    if isinstance(value, BaseModel):
        for name in value.__pydantic_extra__ or {}:
            yield type(value).__name__, name
        for name in type(value).model_fields:
            yield from extras(getattr(value, name))
    elif isinstance(value, list):
        for item in value:
            yield from extras(item)


@pytest.mark.parametrize("family", TYPES)
def test_replies_have_the_published_types(family: str) -> None:
    """Every reply and event is valid as it stands, without conversions, and has no extra field but the known ones."""
    num = 0
    for name, status, body in bodies(family):
        given = body["error"] if family != "messages" and status >= 400 else body
        is_list = given.get("object") == "list"
        for row in given.get("data", []) if is_list else [given]:
            kind = ResponseItem if is_list and family == "responses" else type_of(family, status, row)
            if kind is None or name in NULLS:
                continue
            checked = strict(kind, row)
            num += 1
            for owner, extra in extras(checked):
                assert extra in EXTRAS.get(owner, ()), (name, owner, extra)
    assert num >= {"openai": 10, "files": 6, "responses": 20, "messages": 10}[family]


NULLABLE = {
    *("refusal", "content", "logprobs", "finish_reason", "usage", "matched_stop", "reasoning_content", "reasoning"),
    *("error", "incomplete_details", "instructions", "max_output_tokens", "max_tool_calls", "previous_response_id"),
    *("completed_at", "prompt_cache_key", "safety_identifier", "effort", "summary", "stop_reason", "stop_sequence"),
    *("stop_details", "container", "cache_creation", "inference_geo", "server_tool_use", "param", "code", "request_id"),
    *("token_logprobs[]", "top_logprobs[]", "top_logprobs", "description", "parameters", "metadata", "errors"),
}
"""What the published schemas allow to be null, what SGLang and vLLM send as null, and what clients read unasked."""
BATCH_NULLS = {"line", "response"}
"""A line of a batch's output has either a response or an error; the other is null in OpenAI's files."""
MESSAGE_BATCH_NULLS = {"archived_at", "cancel_initiated_at", "ended_at", "results_url"}
"""Anthropic's schema has these always, null until they are known."""


def nulls(value: Any, name: str = "") -> Iterator[str]:
    """Yield the names of fields that are null."""
    if value is None:
        yield name
    elif isinstance(value, dict):
        for key, item in value.items():
            yield from nulls(item, key)
    elif isinstance(value, list):
        for item in value:
            yield from nulls(item, f"{name}[]")


@pytest.mark.parametrize("family", TYPES)
def test_what_is_absent_is_left_out(family: str) -> None:
    """A reply has null only where its schema says so; `tool_calls: null` or `user: null` break typed clients."""
    more: dict[str, set[str]] = {"files": BATCH_NULLS, "messages": MESSAGE_BATCH_NULLS}
    allowed = NULLABLE | more.get(family, set())
    for exchange, _, body in bodies(family):
        found = {name for name in nulls(body) if name not in allowed}
        assert not found, (exchange, found)
