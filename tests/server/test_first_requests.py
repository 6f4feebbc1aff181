"""What is ready has all that it needs: the first request of a route imports nothing."""

from __future__ import annotations

import json
import re
import subprocess
import sys
import time
from collections.abc import Iterator
from typing import Any

import fastapi.routing
import pytest
import requests
from starlette.routing import Match

from dovetail.demo import MODEL_DIR
from dovetail_server.settings.serve import ServeSettings
from dovetail_server.start import run
from dovetail_server.start.app import create_app
from dovetail_server.state import ServerState
from dovetail_testing.scripted import ScriptedEngine

PLUGIN = """
import json, sys
from dovetail.contracts import RouteSet, hookimpl

@hookimpl
def dovetail_routes(ctx):
    async def modules(scope, receive, send):
        await send({"type": "http.response.start", "status": 200, "headers": []})
        await send({"type": "http.response.body", "body": json.dumps(sorted(sys.modules)).encode()})

    return RouteSet(routes={"/modules": modules})
"""
CHAT = {"messages": [{"role": "user", "content": "Hi"}], "max_tokens": 4}
SCHEMA = {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]}
FORMAT = {"type": "json_schema", "json_schema": {"name": "acme", "schema": SCHEMA}}
TOOLS = [{"type": "function", "function": {"name": "acme", "parameters": SCHEMA}}]
ROW = {"custom_id": "a", "method": "POST", "url": "/v1/chat/completions", "body": {"model": "dovetail-demo", **CHAT}}
LINE = json.dumps(ROW).encode() + b"\n"
BODIES: dict[str, tuple[str, dict[str, Any]]] = {
    "completions": ("/v1/completions", {"prompt": "Hi", "max_tokens": 4}),
    "chat": ("/v1/chat/completions", CHAT),
    "stream": ("/v1/chat/completions", {**CHAT, "stream": True}),
    "schema": ("/v1/chat/completions", {**CHAT, "response_format": FORMAT}),
    "tools": ("/v1/chat/completions", {**CHAT, "tools": TOOLS, "tool_choice": "required"}),
    "long": ("/v1/chat/completions", {**CHAT, "stop": ["x" * 100] * 4, "metadata": {"k": "v" * 500}}),
    "wrong": ("/v1/chat/completions", {"messages": 3}),
    "generate": ("/generate", {"text": "Hi", "sampling_params": {"max_new_tokens": 4}}),
    "messages": ("/v1/messages", CHAT),
    "responses": ("/v1/responses", {"input": "Hi", "max_output_tokens": 4}),
    "stored": ("/v1/chat/completions", {**CHAT, "store": True}),
    "embeddings": ("/v1/embeddings", {"input": "Hi"}),
    "tokenize": ("/tokenize", {"prompt": "Hi"}),
}


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """A server of the demo model, with the processes that compile grammars and read large bodies."""
    folder = tmp_path_factory.mktemp("first")
    (folder / "acme.py").write_text(PLUGIN, encoding="utf-8")
    command = [
        sys.executable,
        "-m",
        "dovetail_server",
        "serve",
        "--port",
        "0",
        "--plugin-file",
        str(folder / "acme.py"),
    ]
    server = subprocess.Popen(
        [*command, "--file-storage-path", str(folder / "files")], stderr=subprocess.PIPE, text=True
    )
    try:
        assert server.stderr is not None
        said = ""
        while "ready to roll" not in said:
            line = server.stderr.readline()
            assert line, said
            said += line
        yield re.findall(r"http://127.0.0.1:\d+", said)[0]
    finally:
        server.kill()
        server.communicate()


def modules(base: str) -> set[str]:
    return set(requests.get(f"{base}/x/acme/modules", timeout=60).json())


def test_first_requests_import_nothing(base: str) -> None:
    """One after the other, as each would be the first."""
    before = modules(base)
    assert "dovetail_server.start.app" in before
    late = {}
    for name, (path, body) in BODIES.items():
        reply = requests.post(f"{base}{path}", json={"model": "dovetail-demo", **body}, timeout=120)
        assert reply.status_code == (400 if name == "wrong" else 200), reply.text
        late[name] = modules(base) - before
        before |= late[name]
    sent = requests.post(f"{base}/v1/files", files={"file": ("a.jsonl", LINE)}, data={"purpose": "batch"}, timeout=60)
    assert sent.status_code == 200, sent.text
    body = {"input_file_id": sent.json()["id"], "endpoint": "/v1/chat/completions", "completion_window": "24h"}
    batch = requests.post(f"{base}/v1/batches", json=body, timeout=60)
    assert batch.status_code == 200, batch.text
    deadline = time.monotonic() + 120
    while (found := requests.get(f"{base}/v1/batches/{batch.json()['id']}", timeout=60).json())[
        "status"
    ] != "completed":
        assert found["status"] in ("validating", "in_progress", "finalizing"), found
        assert time.monotonic() < deadline, found
        time.sleep(0.1)
    for path in ("/v1/files", "/v1/batches", f"/v1/files/{found['output_file_id']}/content", "/metrics", "/health"):
        assert requests.get(f"{base}{path}", timeout=60).status_code == 200
    late["files"] = modules(base) - before
    found = {name: sorted(each) for name, each in late.items()}
    assert not {name: each for name, each in found.items() if [m for m in each if not m.startswith("encodings.")]}


def test_first_requests_build_no_routes(monkeypatch: pytest.MonkeyPatch) -> None:
    """FastAPI makes the routes of an included family when a request first looks at them, so none is included."""
    engine = ScriptedEngine(lambda submit: [], eos=0, vocab_size=1)
    app = create_app(ServerState(ServeSettings(model_path=str(MODEL_DIR)), engine))
    built: list[Any] = []
    build = fastapi.routing.get_dependant

    def counted(**given: Any) -> Any:
        built.append(given)
        return build(**given)

    monkeypatch.setattr(fastapi.routing, "get_dependant", counted)
    for path, methods in app.openapi()["paths"].items():
        for method in methods:
            scope = {"type": "http", "method": method.upper(), "path": path, "root_path": "", "headers": []}
            assert any(route.matches(dict(scope))[0] == Match.FULL for route in app.router.routes), path
    assert not built


def test_names_that_others_may_change_keep_no_server_from_starting(monkeypatch: pytest.MonkeyPatch) -> None:
    """What is imported for speed alone may be gone; what is ours may not."""
    monkeypatch.setattr(run, "SENDING", ("anyio._core._elsewhere", "nowhere.at_all"))
    run.import_storage()
    monkeypatch.setattr(run, "STORAGE", ("dovetail_server.nowhere",))
    with pytest.raises(ModuleNotFoundError, match="nowhere"):
        run.import_storage()
