"""Runs a guard in a copy of another commit, with this environment's packages beside that commit's own."""

from __future__ import annotations

import io
import os
import subprocess
import sys
import tarfile
import tempfile
from collections.abc import Sequence
from difflib import unified_diff
from pathlib import Path

from code_lines import PACKAGES
from inventory import base_of

ROOT = Path(__file__).parents[2]


def output_at(revision: str, command: Sequence[str]) -> list[str]:
    """Return the lines that a script of `tests/guards` prints at a commit, with its arguments.

    Raises:
        SystemExit: It is no commit, or has no such guard.
    """
    packed = subprocess.run(["git", "archive", "--format=tar", revision], cwd=ROOT, capture_output=True, check=False)
    if packed.returncode:
        raise SystemExit(packed.stderr.decode())
    with tempfile.TemporaryDirectory() as folder:
        with tarfile.open(fileobj=io.BytesIO(packed.stdout)) as tar:
            tar.extractall(folder, filter="data")
        paths = dict.fromkeys(str((Path(folder) / package).parent) for package in PACKAGES.values())
        done = subprocess.run(
            [sys.executable, str(Path(folder) / "tests/guards" / command[0]), *command[1:]],
            env={**os.environ, "PYTHONPATH": os.pathsep.join(paths)},
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            check=False,
        )
    if done.returncode:
        raise SystemExit(f"{revision}: {done.stderr[-2000:]}")
    return done.stdout.splitlines()


def show_changes(revision: str, command: Sequence[str], now: list[str]) -> int:
    """Print which lines differ from those of a commit, or of the branch's base; 1 where some do, else 0."""
    diff = list(unified_diff(output_at(base_of(revision), command), now, "then", "now", n=0, lineterm=""))
    print("\n".join(line for line in diff if not line.startswith("@@")))
    return int(bool(diff))
