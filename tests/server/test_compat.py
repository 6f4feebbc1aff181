"""What SGLang and vLLM know: every name of theirs is implemented, means nothing at a named value, or is refused for a
reason. The lists are in `compat/`, with version and date."""

from __future__ import annotations

import re
import tomllib
from pathlib import Path
from typing import Any

import pytest
from exchanges import error_of
from harness import Harness

from dovetail_server.apis.chat.schema import ChatRequest
from dovetail_server.apis.completions.schema import CompletionRequest
from dovetail_server.apis.embeddings.schema import EmbeddingRequest
from dovetail_server.apis.generate.schema import GenerateParams, GenerateRequest
from dovetail_server.apis.messages.schema import MessagesRequest
from dovetail_server.apis.responses.schema import ResponsesRequest
from dovetail_server.apis.score.schema import ScoreRequest
from dovetail_server.apis.tokens.schema import DetokenizeRequest, TokenizeRequest
from dovetail_server.compat import endpoints
from dovetail_server.compat.known import FIELDS
from dovetail_server.schema.common import RequestModel, StreamOptions

PEERS = {
    name: tomllib.loads((Path(__file__).parent / "compat" / f"{name}.toml").read_text()) for name in ("sglang", "vllm")
}
BODIES: dict[str, type[RequestModel]] = {
    "chat": ChatRequest,
    "completions": CompletionRequest,
    "detokenize": DetokenizeRequest,
    "embeddings": EmbeddingRequest,
    "generate": GenerateRequest,
    "messages": MessagesRequest,
    "responses": ResponsesRequest,
    "sampling_params": GenerateParams,
    "score": ScoreRequest,
    "stream_options": StreamOptions,
    "tokenize": TokenizeRequest,
}
CHAT = {"model": "tiny", "messages": [{"role": "user", "content": "hi"}]}


@pytest.mark.parametrize("peer", PEERS)
def test_every_field_of_a_peer_is_known(peer: str) -> None:
    """A field is one of ours, or in the table."""
    listed = PEERS[peer]["fields"]
    missing = [
        f"{route}.{name}"
        for route, names in listed.items()
        for name in names
        if route in BODIES and name not in BODIES[route].model_fields and name not in FIELDS
    ]
    assert missing == []


def test_the_table_has_no_name_that_every_route_implements() -> None:
    """What a schema gains on the routes where peers have it leaves the table."""
    routes: dict[str, set[str]] = {}
    for peer in PEERS.values():
        for route, names in peer["fields"].items():
            for name in names:
                routes.setdefault(name, set()).add(route)
    done = [n for n in FIELDS if n in routes and all(r in BODIES and n in BODIES[r].model_fields for r in routes[n])]
    assert done == []


GATEWAY_CHAT = {
    "return_hidden_states": False, "no_stop_trim": False, "ignore_eos": False, "continue_final_message": False,
    "skip_special_tokens": True, "separate_reasoning": True, "stream_reasoning": True, "include_reasoning": True,
    "logprobs": False, "lora_path": None, "session_params": None,
}  # fmt: skip
GATEWAY_GENERATE = {
    "model": "unknown", "log_metrics": True, "background": False, "no_logs": False, "return_bytes": False,
    "return_entropy": False, "return_hidden_states": False,
}  # fmt: skip


def test_what_gateways_add_to_bodies_is_let_through(harness: Harness) -> None:
    """sglang-router, vllm-router and smg write their own optional fields into every body."""
    assert harness.post("/v1/chat/completions", {**CHAT, **GATEWAY_CHAT}).status_code == 200
    completion = {"model": "tiny", "prompt": "hi", "return_hidden_states": False, "no_stop_trim": False}
    assert harness.post("/v1/completions", completion).status_code == 200
    assert harness.post("/generate", {"text": "hi", **GATEWAY_GENERATE}).status_code == 200


REFUSED: list[tuple[str, dict[str, Any], str, str]] = [
    ("/v1/chat/completions", {**CHAT, "return_hidden_states": True}, "return_hidden_states", "text, token ids"),
    ("/v1/chat/completions", {**CHAT, "use_beam_search": True}, "use_beam_search", "best_of"),
    ("/v1/chat/completions", {**CHAT, "data_parallel_rank": 1}, "data_parallel_rank", "the server chooses the engine"),
    ("/v1/chat/completions", {**CHAT, "custom_logit_processor": "x"}, "custom_logit_processor", "never run"),
    ("/generate", {"text": "hi", "video_data": ["x"]}, "video_data", "reads text and images"),
    (
        "/v1/chat/completions",
        {**CHAT, "mm_processor_kwargs": {"a": 1}},
        "mm_processor_kwargs",
        "model's folder",
    ),
    ("/generate", {"text": "hi", "sampling_params": {"beam_width": 4}}, "sampling_params.beam_width", "best_of"),
]


@pytest.mark.parametrize(("path", "body", "param", "part"), REFUSED)
def test_a_peers_field_that_would_change_the_reply_is_refused_with_the_reason(
    harness: Harness, path: str, body: dict[str, Any], param: str, part: str
) -> None:
    """The error names the field and says why, and guesses no other name."""
    reply = harness.post(path, body)
    error = error_of(reply)
    assert (reply.status_code, error["param"], error["code"]) == (400, param, "unsupported_parameter")
    assert part in error["message"]
    assert "did you mean" not in error["message"]


def test_a_field_that_nobody_knows_gets_the_nearest_name(harness: Harness) -> None:
    """A slip of the pen is told from a peer's field."""
    error = error_of(harness.post("/v1/chat/completions", {**CHAT, "temprature": 1}))
    assert (error["code"], error["param"]) == ("unknown_parameter", "temprature")
    assert "did you mean 'temperature'" in error["message"]


@pytest.mark.parametrize("peer", PEERS)
def test_every_endpoint_of_a_peer_is_known(harness: Harness, peer: str) -> None:
    """A path is served, or in the table; none is both."""
    served = {"/", "/docs", "/loads"} | {
        re.sub(r"{[^}]*}", "{}", path) for path in harness.get("/openapi.json").json()["paths"]
    }
    listed = {re.sub(r"{[^}]*}", "{}", path) for path in PEERS[peer]["endpoints"]}
    assert sorted(path for path in listed if path not in served and path not in endpoints.PATHS) == []
    assert served & set(endpoints.PATHS) <= set()


def test_a_route_of_a_peer_that_is_not_served_says_why(harness: Harness) -> None:
    """A 404 with the reason, also where a path of ours looks the same."""
    for path, part in {
        "/v1/audio/transcriptions": "text only",
        "/update_weights_from_disk": "restart",
        "/dumper/x": "GET /metrics",
        "/v1/chat/completions/batch": "several requests",
    }.items():
        reply = harness.post(path, {})
        body = reply.json()["error"]
        assert (reply.status_code, part in body["message"]) == (404, True), (path, reply.text)
    assert error_of(harness.post("/v1/nothing", {}))["code"] == "not_found"
