"""A server of one's own for as long as a conversation lasts."""

from __future__ import annotations

import math
import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from dovetail.contracts.errors import ConfigError, DovetailError
from dovetail_server.terminal.client import ServerClient

POLL_S = 0.02
STOP_S = 30.0


@contextmanager
def serving(
    model: str | None, flags: Sequence[str], key: str | None, timeout_s: float = math.inf
) -> Iterator[ServerClient]:
    """Serve a model, the demo without one, on a free port of this machine while the block runs.

    Raises:
        ConfigError: The server ended with an error of the user's.
        DovetailError: It ended otherwise, or was not ready in time.
    """
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = int(probe.getsockname()[1])
    theirs, ours = os.pipe()
    command = [sys.executable, "-m", "dovetail_server.cli.parent_bound", str(theirs), "serve"]
    command += [*([model] if model else []), *flags]
    command += ["--host", "127.0.0.1", "--port", str(port), "--disable-access-log", "--drain-timeout", "1"]
    # The log has no name: nothing of it is left, whatever ends this process. The server hears of that end by the pipe.
    # It has a session of its own: Ctrl-C here stops a reply, not the server.
    with tempfile.TemporaryFile() as log:
        process = subprocess.Popen(
            command, stdin=subprocess.DEVNULL, stdout=log, stderr=log, start_new_session=True, pass_fds=[theirs]
        )
        os.close(theirs)
        try:
            server = ServerClient(f"http://127.0.0.1:{port}", key)
            _wait(server, process, log.fileno(), timeout_s)
            yield server
        finally:
            _stop(process)
            os.close(ours)


def _wait(server: ServerClient, process: subprocess.Popen[bytes], log: int, timeout_s: float) -> None:
    deadline = time.monotonic() + timeout_s
    while True:
        if process.poll() is not None:
            kind = ConfigError if process.returncode == 2 else DovetailError
            raise kind(_last_line(log))
        try:
            server.get("/readyz")
            return
        except DovetailError:
            if time.monotonic() > deadline:
                raise DovetailError(f"the server was not ready after {timeout_s:g} s: {_last_line(log)}") from None
            time.sleep(POLL_S)


def _last_line(log: int) -> str:
    said = os.pread(log, os.fstat(log).st_size, 0)  # the server writes at the file's own place
    lines = said.decode("utf-8", "replace").strip().splitlines() or ["it said nothing"]
    return lines[-1].removeprefix("dovetail serve: error: ")


def _stop(process: subprocess.Popen[bytes]) -> None:
    if process.poll() is None:
        process.send_signal(signal.SIGTERM)
        try:
            process.wait(STOP_S)
        except subprocess.TimeoutExpired:
            process.kill()
    process.wait()
