"""The server that `dovetail chat` starts for itself."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

pytestmark = pytest.mark.usefixtures("light_servers")
CODE = """
import time
from dovetail_server.terminal.own_server import serving
with serving(None, ["--num-threads", "1", "--log-level", "warning"], None) as server:
    print("ready", flush=True)
    time.sleep(600)
"""


def below(pid: int) -> list[int]:
    """All processes that a process has started, and theirs."""
    try:
        children = [int(word) for word in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]
    except OSError:
        return []
    return [*children, *(each for child in children for each in below(child))]


def is_there(pid: int) -> bool:
    """Whether a process has not ended."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


@pytest.mark.skipif(sys.platform != "linux", reason="/proc tells of children")
def test_it_ends_with_the_conversation_however_that_ends(tmp_path: Path) -> None:
    """Killed outright, the terminal leaves no server, no engine and no file behind, not even if stopped."""
    environment = {**os.environ, "TMPDIR": str(tmp_path)}
    with subprocess.Popen([sys.executable, "-c", CODE], stdout=subprocess.PIPE, env=environment) as chat:
        assert chat.stdout is not None
        assert chat.stdout.readline() == b"ready\n"
        started = below(chat.pid)
        assert len(started) >= 2
        os.kill(started[0], signal.SIGSTOP)
        chat.kill()
        chat.wait(60)
    deadline = time.monotonic() + 60
    while any(map(is_there, started)):
        assert time.monotonic() < deadline, [pid for pid in started if is_there(pid)]
        time.sleep(0.05)
    assert not [path for path in tmp_path.iterdir() if path.name.startswith("dovetail-chat")]
