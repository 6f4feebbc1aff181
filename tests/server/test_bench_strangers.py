"""`dovetail bench` against servers that are not ours."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Thread
from typing import Any

import pytest
from bench_command import run_bench

pytestmark = pytest.mark.usefixtures("light_servers")


class Stranger(BaseHTTPRequestHandler):
    """A server of someone else's: no counts in events, `continuous_usage_stats` refused, spaces in its JSON."""

    protocol_version = "HTTP/1.1"
    counts = True

    def log_message(self, *args: Any) -> None:
        """Stay silent."""

    def do_GET(self) -> None:
        """List one model; nothing else is there."""
        found = self.path == "/v1/models"
        self._send(200 if found else 404, {"data": [{"id": "m", "owned_by": "someone", "root": "hub/name"}]})

    def do_POST(self) -> None:
        """Stream four tokens, two in each event."""
        body = json.loads(self.rfile.read(int(self.headers["content-length"])))
        if "continuous_usage_stats" in body["stream_options"]:
            self._send(400, {"error": {"message": "unknown field continuous_usage_stats"}})
            return
        part = {"choices": [{"text": "ab", "finish_reason": None}]}
        last = {"choices": [{"text": "", "finish_reason": "length"}]}
        usage = {"choices": [], "usage": {"prompt_tokens": len(body["prompt"]), "completion_tokens": 4}}
        sent = [part, part, last, usage] if self.counts else [part, part, last]
        data = b"".join(b"data: " + json.dumps(e).encode() + b"\n\n" for e in sent) + b"data: [DONE]\n\n"
        self.send_response(200)
        self.send_header("content-type", "text/event-stream")
        self.send_header("content-length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)

    def _send(self, status: int, value: Any) -> None:
        data = json.dumps(value).encode()
        self.send_response(status)
        self.send_header("content-length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)


@pytest.fixture
def stranger() -> Iterator[Callable[..., str]]:
    """Start servers that are not ours; gives their address."""
    running = []

    def start(*, counts: bool = True) -> str:
        handler = type("Handler", (Stranger,), {"counts": counts})
        server = ThreadingHTTPServer(("127.0.0.1", 0), handler)
        server.daemon_threads = True
        running.append(server)
        Thread(target=server.serve_forever, args=(0.01,), daemon=True).start()
        return f"http://127.0.0.1:{server.server_port}"

    yield start
    for server in running:
        server.shutdown()
        server.server_close()


def test_a_strangers_server_is_measured_and_its_floor_is_unknown(
    stranger: Callable[..., str], folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Without counts in events, usage at the end gives the tokens; what nobody told is not invented."""
    file = tmp_path / "out.json"
    argv = ["serve", "--base-url", stranger(), "--num-prompts", "3", "--concurrency", "1", "--input-len", "7"]
    code, _, err = run_bench(capsys, *argv)
    assert code == 2
    assert "--tokenizer DIR" in err
    code, out, err = run_bench(capsys, *argv, "--output-len", "4", "--tokenizer", str(folder), "--json", str(file))
    assert code == 0, err
    report = json.loads(file.read_text())
    found = report["workloads"][0]
    assert (found["completion_tokens"], found["prompt_tokens"], found["tokens_per_event"]) == (12, 21, 2.0)
    assert (found["itl_ms"], found["of_floor"], report["server"]["kind"]) == (None, None, "someone")
    assert "floor: unknown" in out


def test_a_server_that_does_not_count_is_refused(
    stranger: Callable[..., str], folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Tokens are never guessed from events."""
    argv = ("serve", "--base-url", stranger(counts=False), "--num-prompts", "3", "--tokenizer", str(folder))
    code, _, err = run_bench(capsys, *argv)
    assert code == 2
    assert "reports no usage" in err
