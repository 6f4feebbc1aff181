"""An application of Ray Serve in a Ray cluster of its own on this machine, as `serve run` starts it."""

from __future__ import annotations

import contextlib
import json
import os
import secrets
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import requests

QUIET = {
    **{"RAY_USAGE_STATS_ENABLED": "0", "RAY_DEDUP_LOGS": "0", "RAY_SERVE_LOG_TO_STDERR": "1"},
    # Clusters that start at once would each write a token into the home folder, and not know each other's.
    **{"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": secrets.token_hex(32)},
    # Ray's own limits of a start, half a minute or one, are too short for a busy machine.
    **dict.fromkeys(("RAY_gcs_server_port_wait_time_s", "RAY_gcs_server_request_timeout_seconds"), "300"),
    **{"RAY_worker_register_timeout_seconds": "300", "RAY_agent_register_timeout_ms": "300000"},
}
LIMIT_S = 300.0
"""For whatever a cluster does: it takes seconds, or minutes on a machine that others keep busy."""


def free_port() -> int:
    with socket.socket() as held:
        held.bind(("127.0.0.1", 0))
        return int(held.getsockname()[1])


class RayServed:
    """`serve run` of a configuration file whose `args` are those of `dovetail.ray:app`, or of another builder.

    `path` is put before the places where the cluster's processes look for modules.
    """

    def __init__(
        self, folder: Path, *, builder: str = "dovetail.ray:app", path: Path | None = None, **args: Any
    ) -> None:
        self.port = free_port()
        self.base = f"http://127.0.0.1:{self.port}"
        self.log = folder / "serve.log"
        self.temp = tempfile.mkdtemp(prefix="ray", dir="/tmp")  # sockets below it: their paths have to be short
        application = {"name": "dovetail", "route_prefix": "/", "import_path": builder, "args": args}
        config = folder / "serve.json"  # JSON is YAML
        config.write_text(json.dumps({"http_options": {"port": self.port}, "applications": [application]}))
        command = [str(Path(sys.executable).with_name("serve")), "run", str(config)]
        with self.log.open("wb") as out:
            self.process = subprocess.Popen(
                command,
                stdout=out,
                stderr=out,
                start_new_session=True,
                env={**os.environ, **QUIET, "RAY_TMPDIR": self.temp, **({"PYTHONPATH": str(path)} if path else {})},
            )

    def text(self) -> str:
        return self.log.read_text("utf-8", "replace")

    def wait(self, limit_s: float = LIMIT_S, path: str = "/readyz") -> RayServed:
        self.until(lambda: self._is_ready(path), limit_s)
        return self

    def _is_ready(self, path: str) -> bool:
        try:
            return self.get(path).status_code == 200
        except requests.ConnectionError:
            return False

    def until(self, is_so: Callable[[], bool], limit_s: float = LIMIT_S) -> None:
        deadline = time.monotonic() + limit_s
        while not is_so():
            assert self.process.poll() is None, self.text()[-6000:]
            assert time.monotonic() < deadline, self.text()[-6000:]
            time.sleep(0.2)

    def post(self, path: str, body: dict[str, Any], **more: Any) -> requests.Response:
        return requests.post(self.base + path, json=body, timeout=LIMIT_S, **more)

    def get(self, path: str, **more: Any) -> requests.Response:
        return requests.get(self.base + path, timeout=LIMIT_S, **more)

    def replicas(self, name: str = "dovetail-demo") -> list[int]:
        """The processes of a model's replicas that are of this cluster."""
        found = subprocess.run(["ps", "-eo", "pid=,args="], capture_output=True, text=True, check=True).stdout
        rows = [line.split(None, 1) for line in found.splitlines()]
        mine = [int(pid) for pid, args in rows if args.startswith(f"ray::ServeReplica:dovetail:{name}")]
        return [pid for pid in mine if self.temp in environment_of(pid)]

    def close(self) -> None:
        """End the cluster, and what is left of it."""
        self.process.send_signal(signal.SIGINT)
        try:
            self.process.wait(60)
        except subprocess.TimeoutExpired:
            os.killpg(self.process.pid, signal.SIGKILL)
            self.process.wait()
        deadline = time.monotonic() + 20
        while left := [int(p.name) for p in Path("/proc").glob("[0-9]*") if self.temp in environment_of(int(p.name))]:
            if time.monotonic() > deadline:
                for pid in left:
                    with contextlib.suppress(ProcessLookupError):  # some end with others
                        os.kill(pid, signal.SIGKILL)
            time.sleep(0.2)
        shutil.rmtree(self.temp, ignore_errors=True)


def environment_of(pid: int) -> str:
    """Return a process's environment, as far as it may be read."""
    try:
        return Path(f"/proc/{pid}/environ").read_bytes().decode("utf-8", "replace")
    except OSError:
        return ""
