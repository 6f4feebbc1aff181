"""Directories of sockets: no killed server leaves one for ever, and no living one loses its own."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from dovetail_server.supervision.process_handle import PREFIX, SocketDir, remove_stale

HOLD = """
import sys, socket
from dovetail_server.supervision.process_handle import SocketDir
place = SocketDir()
socket.socket(socket.AF_UNIX).bind(str(place.path))
print(place.path, flush=True)
sys.stdin.read()
"""


@pytest.fixture
def temporary(monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A directory for temporary files of our own, of a short name."""
    with tempfile.TemporaryDirectory(prefix="dt-", dir="/tmp") as name:
        monkeypatch.setattr(tempfile, "tempdir", name)
        monkeypatch.setenv("TMPDIR", name)
        yield Path(name)


def test_a_long_name_of_the_directory_is_no_hindrance(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A socket's path has some hundred bytes at most; there are directories for temporary files that are longer."""
    long = tmp_path / ("x" * 90)
    long.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(long))
    place = SocketDir()
    try:
        with socket.socket(socket.AF_UNIX) as bound:
            bound.bind(str(place.path))
    finally:
        place.close()


def holder() -> tuple[subprocess.Popen[str], Path]:
    """Start a process with a socket."""
    process = subprocess.Popen([sys.executable, "-c", HOLD], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    return process, Path(process.stdout.readline().strip())


def end(process: subprocess.Popen[str]) -> None:
    process.kill()
    process.communicate(timeout=60)


def test_what_a_killed_server_left_is_removed_and_what_a_living_one_has_is_not(temporary: Path) -> None:
    """Stopped is not dead."""
    (dead, left), (alive, kept) = holder(), holder()
    try:
        end(dead)
        os.kill(alive.pid, signal.SIGSTOP)
        mine = SocketDir()
        remove_stale()
        assert not left.parent.exists()
        assert kept.is_socket()
        assert mine.path.parent.is_dir()
        assert mine.path.parent.stat().st_mode & 0o777 == 0o700
        mine.close()
        assert [each.name for each in temporary.iterdir()] == [kept.parent.name]
    finally:
        end(alive)
    remove_stale()
    assert not list(temporary.iterdir())


def test_nothing_else_is_touched(temporary: Path) -> None:
    """What is not named so, links, files, and what somebody put into a directory."""
    (temporary / "dovetail-check-1").mkdir()
    (temporary / f"{PREFIX}file").write_text("x")
    (temporary / f"{PREFIX}link").symlink_to(temporary / "dovetail-check-1")
    full = temporary / f"{PREFIX}full"
    full.mkdir()
    (full / "engine.sock").touch()
    (full / "precious").write_text("x")
    before = sorted(each.name for each in temporary.iterdir())
    remove_stale()
    assert sorted(each.name for each in temporary.iterdir()) == before
    assert (full / "precious").read_text() == "x"


def test_a_directory_that_is_removed_before_it_is_locked_is_made_again(
    temporary: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Another server that starts may take a new one for left behind."""
    make, made = tempfile.mkdtemp, []

    def hasty(*args: object, **options: object) -> str:
        made.append(make(*args, **options))  # type: ignore[call-overload]
        if len(made) == 1:
            remove_stale()
        return str(made[-1])

    monkeypatch.setattr(tempfile, "mkdtemp", hasty)
    place = SocketDir()
    assert [Path(path).exists() for path in made] == [False, True]
    assert str(place.path.parent) == made[1]
    place.close()
