"""Ending the server for real: signals, and the death of one of its two processes."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import requests

from dovetail_server.start import preflight

pytestmark = pytest.mark.usefixtures("light_servers")

START_S = 120
LONG = {"prompt": "1 2 3", "model": "dovetail-demo", "stream": True, "ignore_eos": True, "temperature": 0}


class Running:
    """`dovetail serve` with the demo model, in a process of its own."""

    def __init__(self, storage: Path, *flags: str) -> None:
        listener = preflight.bind("127.0.0.1", 0)
        self.port: int = listener.getsockname()[1]
        listener.close()
        self.base = f"http://127.0.0.1:{self.port}"
        code = (
            "import sys; from dovetail_server.supervision import engine_process; from dovetail_server.cli import main\n"
            "engine_process.STOP_TIMEOUT_S = 600\n"  # waiting for an engine that hangs never ends
            "sys.exit(main(sys.argv[1:]))"
        )
        command = [sys.executable, "-c", code, "serve", "--port", str(self.port), "--num-threads", "1", *flags]
        command += ["--file-storage-path", str(storage), "--log-level", "warning", "--disable-access-log"]
        self.log = storage.with_suffix(".log")
        with self.log.open("a") as log:
            self.process = subprocess.Popen(command, stderr=log, start_new_session=True)
        deadline = time.monotonic() + START_S
        while self.ready() != 200:
            assert time.monotonic() < deadline
            assert self.process.poll() is None
            time.sleep(0.05)
        pid = self.process.pid
        self.engine = int(Path(f"/proc/{pid}/task/{pid}/children").read_text().split()[0])

    def ready(self) -> int | None:
        """The status of `/readyz`, None while nobody answers."""
        try:
            return requests.get(f"{self.base}/readyz", timeout=60).status_code
        except (requests.ConnectionError, requests.Timeout):
            return None

    def stream(self, max_tokens: int) -> tuple[requests.Response, Iterator[str]]:
        """Open a stream and take its first event."""
        reply = requests.post(
            f"{self.base}/v1/completions", json={**LONG, "max_tokens": max_tokens}, stream=True, timeout=60
        )
        lines = (line for line in reply.iter_lines(chunk_size=64, decode_unicode=True) if line)
        assert next(lines).startswith("data: {")
        return reply, lines

    def end(self) -> None:
        """Leave nothing behind."""
        for pid in (self.process.pid, self.engine):
            try:
                os.kill(pid, signal.SIGKILL)
            except ProcessLookupError:
                continue
        self.process.wait(60)


@pytest.fixture
def serve(tmp_path: Path) -> Iterator[Callable[..., Running]]:
    """Start servers."""
    running: list[Running] = []

    def start(*flags: str) -> Running:
        running.append(Running(tmp_path / "files", *flags))
        return running[-1]

    yield start
    for each in running:
        each.end()


def gone(pid: int, within_s: float = 60) -> bool:
    """Whether a process disappears in time."""
    deadline = time.monotonic() + within_s
    while time.monotonic() < deadline:
        try:
            if "State:\tZ" in Path(f"/proc/{pid}/status").read_text(encoding="ascii"):
                return True
        except OSError:
            return True
        time.sleep(0.02)
    return False


def finish_of(lines: Iterator[str]) -> tuple[int, list[Any], str]:
    """Read a stream to its end: the number of events, the finish reasons, the last line."""
    seen = list(lines)
    chunks = [json.loads(line[6:]) for line in seen if line.startswith("data: {") and '"error"' not in line[:20]]
    return len(chunks), [c["choices"][0]["finish_reason"] for c in chunks if c["choices"][0]["finish_reason"]], seen[-1]


def test_a_group_signal_drains_and_then_everything_is_gone(serve: Callable[..., Running]) -> None:
    """SIGTERM to the whole process group: not ready at once, the stream completes, both processes end, exit code 0,
    and the log does not end with complaints of a library."""
    server = serve("--drain-timeout", "60", "--drain-grace", "0")
    reply, lines = server.stream(150)
    os.kill(server.engine, signal.SIGSTOP)  # the stream does not end before all of this has been asked
    os.killpg(server.process.pid, signal.SIGTERM)
    deadline = time.monotonic() + START_S
    while server.ready() != 503:
        assert time.monotonic() < deadline
    refused = requests.post(f"{server.base}/v1/completions", json={**LONG, "max_tokens": 1}, timeout=60)
    assert (refused.status_code, refused.json()["error"]["code"]) == (503, "draining")
    assert refused.headers["retry-after"]
    os.kill(server.engine, signal.SIGCONT)
    count, reasons, last = finish_of(lines)
    reply.close()
    assert reasons == ["length"]
    assert last == "data: [DONE]"
    assert count > 5
    assert server.process.wait(60) == 0
    assert gone(server.engine)
    assert "leaked" not in server.log.read_text()  # as Triton's bindings say of what a process has frozen


@pytest.mark.full
def test_whoever_has_not_noticed_is_served_for_a_while(serve: Callable[..., Running]) -> None:
    """After SIGTERM health says 503 while new requests are answered; with the last connection the server ends."""
    server = serve("--drain-timeout", "600", "--drain-grace", "600", "--keep-alive-timeout", "2")
    reply, lines = server.stream(150)
    os.kill(server.engine, signal.SIGSTOP)
    server.process.send_signal(signal.SIGTERM)
    deadline = time.monotonic() + START_S
    while server.ready() != 503:
        assert time.monotonic() < deadline
    os.kill(server.engine, signal.SIGCONT)
    late = requests.post(f"{server.base}/v1/completions", json={**LONG, "stream": False, "max_tokens": 2}, timeout=60)
    assert late.status_code == 200
    assert finish_of(lines)[1:] == (["length"], "data: [DONE]")
    reply.close(), late.close()
    assert server.process.wait(60) == 0


@pytest.mark.full
def test_what_does_not_finish_in_time_is_told(
    serve: Callable[..., Running],
) -> None:
    """After `--drain-timeout` a stream ends with an error event."""
    server = serve("--drain-timeout", "0.3")
    reply, lines = server.stream(1800)
    server.process.send_signal(signal.SIGTERM)
    seen = list(lines)
    reply.close()
    assert seen[-1] == "data: [DONE]"
    assert seen[-3] == "event: error"
    assert json.loads(seen[-2][6:])["error"]["code"] == "draining"
    assert server.process.wait(60) == 0
    assert gone(server.engine)


def test_a_second_signal_ends_now_even_if_the_engine_hangs(serve: Callable[..., Running]) -> None:
    """The second SIGTERM waits neither for requests nor for the engine, which is gone too; nothing has failed by it."""
    server = serve("--drain-timeout", "600")
    reply, _ = server.stream(1800)
    os.kill(server.engine, signal.SIGSTOP)
    server.process.send_signal(signal.SIGTERM)
    while server.ready() != 503:
        time.sleep(0.02)
    assert server.process.poll() is None
    server.process.send_signal(signal.SIGTERM)
    assert gone(server.process.pid)
    reply.close()
    assert gone(server.engine)
    assert "Traceback" not in server.log.read_text()


def test_the_engine_leaves_when_its_client_is_killed_in_the_middle_of_a_long_step(tmp_path: Path) -> None:
    """Even an engine that would not look at its socket for ten minutes is gone by its own alarm."""
    path = tmp_path / "socket"
    listener = socket.socket(socket.AF_UNIX)
    listener.bind(str(path))
    listener.listen()
    code = (
        "import sys, time; from pathlib import Path; from dovetail_server.supervision.wire import SocketTransport\n"
        "transport = SocketTransport(Path(sys.argv[1])); transport.exit_without_client(); time.sleep(600)"
    )
    engine = subprocess.Popen([sys.executable, "-c", code, str(path)])
    connection, _ = listener.accept()
    connection.close()
    listener.close()
    assert gone(engine.pid)
    assert engine.wait(60) == -signal.SIGALRM
