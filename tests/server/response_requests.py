"""Requests of `/v1/responses` for its tests, and what is looked for in their replies."""

from __future__ import annotations

from typing import Any

from exchanges import error_of
from harness import Harness
from replies import strict_response

TOOL = {
    "type": "function",
    "name": "get_weather",
    "description": "The weather of a city",
    "parameters": {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]},
}
CALL = '<tool_call>\n{"name": "get_weather", "arguments": {"city": "Paris"}}\n</tool_call>'
ALL = f"<think>\nWhere is it?\n</think>\n\nLet me look.\n{CALL}\n{CALL.replace('Paris', 'Rome')}"


def ask(harness: Harness, given: Any = "hi", **fields: Any) -> dict[str, Any]:
    reply = harness.post("/v1/responses", {"model": "tiny", "input": given, **fields})
    assert reply.status_code == 200, reply.text
    return strict_response(reply.json())


def refused(harness: Harness, status: int = 400, given: Any = "hi", **fields: Any) -> dict[str, Any]:
    reply = harness.post("/v1/responses", {"model": "tiny", "input": given, **fields})
    assert reply.status_code == status, reply.text
    return error_of(reply)


def prompt_of(harness: Harness) -> str:
    return harness.tokenizer.decode(harness.engine.submits[-1].prompt_ids, skip_special_tokens=False)
