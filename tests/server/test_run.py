"""Bringing a server up and down, with a scripted engine in the place of the engine process."""

from __future__ import annotations

import asyncio
import os
import signal
import threading
from pathlib import Path

import pytest
import requests
from fake_engine import FakeEngine, failing
from server_tiny import NO_TENSORS, write_model

from dovetail.contracts.errors import EngineError
from dovetail_server.cli import serve
from dovetail_server.start import preflight, run


@pytest.fixture
def model(tmp_path: Path) -> Path:
    folder = write_model(tmp_path / "model", architectures=["Cohere2ForCausalLM"])  # its plugin alone knows its facts
    (folder / "model.safetensors").write_bytes(NO_TENSORS)
    return folder


@pytest.fixture
def engine(monkeypatch: pytest.MonkeyPatch) -> FakeEngine:
    fake = FakeEngine(lambda submit: [1, 2, 3], eos=257, vocab_size=262)
    monkeypatch.setattr(run, "make_engine", lambda settings, plan: fake)
    return fake


def free_port() -> int:
    listener = preflight.bind("127.0.0.1", 0)
    port: int = listener.getsockname()[1]
    listener.close()
    return port


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_server_comes_up_serves_and_goes_down(
    model: Path, engine: FakeEngine, capfd: pytest.CaptureFixture[str], number: signal.Signals
) -> None:
    """Start-up shows the phases and the line that scripts wait for; a signal ends it with exit code 0."""
    port = free_port()
    found: list[int] = []

    def use() -> None:
        url = f"http://127.0.0.1:{port}"
        with requests.Session() as http:
            while True:
                try:
                    if http.get(f"{url}/readyz", timeout=60).status_code == 200:
                        break
                except requests.ConnectionError:
                    continue
            found.append(http.get(f"{url}/v1/models", timeout=60).status_code)
            found.append(len(http.get(f"{url}/v1/plugins", timeout=60).json()["data"]))
            engine.restarting = "killed by the test"
            found.append(http.get(f"{url}/health", timeout=60).status_code)
        os.kill(os.getpid(), number)

    thread = threading.Thread(target=use)
    thread.start()
    try:
        code = serve.main([str(model), "--port", str(port), "--reasoning-parser", "qwen3"])
    finally:
        thread.join(60)
    output = capfd.readouterr().err
    assert code == 0
    assert found[0] == 200
    assert found[1] > 3
    assert found[2] == 503
    assert engine.is_closed
    assert "The server is fired up and ready to roll!" in output
    assert '"GET /v1/models HTTP/1.1" 200 OK' in output
    assert "tokenizer and parsers" in output
    lines = output.splitlines()
    ready = next(i for i, line in enumerate(lines) if "ready to roll" in line)
    assert len([line for line in lines[: ready + 1] if line.strip() and "HTTP/1.1" not in line]) <= 12


def test_an_engine_that_is_gone_for_good_ends_the_server(
    model: Path, engine: FakeEngine, capfd: pytest.CaptureFixture[str]
) -> None:
    """Exit code 1 and one line that says why; whoever started the server can start it again."""
    port = free_port()

    def use() -> None:
        while True:
            try:
                if requests.get(f"http://127.0.0.1:{port}/readyz", timeout=60).status_code == 200:
                    break
            except requests.ConnectionError:
                continue
        engine.dead = "killed by the test"

    thread = threading.Thread(target=use)
    thread.start()
    try:
        code = serve.main([str(model), "--port", str(port)])
    finally:
        thread.join(60)
    assert code == 1
    assert capfd.readouterr().err.count("dovetail serve: the engine is gone: killed by the test") == 1


def test_a_signal_while_starting_ends_the_server(
    model: Path, engine: FakeEngine, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    """An engine that takes long to start does not hold the server back from stopping."""
    port = free_port()

    async def slow() -> None:
        await asyncio.sleep(60)

    def stop() -> None:
        while True:
            try:
                requests.get(f"http://127.0.0.1:{port}/livez", timeout=60)
                break
            except requests.ConnectionError:
                continue
        os.kill(os.getpid(), signal.SIGTERM)

    monkeypatch.setattr(engine, "start", slow)
    thread = threading.Thread(target=stop)
    thread.start()
    try:
        code = serve.main([str(model), "--port", str(port)])
    finally:
        thread.join(60)
    assert code == 0
    assert engine.is_closed
    assert "ready to roll" not in capfd.readouterr().err


@pytest.mark.parametrize(
    ("error", "code", "text"),
    [
        (failing("--dtype float16: not on this device; use float32"), 2, "--dtype float16: not on this device"),
        (EngineError("the engine process ended with exit code -9"), 1, "exit code -9"),
    ],
)
def test_an_engine_that_cannot_start_is_one_line(
    model: Path, engine: FakeEngine, capfd: pytest.CaptureFixture[str], error: Exception, code: int, text: str
) -> None:
    """The engine's reason is printed on one line; exit code 2 if the user can fix it."""
    engine.start_error = error
    assert serve.main([str(model), "--port", str(free_port())]) == code
    lines = capfd.readouterr().err.strip().splitlines()
    assert len(lines) == 1
    assert text in lines[0]
    assert engine.is_closed
