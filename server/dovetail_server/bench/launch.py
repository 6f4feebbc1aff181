"""Starts our own server for a measurement, and stops it."""

from __future__ import annotations

import asyncio
import os
import signal
import socket
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager, suppress
from pathlib import Path

import aiohttp

from dovetail.contracts.errors import ConfigError, DovetailError

POLL_S = 0.02
POLL_TIMEOUT = aiohttp.ClientTimeout(total=5.0)
"""The port accepts connections long before the server reads them."""
STOP_S = 30.0
MANAGED = ("--host", "--port", "--model-path", "--model")


def free_port() -> int:
    """Return a port of the loopback interface that nobody listens on."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


class Launched:
    """A server of ours in a child process."""

    def __init__(self, process: asyncio.subprocess.Process, base_url: str, started: float, log: Path) -> None:
        self.process = process
        self.base_url = base_url
        self.started = started
        self.log = log

    async def wait_ready(self, session: aiohttp.ClientSession, timeout_s: float) -> float:
        """Wait until the server would answer; returns the seconds since it was started.

        Raises:
            ConfigError: It ended with an error of the user's.
            DovetailError: It ended otherwise, or did not become ready in time.
        """
        while time.monotonic() - self.started < timeout_s:
            if self.process.returncode is not None:
                kind = ConfigError if self.process.returncode == 2 else DovetailError
                raise kind(f"the server ended with code {self.process.returncode}: {self.last_line()}")
            with suppress(aiohttp.ClientError, OSError, TimeoutError):
                async with session.get(f"{self.base_url}/readyz", timeout=POLL_TIMEOUT) as response:
                    if response.status == 200:
                        return time.monotonic() - self.started
            await asyncio.sleep(POLL_S)
        raise DovetailError(f"the server was not ready after {timeout_s:g} s: {self.last_line()}")

    def last_line(self) -> str:
        """Return the last thing the server said."""
        lines = self.log.read_text("utf-8", "replace").strip().splitlines()
        return lines[-1].removeprefix("dovetail serve: error: ") if lines else "it said nothing"

    async def stop(self) -> None:
        """Stop it as a user would, by force if it does not listen."""
        if self.process.returncode is None:
            with suppress(ProcessLookupError):
                self.process.send_signal(signal.SIGTERM)
            try:
                await asyncio.wait_for(self.process.wait(), STOP_S)
            except TimeoutError:
                self.process.kill()
        await self.process.wait()


@asynccontextmanager
async def launched(model_path: str, flags: Sequence[str]) -> AsyncIterator[Launched]:
    """Serve a model on a free port of the loopback interface while the block runs.

    Raises:
        ConfigError: The flags set what is set here.
    """
    for flag in flags:
        if flag.split("=", 1)[0].replace("_", "-") in MANAGED:
            raise ConfigError(f"{flag.split('=', 1)[0]} after `--`: set by the benchmark; leave it out")
    port = free_port()
    with tempfile.TemporaryDirectory(prefix="dovetail-bench-") as folder:
        log = Path(folder) / "server.log"
        command = [sys.executable, "-m", "dovetail_server", "serve", "--model-path", model_path]
        command += ["--host", "127.0.0.1", "--port", str(port), "--disable-access-log"]
        if "--disable-access-log" in flags:
            command.pop()
        started = time.monotonic()
        with log.open("wb") as out:
            process = await asyncio.create_subprocess_exec(
                *command, *flags, stdin=asyncio.subprocess.DEVNULL, stdout=out, stderr=out, env=dict(os.environ)
            )
        server = Launched(process, f"http://127.0.0.1:{port}", started, log)
        try:
            yield server
        finally:
            await server.stop()
