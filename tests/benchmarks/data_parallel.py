"""Several workers behind one address, beside one: `python tests/benchmarks/data_parallel.py speed|kill|relay [MODEL]`.

`speed` serves MODEL with one worker and with several (`--data-parallel-size`, smg chooses), the same text load on each,
and prints tokens a second. `kill` sends streams to several workers, ends one of them by SIGKILL among them, and
compares every text with what it was before. `relay` puts a `dovetail gateway` before one server and measures in turns,
with and without it: tokens a second, the gateway's processor time for each token, and its memory while clients read
nothing.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import socket
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import requests
from rich.console import Console
from rich.table import Table

START_S = 400.0
ROUNDS = 3
STREAMS, AFTER = 24, 6
SLOW = 32
"""Clients of `relay` that read nothing."""


class Served:
    """A server process, or a gateway's."""

    def __init__(self, folder: Path, *arguments: str) -> None:
        self.log = folder / f"log-{time.monotonic_ns()}"
        command = [sys.executable, "-m", "dovetail_server", *arguments, "--port", "0"]
        with self.log.open("wb") as out:
            self.process = subprocess.Popen(command, stdout=out, stderr=out, start_new_session=True)
        deadline = time.monotonic() + START_S
        while "fired up" not in (text := self.log.read_text("utf-8", "replace")):
            if self.process.poll() is not None or time.monotonic() > deadline:
                self.close()
                raise SystemExit(f"it did not start: {' '.join(command)}\n{text[-3000:]}")
            time.sleep(0.2)
        self.base = text.partition("Serving ")[2].partition(" at ")[2].partition("/v1")[0]

    def close(self) -> None:
        """End it."""
        self.process.terminate()
        try:
            self.process.wait(60)
        except subprocess.TimeoutExpired:
            os.killpg(self.process.pid, signal.SIGKILL)

    def cpu_s(self) -> float:
        """Processor time of this process alone, without smg and workers."""
        fields = Path(f"/proc/{self.process.pid}/stat").read_text().rpartition(") ")[2].split()
        return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")

    def resident_mb(self) -> float:
        """Memory of this process alone."""
        pages = int(Path(f"/proc/{self.process.pid}/statm").read_text().split()[1])
        return pages * os.sysconf("SC_PAGE_SIZE") / 1e6


def load(base: str, args: argparse.Namespace, requests_each: int, seed: int) -> dict[str, Any]:
    """Put the load on a server with `dovetail bench serve`; returns the workload's figures."""
    with tempfile.TemporaryDirectory() as folder:
        target = Path(folder) / "out.json"
        command = [sys.executable, "-m", "dovetail_server", "bench", "serve", "--base-url", base, "--json", str(target)]
        command += ["--num-prompts", str(requests_each), "--concurrency", str(args.concurrency), "--seed", str(seed)]
        command += ["--input-len", str(args.input_len), "--output-len", str(args.output_len), "--bandwidth", "1000"]
        command += ["--tokenizer", args.tokenizer] if args.tokenizer else []
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        if done.returncode:
            raise SystemExit(done.stdout[-2000:] + done.stderr[-2000:])
        found: dict[str, Any] = json.loads(target.read_text())["workloads"][0]
    return found


def serve_flags(args: argparse.Namespace) -> list[str]:
    """Return the flags of every worker."""
    return [*([args.model] if args.model else []), *args.flags]


def speed(args: argparse.Namespace, folder: Path) -> Table:
    """Tokens a second with one worker and with several."""
    table = Table("workers", "output tok/s", "first token p50 ms", "time per token p50 ms", "failed", title="speed")
    first = 0.0
    for workers in (1, args.workers):
        more = ["--data-parallel-size", str(workers)] if workers > 1 else list(args.one)
        running = Served(folder, "serve", *serve_flags(args), *more, "--file-storage-path", str(folder))
        try:
            load(running.base, args, args.concurrency * workers, 1)  # warm
            found = load(running.base, args, args.requests, 2)
        finally:
            running.close()
        first = first or found["output_tok_s"]
        ratio = "" if workers == 1 else f" ({found['output_tok_s'] / first:.2f} x)"
        figures = [f"{found['ttft_ms']['p50']:.0f}", f"{found['tpot_ms']['p50']:.2f}", str(found["num_failed"])]
        table.add_row(str(workers), f"{found['output_tok_s']:.0f}{ratio}", *figures)
    return table


def told(base: str, number: int, tokens: int) -> str:
    """Return a stream's text; what is no whole stream says why."""
    body = {"prompt": f"{number} stories begin", "temperature": 0.9, "seed": number, "max_tokens": tokens}
    body |= {"ignore_eos": True, "stream": True}
    with requests.post(f"{base}/v1/completions", json=body, stream=True, timeout=300) as reply:
        lines = [line for line in reply.iter_lines() if line.startswith(b"data: ")]
    if reply.status_code != 200 or not lines or lines[-1] != b"data: [DONE]" or b'"error"' in lines[-2]:
        return f"broken: {reply.status_code} {lines[-2:]}"
    return "".join(choice["text"] for line in lines[:-1] for choice in json.loads(line[6:])["choices"])


def workers_of(pid: int) -> list[int]:
    """Return the processes of a gateway's workers."""
    rows = [
        line.split(None, 2)
        for line in subprocess.check_output(["ps", "-eo", "pid=,ppid=,args="], text=True).splitlines()
    ]
    return [int(row[0]) for row in rows if int(row[1]) == pid and "cli.parent_bound" in row[2]]


def kill(args: argparse.Namespace, folder: Path) -> Table:
    """Streams through the end of a worker."""
    flags = ["--data-parallel-size", str(args.workers), "--file-storage-path", str(folder), "--random-seed", "3"]
    running = Served(folder, "serve", *serve_flags(args), *flags)
    try:
        with ThreadPoolExecutor(8) as pool:
            before = list(pool.map(lambda n: told(running.base, n, args.output_len), range(STREAMS)))
            started = [pool.submit(told, running.base, n, args.output_len) for n in range(STREAMS)]
            while sum(each.done() for each in started) < AFTER:
                time.sleep(0.002)
            os.kill(workers_of(running.process.pid)[0], signal.SIGKILL)
            after = [each.result() for each in started]
        moved = running.log.read_text("utf-8", "replace").count("Moved a stream of ")
    finally:
        running.close()
    table = Table(
        "streams", "broken before", "broken by kill -9", "moved", "say what they said", title="kill -9 of a worker"
    )
    broken = [sum(text.startswith("broken") for text in texts) for texts in (before, after)]
    same = sum(a == b for a, b in zip(before, after, strict=True))
    table.add_row(str(STREAMS), str(broken[0]), str(broken[1]), str(moved), f"{same} of {STREAMS}")
    return table


def relay(args: argparse.Namespace, folder: Path) -> Table:
    """What the gateway adds, in turns."""
    behind = Served(folder, "serve", *serve_flags(args), "--file-storage-path", str(folder), "--resume-key", "bench")
    try:
        front = Served(folder, "gateway", "--worker", behind.base, "--resume-key", "bench")
        try:
            rates: dict[str, list[float]] = {"direct": [], "relayed": []}
            used: list[float] = []
            for turn in range(ROUNDS):
                for name, base in (("direct", behind.base), ("relayed", front.base)):
                    began = front.cpu_s()
                    found = load(base, args, args.requests, 10 + turn)
                    rates[name].append(found["output_tok_s"])
                    if name == "relayed":
                        used.append(1e6 * (front.cpu_s() - began) / found["completion_tokens"])
            before = front.resident_mb()
            held = stalled(front.base, args)
            most = max(front.resident_mb() for _ in range(20) if not time.sleep(0.5))
            for one in held:
                one.close()
        finally:
            front.close()
    finally:
        behind.close()
    medians = {name: statistics.median(found) for name, found in rates.items()}
    table = Table("", "output tok/s", title=f"relay, {ROUNDS} rounds in turns")
    for name, found in rates.items():
        table.add_row(name, f"{medians[name]:.0f} ({', '.join(f'{rate:.0f}' for rate in found)})")
    table.add_row("relayed / direct", f"{medians['relayed'] / medians['direct']:.3f}")
    table.add_row("the gateway's processor time, us a token", f"{statistics.median(used):.0f}")
    table.add_row(f"its memory, MB: before, and with {SLOW} clients that read nothing", f"{before:.0f}, {most:.0f}")
    return table


def stalled(base: str, args: argparse.Namespace) -> Sequence[socket.socket]:
    """Open streams whose clients take nothing."""
    host, port = base.removeprefix("http://").split(":")
    held = []

    def ask(number: int) -> None:
        body = json.dumps(
            {"prompt": f"Number {number}", "max_tokens": 1500, "ignore_eos": True, "stream": True}
        ).encode()
        one = socket.create_connection((host, int(port)))
        one.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        head = ("POST /v1/completions HTTP/1.1", "Host: localhost", "Content-Type: application/json")
        one.sendall("\r\n".join((*head, f"Content-Length: {len(body)}", "", "")).encode() + body)
        held.append(one)

    threads = [threading.Thread(target=ask, args=(number,)) for number in range(SLOW)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return held


MODES = {"speed": speed, "kill": kill, "relay": relay}


def main() -> int:
    """Run what was asked for."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("mode", choices=[*MODES, "all"])
    parser.add_argument("model", nargs="?", help="folder; the demo model if not given")
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--requests", type=int, default=64)
    parser.add_argument("--concurrency", type=int, default=16)
    parser.add_argument("--input-len", type=int, default=64)
    parser.add_argument("--output-len", type=int, default=128)
    parser.add_argument("--tokenizer", help="folder with tokenizer.json, for prompts of text")
    parser.add_argument("--one", nargs="*", default=[], help="flags, without dashes, of the single worker: devices=0")
    parser.add_argument("--flags", nargs="*", default=[], help="flags of all, without dashes: load-format=dummy")
    args = parser.parse_args()
    args.flags = [f"--{flag}" for flag in args.flags]
    args.one = [f"--{flag}" for flag in args.one]
    with tempfile.TemporaryDirectory(prefix="dp-") as folder:
        for name, mode in MODES.items():
            if args.mode in (name, "all"):
                Console(width=140).print(mode(args, Path(folder)))
    return 0


if __name__ == "__main__":
    sys.exit(main())
