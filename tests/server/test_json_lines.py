"""JSON lines stay lines for readers that end a line at more than a line feed."""

from __future__ import annotations

import json
import sys

import pytest
from exchanges import events
from harness import Harness

from dovetail.contracts.errors import RequestError
from dovetail_server.apis.messages.batches import result_of, unbegun_results
from dovetail_server.batches.result import encode, lost_line, refusal, result_line

ENDS = [line[-1] for line in "".join(map(chr, range(sys.maxunicode + 1))).splitlines(keepends=True)[:-1]]
"""All characters at which Python ends a line; JavaScript's are among them."""
TEXT = "".join(f"{end}é" for end in ENDS)


@pytest.mark.parametrize(
    "line",
    [
        result_line(f"id{TEXT}", 200, encode({"content": TEXT, TEXT: 1})),
        lost_line(TEXT, "code", TEXT),
        refusal(TEXT, RequestError(TEXT, param="messages")).text,
        result_of(refusal(TEXT, RequestError(TEXT, param="messages")).text),
        unbegun_results("cancelled", [encode({"custom_id": TEXT, "method": "POST", "url": "/", "body": {}})]),
    ],
    ids=["reply", "lost", "refusal", "refused message", "canceled message"],
)
def test_a_result_is_one_line(line: bytes) -> None:
    """A batch's output splits into its results however it is split, and every text comes back."""
    text = line.decode()
    assert {"\u0085", "\u2028", "\u2029"} < set(ENDS)
    assert [f"{part}\n" for part in text.splitlines()] == [text]
    assert TEXT in json.loads(text)["custom_id"]


def test_an_event_is_one_line(harness: Harness) -> None:
    """A stream splits into its events for clients that use `str.splitlines`."""
    ids = harness.tokenizer.encode(f"one{TEXT}two", add_special_tokens=False)
    harness.engine.script = lambda _: ids
    body = {"model": "tiny", "messages": [{"role": "user", "content": "hi"}], "stream": True}
    reply = harness.post("/v1/chat/completions", body)
    assert reply.content.decode().splitlines() == reply.content.decode().split("\n")[:-1]
    said = "".join(event["choices"][0]["delta"].get("content") or "" for event in events(reply) if event["choices"])
    assert said == f"one{TEXT}two"
