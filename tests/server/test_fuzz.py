"""Random requests: whatever is sent, nothing is a 5xx, and the next good request is answered as before."""

from __future__ import annotations

import json
from typing import Any

import pytest
from harness import Harness
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from dovetail_server.apis.chat.schema import ChatRequest
from dovetail_server.apis.completions.schema import CompletionRequest
from dovetail_server.apis.generate.schema import GenerateParams, GenerateRequest
from dovetail_server.apis.messages.schema import MessagesRequest
from dovetail_server.apis.responses.schema import ResponsesRequest

GOOD: dict[str, dict[str, Any]] = {
    "/v1/chat/completions": {"model": "tiny", "messages": [{"role": "user", "content": "hi"}]},
    "/v1/completions": {"model": "tiny", "prompt": "abc"},
    "/generate": {"text": "abc"},
    "/v1/responses": {"model": "tiny", "input": "hi", "store": False},
    "/v1/messages": {"model": "tiny", "messages": [{"role": "user", "content": "hi"}], "max_tokens": 50},
}
FIELDS = {
    "/v1/chat/completions": list(ChatRequest.model_fields),
    "/v1/completions": list(CompletionRequest.model_fields),
    "/generate": list(GenerateRequest.model_fields),
    "/v1/responses": list(ResponsesRequest.model_fields),
    "/v1/messages": list(MessagesRequest.model_fields),
}
scalars = (
    st.none()
    | st.booleans()
    | st.integers()
    | st.integers(-3, 300)
    | st.floats()
    | st.floats(0, 2)
    | st.text(max_size=20)
    | st.sampled_from(
        [
            "tiny",
            "auto",
            "none",
            "user",
            "function",
            "text",
            "message",
            "tool_use",
            "tool_result",
            "input_text",
            "assistant",
            "\ud800",
            "\0",
            "<think>",
            "#",
        ]
    )
)
WORDS = [
    "role",
    "content",
    "type",
    "text",
    "name",
    "input",
    "id",
    "output",
    "call_id",
    "format",
    "schema",
    "effort",
    "function",
    "parameters",
    "include_usage",
    "3",
    "enable_thinking",
]
names = st.text(max_size=8) | st.sampled_from([*WORDS, *GenerateParams.model_fields])
values = st.recursive(scalars, lambda inner: st.lists(inner, max_size=4) | st.dictionaries(names, inner, max_size=4))


def said(reply: dict[str, Any]) -> str:
    """Return what a reply says, under whichever name."""
    names = ("choices", "text", "content", "usage")
    return json.dumps([reply[name] for name in names if name in reply])


@pytest.mark.parametrize("path", list(GOOD))
def test_random_fields_never_break_the_server(thinking: Harness, path: str) -> None:
    """A good body with some fields replaced by anything is answered or refused, by the client's fault only."""
    thinking.engine.context_len = 512

    @settings(suppress_health_check=list(HealthCheck))
    @given(st.dictionaries(st.sampled_from(FIELDS[path]) | names, values, max_size=4), st.booleans())
    def try_one(changes: dict[str, Any], stream: bool) -> None:
        body = GOOD[path] | ({"stream": True} if stream else {}) | changes
        raw = json.dumps(body).encode()
        reply = thinking.post(path, data=raw, headers={"content-type": "application/json"})
        assert reply.status_code < 500, reply.text
        assert "event: error" not in reply.text
        if reply.status_code >= 400:
            known = {"message", "type"} if path == "/v1/messages" else {"message", "type", "param", "code"}
            # Refused threads carry details, by which Anthropic's client knows to send the whole conversation.
            assert set(reply.json()["error"]) - {"details"} == known

    before = thinking.post(path, GOOD[path]).json()
    try_one()
    after = thinking.post(path, GOOD[path]).json()
    assert said(after) == said(before)
    assert thinking.state.num_live == 0


def is_object(raw: bytes) -> bool:
    """Whether it is a JSON object; of `/v1/responses` an empty one is a request."""
    try:
        return isinstance(json.loads(raw), dict)
    except ValueError:
        return False


@settings(suppress_health_check=list(HealthCheck))
@given(raw=st.binary(max_size=200).filter(lambda raw: not is_object(raw)))
def test_random_bytes_are_refused(harness: Harness, raw: bytes) -> None:
    """A body that is no JSON object is a 400."""
    for path in GOOD:
        assert harness.post(path, data=raw, headers={"content-type": "application/json"}).status_code == 400
