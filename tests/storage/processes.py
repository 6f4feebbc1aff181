"""Servers in processes of their own, for tests that kill them."""

from __future__ import annotations

import json
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
        self.process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
        if self.process.stdout is None:
            raise RuntimeError("no pipe")
        with self.process.stdout:
            port = int(self.process.stdout.readline())
        self.base = f"http://127.0.0.1:{port}"
        self.http = requests.Session()
        self.api = Api(self)

    def post(self, path: str, body: Any = None, **kwargs: Any) -> requests.Response:
        if body is not None:
            kwargs["json"] = body
        return self.http.post(self.base + path, timeout=60, **kwargs)

    def get(self, path: str, **kwargs: Any) -> requests.Response:
        return self.http.get(self.base + path, timeout=60, **kwargs)

    def kill(self) -> None:
        self.process.kill()
        self.process.wait(60)
        self.http.close()

    def __enter__(self) -> Killable:
        return self

    def __exit__(self, *_: object) -> None:
        self.kill()
