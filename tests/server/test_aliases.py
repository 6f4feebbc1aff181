"""Names of other models that clients have built in: they mean the served one, on the routes of those clients."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import pytest
from harness import Harness
from pydantic import ValidationError

from dovetail.contracts.errors import RequestError
from dovetail_server.reading.wire import LARGE
from dovetail_server.serving.served import Served
from dovetail_server.settings.serve import ServeSettings

USER = [{"role": "user", "content": "hi"}]
LONG = [{"role": "user", "content": "x" * LARGE}]
CLAUDE, GPT = "claude-opus-9-9[1m]", "gpt-9-codex"
BODIES: dict[str, dict[str, Any]] = {
    "/v1/messages": {"messages": USER, "max_tokens": 5},
    "/v1/messages/count_tokens": {"messages": USER},
    "/v1/chat/completions": {"messages": USER, "max_tokens": 5},
    "/v1/completions": {"prompt": "hi", "max_tokens": 5},
    "/v1/responses": {"input": "hi", "max_output_tokens": 16},
    "/v1/responses/input_tokens": {"input": "hi"},
    "/tokenize": {"prompt": "hi"},
}


@pytest.mark.parametrize("path", BODIES)
def test_a_built_in_name_means_the_served_model_on_its_own_routes(harness: Harness, path: str) -> None:
    """`claude-*` on Messages and `gpt-*` on OpenAI's routes: the reply names what served; crossed over it is a 404."""
    mine, other = (CLAUDE, GPT) if path.startswith("/v1/messages") else (GPT, CLAUDE)
    reply = harness.post(path, {**BODIES[path], "model": mine})
    assert reply.status_code == 200, reply.text
    assert reply.json().get("model", "tiny") == "tiny"
    refused = harness.post(path, {**BODIES[path], "model": other})
    assert refused.status_code == 404, refused.text
    assert f"the model '{other}' does not exist here; served: tiny, tiny-too" in refused.json()["error"]["message"]


def test_a_stream_names_what_served(harness: Harness) -> None:
    """In every chunk."""
    body = {**BODIES["/v1/chat/completions"], "model": GPT, "stream": True}
    lines = harness.post("/v1/chat/completions", body).text.splitlines()
    chunks = [json.loads(line[6:]) for line in lines if line.startswith("data: {")]
    assert {chunk["model"] for chunk in chunks} == {"tiny"}


@pytest.mark.parametrize("path", ["/v1/messages", "/v1/chat/completions", "/v1/messages/count_tokens"])
def test_a_large_body_that_another_process_reads_is_no_different(
    make_harness: Callable[..., Harness], path: str
) -> None:
    """The process has the patterns, and the route's own only."""
    harness = make_harness(context_len=1 << 18, body_processes=1)
    mine, other = (CLAUDE, GPT) if path.startswith("/v1/messages") else (GPT, CLAUDE)
    for name, status in ((mine, 200), (other, 404)):
        reply = harness.post(path, {**BODIES[path], "messages": LONG, "model": name})
        assert reply.status_code == status, reply.text


def test_aliases_are_the_operators_to_choose(make_harness: Callable[..., Harness]) -> None:
    """A pattern without an API holds everywhere; `[]` leaves the served names alone."""
    harness = make_harness(model_aliases=["o?-mini"])
    for path in ("/v1/messages", "/v1/chat/completions"):
        assert harness.post(path, {**BODIES[path], "model": "o4-mini"}).json()["model"] == "tiny"
        assert harness.post(path, {**BODIES[path], "model": GPT}).status_code == 404
        assert harness.post(path, {**BODIES[path], "model": CLAUDE}).status_code == 404
    none = make_harness(model_aliases=[])
    assert none.post("/v1/messages", {**BODIES["/v1/messages"], "model": CLAUDE}).status_code == 404


def test_a_served_name_comes_before_an_alias() -> None:
    """A model that is served under such a name answers under it."""
    served = Served(["mine", "gpt-oss"], ["openai=gpt-*"])
    assert [served.name(name) for name in (None, "default", "gpt-oss", "gpt-5")] == ["mine", "mine", "gpt-oss", "mine"]
    with pytest.raises(RequestError, match="served: mine, gpt-oss"):
        served.name("gpt-5", "messages")


@pytest.mark.parametrize("given", ["antropic=claude-*", "openai=", "=x", '{"a":"b"}', {"gpt-4": "mine"}])
def test_a_mistyped_alias_stops_the_start(given: Any) -> None:
    """With what is possible."""
    with pytest.raises(ValidationError, match=r"API of: openai, anthropic, sglang"):
        ServeSettings(model_aliases=[given])
