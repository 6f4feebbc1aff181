"""Reading streams in tests."""

from __future__ import annotations

import json
import re
import socket
from typing import Any

import requests

Chunk = dict[str, Any]
NAMES = "msgbatch|conv|cmp|chatcmpl|cmpl|gen|resp|msg|rs|fco|fc|file|batch_req|batch|req|call"
SECRETS = [
    (re.compile(rf"\b({NAMES})[-_](?:[0-9a-f]{{24,}}[io][0-9a-f]{{4}}|[0-9a-f]{{24,}})"), r"<\1>"),
    (re.compile(r"\b[0-9a-f]{32,40}\b"), "<id>"),
    (re.compile(r"fp_dovetail_\w+"), "<fingerprint>"),
    (re.compile(r'("(?:created|\w+_at|e2e_latency)": ?)\d+(?:\.\d+)?'), r"\g<1>0"),
    (re.compile(r'("\w+_at": ?)"[^"]+Z"'), r'\g<1>"<time>"'),
    (re.compile(r"http://127\.0\.0\.1:\d+"), "<base>"),
]
"""What differs from reply to reply, and what stands in its place."""


def steady(text: str) -> str:
    """Return a reply's text without identifiers, times and addresses."""
    for pattern, name in SECRETS:
        text = pattern.sub(name, text)
    return text


def events(response: requests.Response) -> list[Chunk]:
    """Return the chunks of a finished stream, and check its framing."""
    assert response.status_code == 200, response.text
    assert response.headers["content-type"].startswith("text/event-stream")
    blocks = response.text.split("\n\n")
    assert blocks[-1] == ""
    assert blocks[-2] == "data: [DONE]"
    for block in blocks[:-2]:
        assert block.startswith("data: "), block
    return [json.loads(block[6:]) for block in blocks[:-2]]


def fold_chat(chunks: list[Chunk]) -> dict[int, dict[str, Any]]:
    """Put the choices of a chat stream together, checking the order of what arrives."""
    choices: dict[int, dict[str, Any]] = {}
    for chunk in chunks:
        for choice in chunk["choices"]:
            delta, index = choice["delta"], choice["index"]
            if index not in choices:
                assert delta == {"role": "assistant", "content": ""}
                choices[index] = {"content": "", "reasoning_content": "", "tool_calls": [], "finish_reason": None}
                continue
            found = choices[index]
            assert found["finish_reason"] is None, "a chunk after the finish chunk"
            found["content"] += delta.get("content", "")
            found["reasoning_content"] += delta.get("reasoning_content", "")
            assert delta.get("reasoning") == delta.get("reasoning_content")
            for call in delta.get("tool_calls", []):
                if "id" in call:
                    assert call["index"] == len(found["tool_calls"])
                    assert call["function"]["arguments"] == ""
                    found["tool_calls"].append(call)
                else:
                    found["tool_calls"][call["index"]]["function"]["arguments"] += call["function"]["arguments"]
            if choice["finish_reason"] is not None:
                assert delta == {}
                found["finish_reason"] = choice["finish_reason"]
                found["matched_stop"] = choice["matched_stop"]
    return choices


def error_of(response: requests.Response) -> dict[str, Any]:
    """Return the error of a reply, checking that the body has OpenAI's form and tells nothing internal."""
    body = response.json()
    assert set(body) == {"error"}
    error: dict[str, Any] = body["error"]
    assert set(error) == {"message", "type", "param", "code"}
    assert error["message"]
    assert "Traceback" not in response.text
    assert response.headers["x-request-id"]
    return error


def send_raw(harness: Any, path: str, body: dict[str, Any]) -> socket.socket:
    """Send a request and return the connection, for tests that close it early."""
    data = json.dumps(body).encode()
    head = (
        f"POST {path} HTTP/1.1\r\nhost: localhost\r\n"
        f"content-type: application/json\r\ncontent-length: {len(data)}\r\n\r\n"
    )
    client = socket.create_connection(("127.0.0.1", harness.port))
    client.sendall(head.encode() + data)
    return client
