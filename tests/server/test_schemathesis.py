"""Requests made from the OpenAPI document, good and bad ones, for every route: never a 5xx, and replies as documented.

`make test-all` looks longer.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import requests
import schemathesis
from harness import Harness
from hypothesis import HealthCheck, Phase, given, settings
from schemathesis import GenerationMode
from schemathesis.checks import not_a_server_error
from schemathesis.specs.openapi.checks import (
    content_type_conformance,
    response_schema_conformance,
    status_code_conformance,
)

from dovetail_server.start.app import create_app

CHECKS = [not_a_server_error, status_code_conformance, response_schema_conformance, content_type_conformance]
CHAT = {"model": "tiny", "messages": [{"role": "user", "content": "hi"}], "temperature": 0}


def routes() -> list[tuple[str, str]]:
    """Return path and method of every documented operation, without a server."""
    from dovetail_server.settings.serve import ServeSettings
    from dovetail_server.state import ServerState
    from dovetail_testing.scripted import ScriptedEngine

    engine = ScriptedEngine(lambda submit: [], eos=0, vocab_size=1)
    paths = create_app(ServerState(ServeSettings(), engine)).openapi()["paths"]
    return [(path, method) for path, methods in paths.items() for method in methods]


@pytest.fixture(scope="module")
def fuzzed(folder: Any, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Harness]:
    from dovetail_parsers.reasoning.think_tags import Qwen3Reasoning
    from dovetail_parsers.tools.hermes import HermesTools

    running = Harness(
        folder, reasoning=Qwen3Reasoning(), tools=HermesTools(), file_storage_path=tmp_path_factory.mktemp("fuzzed")
    )
    yield running
    running.close()


@pytest.fixture(scope="module")
def document(fuzzed: Harness) -> Any:
    return schemathesis.openapi.from_url(fuzzed.base + "/openapi.json")


# The server runs in threads of this process: what it draws from `random` meanwhile is taken for a strategy's.
@pytest.mark.filterwarnings("ignore:Do not use the `random` module inside strategies")
@pytest.mark.parametrize("mode", [GenerationMode.POSITIVE, GenerationMode.NEGATIVE], ids=["good", "bad"])
@pytest.mark.parametrize(("path", "method"), routes(), ids=lambda value: str(value))
def test_every_route(fuzzed: Harness, document: Any, path: str, method: str, mode: GenerationMode) -> None:
    """Whatever is sent, the reply is documented and no fault of the server; the next request is served as before."""
    operation = document[path][method]
    if mode is GenerationMode.NEGATIVE and not operation.body and not len(list(operation.iter_parameters())):
        pytest.skip("takes nothing that could be wrong")
    before = answer(fuzzed)

    @settings(
        max_examples=settings.default.max_examples // 8,
        suppress_health_check=list(HealthCheck),
        phases=[Phase.explicit, Phase.generate],
        database=None,
    )
    @given(case=operation.as_strategy(generation_mode=mode))
    def send(case: Any) -> None:
        reply = case.call()
        assert reply.status_code < 500, (reply.status_code, reply.text, case.as_curl_command())
        case.validate_response(reply, checks=CHECKS)
        assert "event: error" not in reply.text, case.as_curl_command()
        assert reply.headers["x-request-id"]

    send()
    assert answer(fuzzed) == before
    fuzzed.eventually(lambda: fuzzed.state.num_live == 0 and fuzzed.state.num_held_bytes == 0)


def answer(harness: Harness) -> Any:
    """Ask something whose answer never changes."""
    reply = requests.post(harness.base + "/v1/chat/completions", json=CHAT, timeout=60)
    return reply.status_code, reply.json()["choices"]
