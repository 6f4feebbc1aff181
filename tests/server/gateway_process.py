"""A gateway in a process of its own, with the workers behind it."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import requests

KEY, OTHER, ADMIN, RESUME = "first-key", "second-key", "admin-key", "resume-key"
LIMIT_S = 240.0
"""For whatever a gateway does: shorter than the limit of a test, and long enough for a busy machine."""


class Served:
    """A gateway process."""

    def __init__(self, folder: Path, *arguments: str, key: str | None = KEY, python: str = sys.executable) -> None:
        self.log = folder / f"log-{time.monotonic_ns()}"
        command = [python, "-m", "dovetail_server", *arguments, "--port", "0"]
        with self.log.open("wb") as out:
            self.process = subprocess.Popen(command, stdout=out, stderr=out, start_new_session=True)
        self.session = requests.Session()
        if key is not None:
            self.session.headers["authorization"] = f"Bearer {key}"
        self.base = ""

    def text(self) -> str:
        return self.log.read_text("utf-8", "replace")

    def wait(self, limit_s: float = LIMIT_S) -> Served:
        deadline = time.monotonic() + limit_s
        while "fired up" not in self.text():
            assert self.process.poll() is None, self.text()[-3000:]
            assert time.monotonic() < deadline, self.text()[-3000:]
            time.sleep(0.1)
        self.base = self.text().partition("Serving ")[2].partition(" at ")[2].partition("/v1")[0]
        return self

    def post(self, path: str, body: dict[str, Any], **more: Any) -> requests.Response:
        return self.session.post(self.base + path, json=body, timeout=LIMIT_S, **more)

    def get(self, path: str, **more: Any) -> requests.Response:
        return self.session.get(self.base + path, timeout=LIMIT_S, **more)

    def workers(self, key: str = KEY) -> list[dict[str, Any]]:
        found = self.get("/v1/workers", headers={"authorization": f"Bearer {key}"})
        rows: list[dict[str, Any]] = found.json()["data"]
        return rows

    def count(self, name: str) -> dict[str, float]:
        lines = [line for line in self.get("/metrics").text.splitlines() if line.startswith(name + "{")]
        return {line.partition('worker="')[2].partition('"')[0]: float(line.rsplit(" ", 1)[1]) for line in lines}

    def num_placed(self) -> float:
        lines = self.get("/metrics").text.splitlines()
        return float(next(line for line in lines if line.startswith("dovetail_gateway_placed_total ")).split()[1])

    def pids(self) -> list[int]:
        """The worker processes, by number: children of the gateway that are servers."""
        found = subprocess.run(["ps", "-wweo", "pid=,ppid=,args="], capture_output=True, text=True, check=True).stdout
        rows = [line.split(None, 2) for line in found.splitlines()]
        mine = [
            int(pid) for pid, parent, args in rows if int(parent) == self.process.pid and "cli.parent_bound" in args
        ]
        ports = {int(worker["url"].rsplit(":", 1)[1]): worker["number"] for worker in self.workers(ADMIN)}
        return [pid for _, pid in sorted((number_of(pid, ports), pid) for pid in mine)]

    def kill_the_busiest(self, pids: list[int]) -> None:
        """Kill the worker that has most of what runs: all stand still meanwhile, so that nothing ends before."""
        for pid in pids:
            os.kill(pid, signal.SIGSTOP)
        running = [worker["num_running"] for worker in self.workers(ADMIN)]
        killed = pids[running.index(max(running))]
        os.kill(killed, signal.SIGKILL)
        for pid in set(pids) - {killed}:
            os.kill(pid, signal.SIGCONT)

    def until(self, is_so: Callable[[], bool], limit_s: float = LIMIT_S) -> None:
        deadline = time.monotonic() + limit_s
        while not is_so():
            assert time.monotonic() < deadline, self.text()[-3000:]
            time.sleep(0.1)

    def close(self) -> int:
        if self.process.poll() is None:
            self.process.terminate()
        try:
            return self.process.wait(60)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()
            raise


def number_of(pid: int, ports: dict[int, int]) -> int:
    """Return the number of the worker that listens on its port, by the sockets that the process has open."""
    inodes = set()
    for entry in Path(f"/proc/{pid}/fd").iterdir():
        try:
            target = os.readlink(entry)
        except OSError:
            continue
        if target.startswith("socket:["):
            inodes.add(target[8:-1])
    for line in Path("/proc/net/tcp").read_text().splitlines()[1:]:
        fields = line.split()
        port = int(fields[1].rpartition(":")[2], 16)
        if fields[9] in inodes and fields[3] == "0A" and port in ports:
            return ports[port]
    raise AssertionError(f"{pid} listens on no worker's port")


def chat(group: int, member: int, **more: Any) -> dict[str, Any]:
    """A chat request; those of a group share a system prompt of some 430 tokens."""
    rules = " ".join(f"Rule {group}.{n}: answer in {group + n} words." for n in range(28))
    question = f"Capital {group * 100 + member}?"
    messages = [{"role": "system", "content": rules}, {"role": "user", "content": question}]
    return {"messages": messages, "max_tokens": 8, "temperature": 0, **more}
