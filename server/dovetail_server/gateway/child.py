"""A worker's process: started, told to end, and started again when it ends by itself."""

from __future__ import annotations

import asyncio
import contextlib
import errno
import logging
import os
import signal
import socket
import sys
import time
from collections import deque
from io import FileIO
from typing import TYPE_CHECKING, Any

from dovetail.contracts.errors import ConfigError, DovetailError
from dovetail_server.gateway.relayed_log import MAX_LINE_BYTES, WorkerLog
from dovetail_server.gateway.worker_settings import worker_config, worker_environment

if TYPE_CHECKING:
    from dovetail_server.gateway.fleet import Worker
    from dovetail_server.settings.serve import ServeSettings
    from dovetail_server.supervision.supervisor import Supervisor

logger = logging.getLogger("dovetail.server")
FIRST_DELAY_S = 0.2
MAX_DELAY_S = 10.0
END_S = 10.0
"""Beyond `--drain-timeout`: then a worker that was told to end is killed."""
ADVICE = {
    errno.EAGAIN: "let this user or container have more processes (ulimit -u, the container's limit), or end others",
    errno.ENOMEM: "free memory on this machine, or give the container more",
    errno.EMFILE: "raise the limit of open files (ulimit -n)",
    errno.ENFILE: "raise this machine's limit of open files (fs.file-max)",
    **dict.fromkeys(
        (errno.ENOENT, errno.EACCES, errno.ENOTDIR, errno.ENOEXEC),
        f"{sys.executable} has to be there and run: mend the installation and start the server again",
    ),
}
"""What to do where a process cannot be started."""


def reserve_port() -> socket.socket:
    """Return a socket that keeps a free port of this machine from others who ask for any: a worker may still take it.

    It is bound and does not listen, and both sockets say SO_REUSEADDR.
    """
    held = socket.socket()
    held.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    held.bind(("127.0.0.1", 0))
    return held


class Child:
    """The process of one worker, and those that come after it."""

    def __init__(
        self, worker: Worker, settings: ServeSettings, port: int, share: dict[str, Any], tasks: Supervisor
    ) -> None:
        """Start nothing yet."""
        self._tasks = tasks
        self.worker = worker
        self.settings = settings
        self.failure: DovetailError | None = None
        """Why it is not started again."""
        self.num_starts = 0
        self._config = worker_config(settings, port, share).encode()
        self._process: asyncio.subprocess.Process | None = None
        self._crashes: deque[float] = deque()
        self._is_ending = False
        self._is_restarting = False
        worker.when_stuck.add(self.kill)

    @property
    def pid(self) -> int | None:
        """The process's number while it runs."""
        process = self._process
        return None if process is None or process.returncode is not None else process.pid

    async def keep_running(self) -> None:
        """Run the process, one after the other, until it is to end or cannot be helped; see `failure`."""
        while not self._is_ending and self.failure is None:
            log = WorkerLog(self.worker.tag)
            began = time.monotonic()
            try:
                how = ended(code := await self._run_once(log))
                reason = log.reason
            except (OSError, RuntimeError) as error:  # a RuntimeError where there is no room for a thread
                how, code, reason = "could not be started", None, not_started(error)
            if self._is_ending:
                return
            if self._is_restarting and code is not None:
                self._is_restarting = False
                continue
            self._note_exit(how, code, reason)
            if self.failure is None:
                recent = min(len(self._crashes), 8)
                delay_s = min(MAX_DELAY_S, FIRST_DELAY_S * 2 ** (recent - 1))
                await asyncio.sleep(0 if time.monotonic() - began > MAX_DELAY_S else delay_s)

    def _note_exit(self, how: str, code: int | None, reason: str | None) -> None:
        """Note a death, or a start that came to nothing, and whether the process is started again."""
        tag, said = self.worker.tag, f": {reason}" if reason else ""
        if code == 2 and reason is not None and not self.worker.has_served:
            self.failure = ConfigError(reason)
            return
        now, window = time.monotonic(), self.settings.engine_restart_window
        self._crashes.append(now)
        while self._crashes and self._crashes[0] < now - window:
            self._crashes.popleft()
        most = self.settings.max_engine_restarts
        if not self.worker.has_served or len(self._crashes) > most:
            often = f" for the {len(self._crashes)}. time within {window:g} s (--max-engine-restarts {most})"
            self.failure = DovetailError(f"worker {tag} {how}{often if most and self.worker.has_served else ''}{said}")
            return
        logger.warning("Worker %s %s%s; it is started again.", tag, how, said)

    async def _run_once(self, log: WorkerLog) -> int:
        """Start the process and wait for its end; returns its exit code, negative for a signal.

        Raises:
            OSError: It cannot be started.
            RuntimeError: There is no room for the thread that writes its settings.
        """
        with contextlib.ExitStack() as ends:
            theirs, _ = _pipe(ends)  # our end is closed with this process: how the worker hears of it
            config, writer = _pipe(ends)
            command = [sys.executable, "-m", "dovetail_server.cli.parent_bound", str(theirs.fileno()), "serve"]
            command += ["--config", f"/dev/fd/{config.fileno()}"]
            self._process = process = await asyncio.create_subprocess_exec(
                *command,
                stdin=asyncio.subprocess.DEVNULL,
                stdout=asyncio.subprocess.PIPE,
                stderr=asyncio.subprocess.STDOUT,
                pass_fds=(theirs.fileno(), config.fileno()),
                env=worker_environment(),
                start_new_session=True,  # Ctrl-C is for this process, which ends its workers in order
                limit=MAX_LINE_BYTES,
            )
            self.num_starts += 1
            theirs.close()
            config.close()
            lines = self._tasks.start("worker log", log.follow(_stdout(process)))
            try:
                await asyncio.to_thread(_write, writer, self._config)
            except RuntimeError:
                self.kill()  # without its settings it would be another server
                await process.wait()
                raise
            code = await process.wait()
            self.worker.is_lost("its process has ended")
            # Its engine holds the other end, too: when that has ended, its memory is free for the next one.
            await asyncio.wait({lines}, timeout=END_S)
            await self._tasks.stop([lines])
            return code

    def restart(self) -> None:
        """Have it end as by SIGTERM, and started again; one that has ended is about to be."""
        self._is_restarting = self.pid is not None
        self._signal(signal.SIGTERM)

    def kill(self) -> None:
        """End it by force; it is started again."""
        self._signal(signal.SIGKILL)

    async def end(self, *, at_once: bool = False) -> None:
        """Have it end, with its requests finished unless it shall be `at_once`; by force if it takes too long."""
        self._is_ending = True
        self._signal(signal.SIGTERM)
        if at_once:
            self._signal(signal.SIGINT)  # its second signal; two of one kind that come together are one
        process = self._process
        if process is None:
            return
        try:
            await asyncio.wait_for(process.wait(), self.settings.drain_timeout + END_S)
        except TimeoutError:
            logger.error("Worker %s does not end; it is killed.", self.worker.tag)
            self._signal(signal.SIGKILL)
            await process.wait()

    def _signal(self, number: signal.Signals) -> None:
        if self.pid is not None and self._process is not None:
            with contextlib.suppress(ProcessLookupError):
                self._process.send_signal(number)


def ended(code: int) -> str:
    """Say how a process ended."""
    return f"ended by signal {-code}" if code < 0 else f"ended with code {code}"


def not_started(error: OSError | RuntimeError) -> str:
    """Say why a process could not be started, and what helps."""
    advice = ADVICE.get((error.errno or 0) if isinstance(error, OSError) else errno.EAGAIN)
    return f"{error}; {advice}" if advice else str(error)


def _pipe(ends: contextlib.ExitStack) -> tuple[FileIO, FileIO]:
    """Return the two ends of a pipe, which `ends` closes if nobody did before."""
    reader, writer = os.pipe()
    return ends.enter_context(FileIO(reader, "rb")), ends.enter_context(FileIO(writer, "wb"))


def _write(pipe: FileIO, data: bytes) -> None:
    """Write everything and close: the reader may have ended before."""
    with contextlib.suppress(BrokenPipeError), pipe:
        while data:
            data = data[pipe.write(data) :]


def _stdout(process: asyncio.subprocess.Process) -> asyncio.StreamReader:
    if process.stdout is None:
        raise DovetailError("a worker's output cannot be read")
    return process.stdout
