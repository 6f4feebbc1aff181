"""Installing other projects' packages, and servers of the demo model to put behind them."""

from __future__ import annotations

import subprocess
import tempfile

import pytest
import requests

from dovetail.utils import launch_server_cmd, terminate_process, wait_for_server

UNREACHABLE = (
    "Could not find a version", "No matching distribution", "Connection", "Temporary failure in name resolution",
    "NewConnectionError", "ENOTFOUND", "EAI_AGAIN", "ECONNREFUSED", "network",
)  # fmt: skip


def install(command: list[str], what: str) -> None:
    """Run an installer; a registry that does not answer skips the test and says which."""
    done = subprocess.run(command, capture_output=True, text=True, timeout=180, check=False)
    if done.returncode != 0:
        text = done.stderr + done.stdout
        if any(word in text for word in UNREACHABLE):
            pytest.skip(f"the registry of {what} cannot be reached: {text.strip().splitlines()[-1][:200]}")
        pytest.fail(f"{' '.join(command)}:\n{text[-2000:]}")


class Worker:
    """One `dovetail serve` of the demo model; a light one compiles no grammars and reads bodies in its own process."""

    def __init__(self, flags: str = "", *, is_light: bool = False) -> None:
        flags += " --grammar-backend none --body-processes 0" if is_light else ""
        self.files = tempfile.TemporaryDirectory()
        mine = f"--random-seed 1 --num-threads 1 --log-level warning --file-storage-path {self.files.name}"
        self.process, self.port = launch_server_cmd(f"dovetail serve {mine} {flags}")
        self.base = f"http://127.0.0.1:{self.port}"

    def wait(self) -> Worker:
        wait_for_server(self.base, timeout=120)
        return self

    def count(self, name: str) -> float:
        """Read one of the worker's metrics."""
        lines = requests.get(f"{self.base}/metrics", timeout=30).text.splitlines()
        return sum(float(line.rsplit(" ", 1)[1]) for line in lines if line.startswith((f"{name}{{", f"{name} ")))

    def close(self) -> None:
        terminate_process(self.process, timeout=60)
        self.files.cleanup()
