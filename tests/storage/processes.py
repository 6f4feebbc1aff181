"""Servers in processes of their own, for tests that kill them."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import requests

from .conftest import Api


class Killable:
    """Looks like a harness to `Api`."""

    def __init__(self, folder: Path, **settings: Any) -> None:
        script = Path(__file__).parent / "serve_scripted.py"
        command = [sys.executable, str(script), str(folder), json.dumps(settings, default=str)]
        self.process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        if self.process.stdin is None or self.process.stdout is None:
            raise RuntimeError("no pipe")
        self.stdin, self.stdout = self.process.stdin, self.process.stdout
        port = int(self.stdout.readline())
        self.base = f"http://127.0.0.1:{port}"
        self.http = requests.Session()
        self.api = Api(self)

    def post(self, path: str, body: Any = None, **kwargs: Any) -> requests.Response:
        if body is not None:
            kwargs["json"] = body
        return self.http.post(self.base + path, timeout=60, **kwargs)

    def get(self, path: str, **kwargs: Any) -> requests.Response:
        return self.http.get(self.base + path, timeout=60, **kwargs)

    def ask(self, command: str, *arguments: Any) -> Any:
        """Give a command; see `serve_scripted.py`."""
        self.stdin.write(f"{command} {json.dumps(arguments)}\n")
        self.stdin.flush()
        return json.loads(self.stdout.readline())

    def pause(self) -> None:
        self.process.send_signal(signal.SIGSTOP)

    def go_on(self) -> None:
        self.process.send_signal(signal.SIGCONT)

    @property
    def is_stopped(self) -> bool:
        stat = Path(f"/proc/{self.process.pid}/stat").read_text()
        return stat.rpartition(")")[2].split()[0] == "T"

    def kill(self) -> None:
        self.process.kill()
        self.process.wait(60)
        self.stdin.close()
        self.stdout.close()
        self.http.close()

    def __enter__(self) -> Killable:
        return self

    def __exit__(self, *_: object) -> None:
        self.kill()
