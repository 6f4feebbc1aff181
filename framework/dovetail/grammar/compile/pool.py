"""`WorkerPool`: jobs in processes that are killed at their time limit, forked from one that has everything loaded."""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Sequence

import msgspec

from dovetail.base.forks import ForkServer, ForkStartError, ForkTemplate, GoneError, kill_process, receive, send
from dovetail.grammar.spec.wire import MIN_S, ChildBegun, ChildCheck, ChildJob, ChildReply, ChildStart, time_left

START_S = 60.0
"""What jobs wait for the first process, at most, beside the time that is theirs: on a busy machine it takes seconds."""

GRACE_S = 0.25
"""After a job's time limit, which its process keeps itself; a process that is still there then is killed."""


class ChildTimeoutError(Exception):
    """The job took longer than it may."""


class ChildDiedError(Exception):
    """The job's process died, or could not be started."""


class ChildStartError(ChildDiedError):
    """The process that starts the others could not be started, or not in time."""


class WorkerPool:
    """Up to `max_jobs` jobs at a time. Thread-safe: a job blocks the thread that brings it."""

    def __init__(self, start: ChildStart, max_jobs: int) -> None:
        """Start nothing yet."""
        self._fork_server = ForkTemplate("dovetail.grammar.compile.child", start)
        self._slots = threading.Semaphore(max_jobs)
        self._lock = threading.Lock()
        self._working: set[int] = set()

    @property
    def is_ready(self) -> bool:
        """Whether a job begins as soon as it comes."""
        return self._fork_server.is_ready

    @property
    def pids(self) -> list[int]:
        """Ids of the processes that work on a job."""
        with self._lock:
            return list(self._working)

    def run(self, job: ChildJob | ChildCheck, timeout_s: float) -> ChildReply:
        """Run a job in a process of its own; waiting for others' jobs, and for the first process to start, counts.

        Raises:
            ChildTimeoutError: The job took longer than `timeout_s` and was killed.
            ChildStartError: There was no process for it in that time.
            ChildDiedError: Its process died.
        """
        began = time.monotonic()
        if not self._slots.acquire(timeout=timeout_s):
            raise ChildTimeoutError
        try:
            for _ in range(2):
                server = self._get_fork_server(timeout_s - (time.monotonic() - began))
                job = msgspec.structs.replace(job, timeout_s=max(MIN_S, timeout_s - (time.monotonic() - began)))
                try:
                    with server.fork() as channel:
                        return self._follow(channel, job)
                except ForkStartError as error:
                    raise ChildStartError(str(error)) from None
                except GoneError:  # before the job began
                    self._fork_server.discard(server)
            raise ChildStartError("its process did not start")
        finally:
            self._slots.release()

    def warm_up(self) -> None:
        """Begin to start the fork server ahead of the first job, which tries again where it fails, and says so."""
        self._fork_server.ready()

    def wait_ready(self, timeout_s: float) -> None:
        """Wait until jobs begin as soon as they come.

        Raises:
            ChildStartError: That could not be, or not in time.
        """
        self._get_fork_server(timeout_s)

    def close(self) -> None:
        """End all processes; a job in one of them ends with `ChildDiedError`."""
        self._fork_server.close()
        for pid in self.pids:
            kill_process(pid)

    def _follow(self, channel: socket.socket, job: ChildJob | ChildCheck) -> ChildReply:
        """Send a job to the process that waits for it, and wait for the reply.

        Raises:
            GoneError: The process, or the one that was to start it, ended before the job began.
        """
        pid, began = 0, time.monotonic()
        try:
            channel.settimeout(job.timeout_s + GRACE_S)
            job = msgspec.structs.replace(job, sent=began)
            send(channel, job)
            pid = msgspec.msgpack.decode(receive(channel), type=ChildBegun).pid
            with self._lock:
                self._working.add(pid)
            channel.settimeout(time_left(job) + GRACE_S)
            return msgspec.msgpack.decode(receive(channel), type=ChildReply)
        except TimeoutError:
            if pid:
                kill_process(pid)
            raise ChildTimeoutError from None
        except (GoneError, msgspec.MsgspecError) as error:
            if not pid:
                raise
            if time.monotonic() - began >= job.timeout_s:
                raise ChildTimeoutError from None
            raise ChildDiedError(str(error)) from None
        finally:
            with self._lock:
                self._working.discard(pid)

    def _get_fork_server(self, timeout_s: float) -> ForkServer:
        try:
            return self._fork_server.get(max(0.0, timeout_s))
        except ForkStartError as error:
            raise ChildStartError(str(error)) from None


# Judging a finished text by its JSON Schema: the last word where enforcement was not full.
#
# Done in a process of its own (`child`): a pattern in a schema can keep Python's matcher busy for ever.

TIMEOUT_S = 1.5
"""With the time of a compilation, an answer takes six seconds at most; a text is validated in milliseconds."""


class FinalValidator:
    """Judges texts in a child process, started at the first one at the latest. Thread-safe."""

    def __init__(self) -> None:
        self._pool = WorkerPool(ChildStart(), 1)
        self._is_early = False

    def warm_up(self) -> None:
        """Begin to start the process ahead of the first text, which then waits for it no longer than for a verdict."""
        self._is_early = True
        self._pool.warm_up()

    def validate(self, schema: str, texts: Sequence[str]) -> list[bool | None]:
        """Return for each text whether it conforms; None where that could not be found out in time. Blocks."""
        job = ChildCheck(schema=schema, texts=list(texts), timeout_s=TIMEOUT_S)
        try:
            self._pool.wait_ready(TIMEOUT_S if self._is_early else START_S)
            reply = self._pool.run(job, TIMEOUT_S)
        except (ChildTimeoutError, ChildDiedError):
            return [None] * len(texts)
        return [None] * len(texts) if reply.error is not None else list(reply.validities)

    def close(self) -> None:
        """End the process."""
        self._pool.close()
