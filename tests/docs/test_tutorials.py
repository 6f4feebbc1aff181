"""Each tutorial works when followed word for word, in a clean environment with the built wheel."""

from __future__ import annotations

import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import pytest
from clean_env import ROOT, CleanEnv, build_wheel, free_port
from warm_starts import WarmStarts

from dovetail.plugins import KINDS
from dovetail.utils import wait_for_server

TUTORIALS = ROOT / "docs/tutorials"
NO_CACHE = "-pno:cacheprovider"
SIMPLE = re.compile(r"\w[\w./ =-]*")
"""A line that means the same without a shell."""
MAY_FAIL = " || true"


class Block(NamedTuple):
    """A fenced block: its language, its text, and the file that the line before it names, if any."""

    language: str
    text: str
    file: str | None


def blocks(page: str) -> Iterator[Block]:
    for match in re.finditer(r"(?:`([\w./-]+)`:\n\n)?^```(\w+)\n(.*?)^```$", page, re.MULTILINE | re.DOTALL):
        yield Block(match[2], match[3], match[1])


class Reader:
    """Someone who follows a tutorial: writes its files, runs its commands, and compares what is printed."""

    def __init__(self, env: CleanEnv, folder: Path, more: dict[str, str]) -> None:
        self.served = {**env.env, **more}
        self.env, self.folder, self.cwd = env, folder, folder
        self.port = free_port()
        self.entries = {
            "dovetail": [str(env.bin / "dovetail")],
            "pytest": [str(env.bin / "python"), "-m", "pytest", NO_CACHE],
            "python": [str(env.bin / "python")],
        }
        self.server: subprocess.Popen[bytes] | None = None
        self.printed = ""
        folder.mkdir()

    def follow(self, page: str) -> None:
        for block in blocks(page):
            if block.file is not None:
                (self.folder / block.file).write_text(block.text, encoding="utf-8")
            elif block.language == "bash":
                self.shell(block.text)
            elif block.language == "python":
                text = block.text.replace(":30000", f":{self.port}")
                self.printed = self.run([str(self.env.bin / "python"), "-c", text])
            elif block.language == "text":
                expected = re.escape(block.text.strip()).replace("…", ".*")
                assert re.fullmatch(expected, self.printed.strip(), re.DOTALL), self.printed

    def shell(self, text: str) -> None:
        if text.startswith("dovetail serve"):
            self.serve(text.split()[2:])
            return
        self.printed = "".join(map(self.line, text.splitlines()))

    def line(self, line: str) -> str:
        """What a line of bash prints; what needs no shell is run without, so that it can be forked."""
        simple = line.removesuffix(MAY_FAIL)
        words = simple.split()
        if words[0] in self.entries and SIMPLE.fullmatch(simple):
            return self.run([*self.entries[words[0]], *words[1:]], may_fail=line != simple)
        return self.run(["bash", "-e", "-c", line + "\npwd >&2"])

    def serve(self, flags: list[str]) -> None:
        command = [str(self.env.bin / "dovetail"), "serve", *flags, "--port", str(self.port), "--num-threads", "1"]
        with (self.folder / "log").open("w") as log:
            self.server = subprocess.Popen(command, cwd=self.folder, env=self.served, stdout=log, stderr=log)
        wait_for_server(f"http://127.0.0.1:{self.port}", timeout=120)

    def run(self, command: list[str], *, may_fail: bool = False) -> str:
        done = subprocess.run(command, cwd=self.cwd, env=self.env.env, capture_output=True, text=True, check=False)
        assert may_fail or done.returncode == 0, done.stdout + done.stderr
        moved = done.stderr.strip().splitlines()
        if command[0] == "bash" and moved:
            self.cwd = Path(moved[-1])
        return done.stdout

    def leave(self) -> None:
        if self.server is not None:
            self.server.terminate()
            assert self.server.wait(60) == 0


@pytest.fixture(scope="module")
def env(tmp_path_factory: pytest.TempPathFactory, warm: WarmStarts) -> CleanEnv:
    """The wheel in an environment whose `pip` works offline and whose `pytest` keeps no cache."""
    folder = tmp_path_factory.mktemp("tutorials")
    made = CleanEnv(folder)
    made.install(build_wheel(ROOT, folder))
    pip = f"{sys.executable} -m pip --python {made.bin}/python"
    flags = "--quiet --no-deps --no-index --no-build-isolation --disable-pip-version-check --force-reinstall"
    scripts = {
        "pip": f'#!/bin/sh\ncommand=$1; shift\nexec {pip} "$command" {flags} "$@"\n',
        "pytest": f'#!/bin/sh\nexec {made.bin}/python -m pytest {NO_CACHE} "$@"\n',
    }
    for name, text in scripts.items():
        (made.bin / name).write_text(text)
        (made.bin / name).chmod(0o755)
    warm.add(made.bin / "python")
    made.env["PATH"] = f"{made.bin}:{made.env['PATH']}"
    return made


def test_every_kind_has_a_tutorial() -> None:
    """There is a page for each kind, and the index links to it."""
    index = (TUTORIALS / "README.md").read_text("utf-8")
    for kind in KINDS:
        assert (TUTORIALS / f"{kind}.md").exists()
        assert f"({kind}.md)" in index


@pytest.mark.full
@pytest.mark.install
@pytest.mark.parametrize(
    "kind", ["hooks", *(pytest.param(kind, marks=pytest.mark.full) for kind in sorted(KINDS) if kind != "hooks")]
)
def test_the_tutorial_works(env: CleanEnv, tmp_path: Path, kind: str, light_servers: dict[str, str]) -> None:
    """Every block of the page runs as it stands, and prints what the page says."""
    reader = Reader(env, tmp_path / "work", light_servers)
    try:
        reader.follow((TUTORIALS / f"{kind}.md").read_text("utf-8"))
    finally:
        reader.leave()
