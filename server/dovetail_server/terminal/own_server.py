"""A server of one's own for as long as a conversation lasts."""

from __future__ import annotations

import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from dovetail.errors import ConfigError, DovetailError
from dovetail_server.terminal.client import Server

POLL_S = 0.1
STOP_S = 20.0


@contextmanager
def serving(model: str | None, flags: Sequence[str], key: str | None) -> Iterator[Server]:
    """Serve a model, the demo without one, on a free port of this machine while the block runs.

    Raises:
        ConfigError: The server ended with an error of the user's.
        DovetailError: It ended otherwise.
    """
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = int(probe.getsockname()[1])
    command = [sys.executable, "-m", "dovetail_server", "serve", *([model] if model else []), *flags]
    command += ["--host", "127.0.0.1", "--port", str(port), "--disable-access-log", "--drain-timeout", "1"]
    with tempfile.TemporaryDirectory(prefix="dovetail-chat-") as folder:
        log = Path(folder) / "server.log"
        with log.open("wb") as out:
            # In a session of its own: Ctrl-C here stops a reply, not the server.
            process = subprocess.Popen(
                command, stdin=subprocess.DEVNULL, stdout=out, stderr=out, start_new_session=True
            )
        try:
            server = Server(f"http://127.0.0.1:{port}", key)
            _wait(server, process, log)
            yield server
        finally:
            _stop(process)


def _wait(server: Server, process: subprocess.Popen[bytes], log: Path) -> None:
    while True:
        if process.poll() is not None:
            kind = ConfigError if process.returncode == 2 else DovetailError
            lines = log.read_text("utf-8", "replace").strip().splitlines() or ["it said nothing"]
            raise kind(lines[-1].removeprefix("dovetail serve: error: "))
        try:
            server.get("/readyz")
            return
        except DovetailError:
            time.sleep(POLL_S)


def _stop(process: subprocess.Popen[bytes]) -> None:
    if process.poll() is None:
        process.send_signal(signal.SIGTERM)
        try:
            process.wait(STOP_S)
        except subprocess.TimeoutExpired:
            process.kill()
    process.wait()
