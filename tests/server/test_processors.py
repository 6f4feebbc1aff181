"""The field `logits_processors` over HTTP: what reaches the engine, and what is refused."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from dovetail.demo import MODEL_DIR
from dovetail.plugins import Registry, make_plan
from dovetail_server.testing import ScriptedServer

MESSAGES = [{"role": "user", "content": "hi"}]
PATHS: dict[str, dict[str, Any]] = {
    "/v1/chat/completions": {"model": "scripted", "messages": MESSAGES},
    "/v1/completions": {"model": "scripted", "prompt": "hi"},
}
ASKED = {"no_repeat_ngram": {"size": 3}}
COMPLETE = {"no-repeat-ngram": {"size": 3, "prompt": True}}


@pytest.fixture(scope="module")
def server() -> Iterator[ScriptedServer]:
    """One that serves the built-in processor."""
    plan = make_plan(Registry.scan(), logits_processor=["no-repeat-ngram"])
    made = ScriptedServer(MODEL_DIR, plan, reply="Fine.")
    yield made
    made.close()


@pytest.mark.parametrize("path", PATHS)
def test_what_a_request_asks_for_reaches_the_engine(path: str, server: ScriptedServer) -> None:
    """By its own name and complete, for every choice; a body that another process reads is no different."""
    for more in ({}, {"user": "x" * 500, "logit_bias": {str(i): 1.23456789 for i in range(4000)}}):
        server.engine.submits.clear()
        status, reply = server.post(path, {**PATHS[path], "n": 2, "logits_processors": ASKED, **more})
        assert status == 200, reply
        assert [submit.params.processors for submit in server.engine.submits] == [COMPLETE] * 2


def test_the_native_route_has_it_too(server: ScriptedServer) -> None:
    """Among its `sampling_params`."""
    server.engine.submits.clear()
    body = {"text": "hi", "sampling_params": {"max_new_tokens": 4, "logits_processors": ASKED}}
    status, reply = server.post("/generate", body)
    assert status == 200, reply
    assert [submit.params.processors for submit in server.engine.submits] == [COMPLETE]


WRONG: dict[str, tuple[Any, str]] = {
    "no object": (["no-repeat-ngram"], "dict"),
    "no parameters": ({"no-repeat-ngram": None}, "dict"),
    "unknown": ({"quiet": {}}, "'quiet' is no logits processor of this server; served: no-repeat-ngram"),
    "unknown parameter": ({"no-repeat-ngram": {"size": 2, "by": 1}}, "'by' is unknown; possible: size, prompt"),
    "out of bounds": ({"no-repeat-ngram": {"size": 10**30}}, "size: should be less than or equal to 16"),
    "of a wrong type": ({"no-repeat-ngram": {"size": [[[2]]]}}, "size: should be a valid integer"),
}


@pytest.mark.parametrize("case", WRONG)
def test_what_is_wrong_is_refused_with_its_name(case: str, server: ScriptedServer) -> None:
    """A 400 that names the field, the processor and what is possible."""
    given, why = WRONG[case]
    for path, body in PATHS.items():
        status, reply = server.post(path, {**body, "logits_processors": given})
        assert status == 400, reply
        assert why in reply["error"]["message"] or "dict" in why
        assert reply["error"]["param"].startswith("logits_processors")
