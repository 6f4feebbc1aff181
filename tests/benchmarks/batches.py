"""What batches cost and survive, with the demo model on this machine.

    python tests/benchmarks/batches.py kills --lines 20000 --every 5
    python tests/benchmarks/batches.py upload --mib 199
    python tests/benchmarks/batches.py interactive --requests 100

`kills` runs a batch while the server, and every other time its engine a moment before it, is killed every few seconds,
and counts every `custom_id`. `upload` measures how far the server's memory grows. `interactive` compares times to the
first token with and without a batch.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import requests

READY_S = 600
ENGINE = b"dovetail_server.supervision.engine_main"


class Server:
    """`dovetail serve` with the demo model."""

    def __init__(self, storage: Path, port: int, *more: str, log: Path | None = None) -> None:
        code = "import sys; from dovetail_server.cli import main; sys.exit(main(sys.argv[1:]))"
        flags = ["--num-threads", "1", "--file-storage-path", str(storage), "--min-free-disk-bytes", "0"]
        flags += ["--disable-access-log", "--log-level", "info" if log else "warning", "--port", str(port)]
        command = [sys.executable, "-c", code, "serve", *flags, *more]
        with open(log or os.devnull, "wb") as errors:
            self.process = subprocess.Popen(command, stderr=errors)
        self.base = f"http://127.0.0.1:{port}"

    def wait(self) -> None:
        deadline = time.monotonic() + READY_S
        while time.monotonic() < deadline:
            try:
                if requests.get(self.base + "/readyz", timeout=2).status_code == 200:
                    return
            except requests.RequestException:
                time.sleep(0.05)
        raise RuntimeError("the server did not become ready")

    def engine_pids(self) -> list[int]:
        """Return the engine's process, where there is one; the server has other children, too."""
        text = Path(f"/proc/{self.process.pid}/task/{self.process.pid}/children").read_text()
        return [int(pid) for pid in text.split() if ENGINE in command_of(int(pid))]

    def kill(self) -> None:
        self.process.kill()
        self.process.wait()

    def stop(self) -> None:
        self.process.terminate()
        self.process.wait(60)


def command_of(pid: int) -> bytes:
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes()
    except OSError:
        return b""


def tasks(count: int, max_tokens: int) -> Iterator[str]:
    for i in range(count):
        messages = [{"role": "user", "content": f"What is {i % 100} plus {i % 7}?"}]
        body = {"model": "dovetail-demo", "messages": messages, "max_tokens": max_tokens}
        yield json.dumps({"custom_id": f"t{i}", "method": "POST", "url": "/v1/chat/completions", "body": body}) + "\n"


def start_batch(base: str, lines: int, max_tokens: int) -> str:
    files = {"file": ("in.jsonl", "".join(tasks(lines, max_tokens)))}
    uploaded = requests.post(base + "/v1/files", files=files, data={"purpose": "batch"}, timeout=60).json()
    body = {"input_file_id": uploaded["id"], "endpoint": "/v1/chat/completions", "completion_window": "24h"}
    return str(requests.post(base + "/v1/batches", json=body, timeout=60).json()["id"])


def kills(arguments: argparse.Namespace) -> None:
    with tempfile.TemporaryDirectory() as folder:
        server = Server(Path(folder), arguments.port)
        server.wait()
        batch_id = start_batch(server.base, arguments.lines, arguments.max_tokens)
        began, deaths = time.monotonic(), Counter[str]()
        batch: dict[str, Any] = {"status": "?"}
        killed = time.monotonic()
        while batch["status"] not in ("completed", "failed", "expired", "cancelled"):
            time.sleep(0.2)
            if time.monotonic() - killed >= arguments.every:
                kind = "server" if deaths.total() % 2 == 0 else "engine"
                deaths[kind] += 1
                engines = server.engine_pids()
                if kind == "engine":
                    for pid in engines:
                        os.kill(pid, signal.SIGKILL)
                    time.sleep(0.3)
                server.kill()
                server = Server(Path(folder), arguments.port)
                server.wait()
                killed = time.monotonic()
            batch = requests.get(f"{server.base}/v1/batches/{batch_id}", timeout=60).json()
        took = time.monotonic() - began
        seen: Counter[str] = Counter()
        for kind in ("output_file_id", "error_file_id"):
            if batch.get(kind) is not None:
                text = requests.get(f"{server.base}/v1/files/{batch[kind]}/content", timeout=60).text
                seen.update(json.loads(line)["custom_id"] for line in text.splitlines())
        server.stop()
    missing = arguments.lines - len(seen)
    repeated = sum(count - 1 for count in seen.values())
    print(
        f"{arguments.lines} lines, {deaths['server']} kills of the server, {deaths['engine']} of the engine: ", end=""
    )
    print(f"{batch['status']} in {took:.0f} s, {missing} lost, {repeated} repeated, {batch['request_counts']}")
    sys.exit(1 if missing or repeated else 0)


def status_kib(pid: int, name: str) -> int:
    text = Path(f"/proc/{pid}/status").read_text()
    return int(next(line.split()[1] for line in text.splitlines() if line.startswith(name)))


def upload(arguments: argparse.Namespace) -> None:
    boundary = "benchmark"
    head = f'--{boundary}\r\nContent-Disposition: form-data; name="purpose"\r\n\r\nbatch\r\n--{boundary}\r\n'
    head += 'Content-Disposition: form-data; name="file"; filename="in.jsonl"\r\n\r\n'

    def pieces() -> Iterator[bytes]:
        yield head.encode()
        for _ in range(arguments.mib):
            yield b"x" * (1 << 20)
        yield f"\r\n--{boundary}--\r\n".encode()

    with tempfile.TemporaryDirectory() as folder:
        server = Server(Path(folder), arguments.port)
        server.wait()
        requests.post(
            server.base + "/v1/files", files={"file": ("a.jsonl", b"{}")}, data={"purpose": "batch"}, timeout=60
        )
        before, began = status_kib(server.process.pid, "VmRSS"), time.monotonic()
        kind = f"multipart/form-data; boundary={boundary}"
        reply = requests.post(server.base + "/v1/files", data=pieces(), headers={"content-type": kind}, timeout=300)
        reply.raise_for_status()
        took, peak = time.monotonic() - began, status_kib(server.process.pid, "VmHWM")
        server.stop()
    print(f"{arguments.mib} MiB in {took:.1f} s; memory {before / 1024:.0f} MiB before, peak {peak / 1024:.0f} MiB")
    sys.exit(1 if peak - before > 64 << 10 else 0)


def first_token_s(base: str, number: int) -> float:
    body = {
        "model": "dovetail-demo",
        "messages": [{"role": "user", "content": f"{number}: What is the capital of France?"}],
        "max_tokens": 8,
        "stream": True,
    }
    began = time.perf_counter()
    with requests.post(base + "/v1/chat/completions", json=body, stream=True, timeout=60) as reply:
        for line in reply.iter_lines():
            if b'"content":"' in line and b'"content":""' not in line:
                took = time.perf_counter() - began
                for _ in reply.iter_lines():
                    pass
                return took
    return time.perf_counter() - began


def measure(base: str, count: int, pause_s: float) -> tuple[float, float]:
    times = []
    for number in range(count):
        times.append(first_token_s(base, number))
        time.sleep(pause_s)
    times.sort()
    return statistics.median(times) * 1000, times[min(count - 1, int(count * 0.99))] * 1000


def interactive(arguments: argparse.Namespace) -> None:
    with tempfile.TemporaryDirectory() as folder:
        server = Server(Path(folder), arguments.port)
        server.wait()
        measure(server.base, 20, 0)
        alone = measure(server.base, arguments.requests, arguments.pause)
        batch_id = start_batch(server.base, 20_000, 64)
        while requests.get(f"{server.base}/v1/batches/{batch_id}", timeout=60).json()["status"] == "validating":
            time.sleep(0.1)
        time.sleep(2)
        beside = measure(server.base, arguments.requests, arguments.pause)
        counts = requests.get(f"{server.base}/v1/batches/{batch_id}", timeout=60).json()["request_counts"]
        server.stop()
    print(f"time to first token, ms: median {alone[0]:.1f} alone, {beside[0]:.1f} beside a batch; ", end="")
    print(f"p99 {alone[1]:.1f} alone, {beside[1]:.1f} beside ({beside[1] / alone[1] - 1:+.0%}); {counts}")


def main() -> None:
    parser = argparse.ArgumentParser(description="Files and batches.")
    parser.add_argument("what", choices=("kills", "upload", "interactive"))
    parser.add_argument("--port", type=int, default=30917)
    parser.add_argument("--lines", type=int, default=20_000)
    parser.add_argument("--max-tokens", type=int, default=4)
    parser.add_argument("--every", type=float, default=5.0)
    parser.add_argument("--mib", type=int, default=199)
    parser.add_argument("--requests", type=int, default=100)
    parser.add_argument("--pause", type=float, default=0.0)
    arguments = parser.parse_args()
    {"kills": kills, "upload": upload, "interactive": interactive}[arguments.what](arguments)


if __name__ == "__main__":
    main()
