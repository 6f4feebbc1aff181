"""A process that was stopped when its parent was killed ends all the same: nothing is left behind."""

from __future__ import annotations

import gc
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from dovetail.base.forks import ForkServer

PARENTS = {
    "rank": """
from multiprocessing import Pipe
from dovetail.executor.group import ProcessFollower
near, far = Pipe()
pid = ProcessFollower(far).pid
""",
    "engine": """
import socket, subprocess, tempfile
listener = socket.socket(socket.AF_UNIX)
with tempfile.TemporaryDirectory() as folder:
    listener.bind(folder + "/s")
    listener.listen()
    pid = subprocess.Popen([sys.executable, "-m", "dovetail_server.supervision.engine_main", folder + "/s"]).pid
    connection, _ = listener.accept()
""",
    "process that forks others": """
import threading
from dovetail.base.forks import ForkServer
made = []
thread = threading.Thread(target=lambda: made.append(ForkServer("dovetail.grammar.compile.child")))
thread.start()
thread.join()  # the thread that starts a process may end long before its parent
pid = made[0].pid
""",
}
WAIT = "print(pid, flush=True); time.sleep(600)"
BEGUN = 1 << (signal.SIGTERM - 1) | 1 << (signal.SIGCHLD - 1)
"""Signals, one of which each ignores from its beginning, when it has seen to being woken; a shell ignores neither."""


def state_of(pid: int) -> str:
    """Return the letter of a process's state; Z for one that is gone."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except (FileNotFoundError, ProcessLookupError):
        return "Z"


def has_begun(pid: int) -> bool:
    """Whether a process has come to its own code."""
    status = Path(f"/proc/{pid}/status").read_text()
    ignored = next(line.split()[1] for line in status.splitlines() if line.startswith("SigIgn"))
    return bool(int(ignored, 16) & BEGUN)


def eventually(condition: object, limit_s: float = 120) -> bool:
    assert callable(condition)
    deadline = time.monotonic() + limit_s
    while not condition():
        if time.monotonic() > deadline:
            return False
        time.sleep(0.02)
    return True


@pytest.mark.skipif(sys.platform != "linux", reason="other systems wake nobody")
@pytest.mark.parametrize("what", [pytest.param("rank", marks=pytest.mark.full), *list(PARENTS)[1:]])
def test_a_stopped_process_ends_with_its_parent(what: str) -> None:
    """It is woken, and finds itself alone."""
    code = f"import sys, time\n{PARENTS[what]}\n{WAIT}"
    with subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True) as parent:
        assert parent.stdout is not None
        pid = int(parent.stdout.readline())
        try:
            assert eventually(lambda: has_begun(pid))
            os.kill(pid, signal.SIGSTOP)
            assert eventually(lambda: state_of(pid) == "T")
            parent.kill()
            parent.wait(60)
            assert eventually(lambda: state_of(pid) == "Z")
        finally:
            parent.kill()
            if state_of(pid) != "Z":
                os.kill(pid, signal.SIGKILL)


def test_a_fork_server_that_is_forgotten_is_ended() -> None:
    """Nobody closed it: its process goes with the object, and no zombie stays."""
    made = ForkServer("dovetail.grammar.compile.child")
    pid = made.pid
    del made
    gc.collect()
    with pytest.raises(ProcessLookupError):
        os.kill(pid, 0)


def test_ctrl_c_does_not_reach_a_process_that_forks_others() -> None:
    """It is in no group of the terminal's: the signal would break its imports off with a traceback in the log."""
    server = ForkServer("dovetail.grammar.compile.child")
    try:
        assert os.getpgid(server.pid) != os.getpgid(0)
    finally:
        server.kill()
