"""What is logged of requests: never a key, however a client sends it; and how much is logged."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from harness import Harness

from dovetail.contracts.errors import EngineError
from dovetail.plugins import Registry, make_plan
from dovetail_server.observe.logs import SHOWN, without_secrets
from dovetail_server.settings.serve import ServeSettings
from dovetail_server.start.run import make_engine
from dovetail_server.supervision.engine_process import ProcessClient


@pytest.mark.parametrize(
    ("target", "logged"),
    [
        ("/v1/models", "/v1/models"),
        ("/v1/files?limit=5&after=file-1", "/v1/files?limit=5&after=file-1"),
        ("/v1/models?api_key=sk-1", "/v1/models?api_key=***"),
        ("/v1/files?limit=5&token=sk-1&order=asc", "/v1/files?limit=5&token=***&order=asc"),
        ("/?key=sk-1&API-KEY=sk-1&access_token=sk-1&sig=sk-1", "/?key=***&API-KEY=***&access_token=***&sig=***"),
        ("/?%61pi_key=sk-1", "/?%61pi_key=***"),
        ("/?sk-1", "/?***"),
        ("/?sk-1&limit=5", "/?***&limit=5"),
        ("/?limit=5&&=sk-1", "/?limit=5&&=***"),
        ("/?api_key=a?limit=sk-1", "/?api_key=***"),
        ("/?", "/?"),
        ("/?api_key", "/?***"),
    ],
)
def test_values_of_unknown_parameters_are_hidden(target: str, logged: str) -> None:
    """Only those of the server's own parameters are written."""
    assert without_secrets(target) == logged


def test_the_shown_parameters_are_those_of_the_routes(harness: Harness) -> None:
    """A new parameter is shown once somebody decides so."""
    paths = harness.get("/openapi.json").json()["paths"]
    operations = [operation for path in paths.values() for operation in path.values()]
    found = {p["name"] for each in operations for p in each.get("parameters", []) if p["in"] == "query"}
    assert found == SHOWN


@pytest.fixture
def lines() -> Iterator[list[str]]:
    """All that any logger says, as a handler of a plugin would see it."""
    said: list[str] = []

    class Listener(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            said.append(record.getMessage())

    listener = Listener(level=logging.DEBUG)
    loggers = [logging.getLogger(), *(logging.getLogger(n) for n in ("dovetail", "uvicorn", "uvicorn.access"))]
    for each in loggers:
        each.addHandler(listener)
    yield said
    for each in loggers:
        each.removeHandler(listener)


def test_keys_in_queries_reach_no_log_and_no_label(
    make_harness: Callable[..., Harness], lines: list[str], capfd: pytest.CaptureFixture[str]
) -> None:
    """In the access log, in errors and in /metrics there is no trace of them."""
    harness = make_harness(api_key=["sk-right"])
    logging.getLogger("uvicorn.access").setLevel("INFO")
    as_user = {"authorization": "Bearer sk-right"}
    for query in ("api_key=sk-secret", "token=sk-secret", "limit=5&key=sk-secret", "sk-secret"):
        assert harness.get(f"/v1/models?{query}").status_code == 401
        assert harness.get(f"/v1/models?{query}", headers=as_user).status_code == 200
        assert harness.get(f"/nothing?{query}", headers=as_user).status_code == 404
        assert harness.post(f"/v1/chat/completions?{query}", {}, headers=as_user).status_code == 400
    assert harness.state.hooks.observers.settle()
    metrics = harness.get("/metrics", headers=as_user).text
    said = "\n".join(lines) + "".join(capfd.readouterr()) + metrics
    assert "GET /v1/models?api_key=*** HTTP/1.1" in said
    assert "limit=5&key=***" in said
    assert "sk-secret" not in said


def test_the_engine_logs_at_the_level_of_the_server(folder: Path, tmp_path: Path) -> None:
    """`--log-level` reaches the engine's process."""
    program = tmp_path / "engine.py"
    program.write_text(
        "import sys\nfrom pathlib import Path\nfrom dovetail_server.supervision.wire import SocketTransport\n"
        "from dovetail.messages import EngineFailed\ntransport = SocketTransport(Path(sys.argv[1]))\n"
        "transport.send(EngineFailed(transport.receive_start().log_level, user_error=False))\n"
    )
    settings = ServeSettings(model_path=str(folder), log_level="warning", device="cpu")
    plan = make_plan(Registry.scan(), model="LlamaForCausalLM", attention_backend="auto", device="cpu")
    client = make_engine(settings, plan)
    assert isinstance(client, ProcessClient)
    client.command = (str(program),)

    async def main() -> None:
        with pytest.raises(EngineError, match=r"^warning$"):
            await client.start()

    asyncio.run(main())
