"""A clean environment: the built wheels, and nothing of this checkout."""

from __future__ import annotations

import os
import shutil
import socket
import subprocess
import sys
import venv
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import requests

from dovetail.utils import wait_for_server


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


ROOT = Path(__file__).parents[2]
EXAMPLES = sorted(path.parent for path in (ROOT / "docs/examples").glob("*/pyproject.toml"))
SMALLEST = ROOT / "docs/examples/dovetail-acme-parser"
PYTEST_PLUGINS = ("schemathesis", "hypothesis", "_hypothesis")
"""pytest loads both wherever they are installed, and takes two seconds for it; a plugin author need not have them."""


class CleanEnv:
    """A virtual environment with our wheels; other requirements are those of the running environment."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.env = {key: value for key, value in os.environ.items() if key != "PYTHONPATH"}
        venv.create(folder / "env", with_pip=False)
        self.bin = folder / "env/bin"
        (self.site,) = (folder / "env/lib").glob("python3*/site-packages")
        (self.site / "requirements.pth").write_text(str(link_requirements(folder / "requirements")))

    def install(self, *wheels: Path) -> None:
        pip = [sys.executable, "-m", "pip", "--python", str(self.bin / "python")]
        flags = [
            "--quiet",
            "--no-deps",
            "--no-compile",  # what is imported is compiled then: a fifth of all files
            "--no-index",
            "--no-build-isolation",
            "--no-warn-script-location",
            "--disable-pip-version-check",
        ]
        self.run(*pip, "install", *flags, *map(str, wheels))

    def run(self, *command: str, code: int = 0) -> str:
        """Run a command outside the tree and return what it prints, standard error included."""
        done = subprocess.run(
            command,
            cwd=self.folder,
            env=self.env,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            check=False,
        )
        assert done.returncode == code, done.stdout
        return done.stdout

    def python(self, *lines: str) -> str:
        return self.run(str(self.bin / "python"), "-c", "\n".join(lines))


def link_requirements(folder: Path) -> Path:
    """Fill a folder with links to what is installed here, except Dovetail, its plugins, and slow plugins of pytest."""
    folder.mkdir()
    for site in {Path(entry) for entry in sys.path if entry.endswith(("site-packages", "dist-packages"))}:
        for item in site.iterdir():
            ours = "dovetail" in item.name or item.suffix == ".pth"
            slow = item.name.startswith(PYTEST_PLUGINS)
            if not ours and not slow and not (folder / item.name).exists():
                (folder / item.name).symlink_to(item)
    return folder


def copy_of(project: Path, env: CleanEnv) -> Path:
    """Copy a project's folder beside an environment: a build writes into it."""
    return Path(shutil.copytree(project, env.folder / "src" / project.name))


def build_wheel(project: Path, target: Path) -> Path:
    """Build the wheel of a project in `target`; it is built once for all tests, where it was first asked for."""
    if project in _built:
        return _built[project]
    before = set(target.glob("*.whl"))
    command = [sys.executable, "-m", "hatchling", "build", "-t", "wheel", "-d", str(target)]
    subprocess.run(command, cwd=project, check=True, capture_output=True)
    (_built[project],) = set(target.glob("*.whl")) - before
    return _built[project]


_built: dict[Path, Path] = {}


@contextmanager
def serving(clean: CleanEnv, *flags: str) -> Iterator[str]:
    """Run a server of the clean environment; its address."""
    port = free_port()
    command = [str(clean.bin / "dovetail"), "serve", *flags, "--port", str(port), "--num-threads", "1"]
    with (clean.folder / "log").open("w") as log:
        env = {**clean.env, "DOVETAIL_GRAMMAR_BACKEND": "none", "DOVETAIL_BODY_PROCESSES": "0"}  # flags win
        server = subprocess.Popen(command, cwd=clean.folder, env=env, stdout=log, stderr=log)
    try:
        wait_for_server(f"http://127.0.0.1:{port}", timeout=120)
        yield f"http://127.0.0.1:{port}"
    finally:
        server.terminate()
        code = server.wait(60)
        print((clean.folder / "log").read_text())
    assert code == 0


def chat(base: str, **fields: Any) -> Any:
    """Ask the served model; the reply."""
    model = requests.get(f"{base}/v1/models", timeout=60).json()["data"][0]["id"]
    body = {"model": model, "messages": [{"role": "user", "content": "What is the capital of France?"}], **fields}
    reply = requests.post(f"{base}/v1/chat/completions", json=body, timeout=60)
    assert reply.status_code == 200, reply.text
    return reply.json()
