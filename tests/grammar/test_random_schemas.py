"""Random schemas end to end: over HTTP, streamed and not, with thinking and without.

`DOVETAIL_RANDOM_SCHEMAS=500 pytest tests/grammar/test_random_schemas.py` runs as many as a release wants.
"""

from __future__ import annotations

import json
import os
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import jsonschema
import pytest
import requests
from served import Served

from dovetail_server.bench.grammar_schemas import schemas

NUM = int(os.environ.get("DOVETAIL_RANDOM_SCHEMAS", "12"))
ASK = [{"role": "user", "content": "Tell me about France as JSON."}]


def ask(served: Served, number: int, schema: Any, *, thinking: bool, stream: bool) -> tuple[str, dict[str, Any]]:
    """Return the content and the last choice of a reply."""
    body: dict[str, Any] = {
        "model": "dovetail-demo",
        "messages": ASK,
        "response_format": {"type": "json_schema", "json_schema": {"name": "x", "schema": schema}},
        "chat_template_kwargs": {"enable_thinking": thinking},
        "max_tokens": 400,
        "seed": number,
        "stream": stream,
    }
    if thinking and number % 3:
        body["thinking_budget"] = number % 40
    reply = requests.post(f"{served.base}/v1/chat/completions", json=body, timeout=300)
    assert reply.status_code == 200, reply.text
    if not stream:
        choice = reply.json()["choices"][0]
        return choice["message"]["content"] or "", choice
    lines = [line[6:] for line in reply.text.splitlines() if line.startswith("data: {")]
    chunks = [chunk["choices"][0] for line in lines if (chunk := json.loads(line))["choices"]]
    return "".join(chunk["delta"].get("content") or "" for chunk in chunks), chunks[-1]


@pytest.mark.first(1)
@pytest.mark.sampled
@pytest.mark.parametrize("stream", [False, True], ids=["full", "stream"])
@pytest.mark.parametrize("thinking", [False, True], ids=["direct", "thinking"])
def test_replies_to_random_schemas_are_valid_or_cut(served: Served, thinking: bool, stream: bool) -> None:
    """Each reply is JSON that conforms to its schema, or was cut off at its length; several come at a time."""
    made = schemas(-(-NUM // 4), seed=20 + thinking + 2 * stream, bounded=True)

    def one(number: int) -> tuple[str, dict[str, Any]]:
        return ask(served, number, made[number], thinking=thinking, stream=stream)

    with ThreadPoolExecutor(8) as pool:
        replies = list(pool.map(one, range(len(made))))
    num_valid = 0
    for schema, (text, choice) in zip(made, replies, strict=True):
        if choice["finish_reason"] == "length":
            continue
        assert choice["finish_reason"] == "stop"
        jsonschema.validate(json.loads(text), schema)
        assert choice["structured_output"]["valid"] is True
        num_valid += 1
    print(f"{num_valid} of {len(made)} valid, the others cut at their length")
    assert num_valid > len(made) // 2
