"""`ChildPool`: processes that work on one job each, are killed at its time limit, and are started again."""

from __future__ import annotations

import contextlib
import os
import queue
import socket
import subprocess
import sys
import threading
import time

import msgspec

from dovetail.grammar.wire import ChildCheck, ChildJob, ChildReply, ChildStart, GoneError, receive, send

START_TIMEOUT_S = 60.0
ONE_THREAD = dict.fromkeys(("OMP_NUM_THREADS", "MKL_NUM_THREADS", "RAYON_NUM_THREADS"), "1")


class ChildTimeoutError(Exception):
    """The job took longer than it may."""


class ChildDiedError(Exception):
    """The process died of the job."""


class ChildProcess:
    """One process and the socket to it. `start` None: it judges texts only and needs no plugin."""

    def __init__(self, start: ChildStart | None) -> None:
        """Start the process and wait until it has loaded.

        Raises:
            ChildDiedError: It could not start.
        """
        ours, theirs = socket.socketpair()
        with theirs:
            self._process = subprocess.Popen(
                [sys.executable, "-m", "dovetail.grammar.child", str(theirs.fileno())],
                pass_fds=(theirs.fileno(),),
                stdin=subprocess.DEVNULL,
                env={**os.environ, **ONE_THREAD},
            )
        self._channel = ours
        try:
            self.run(start or ChildCheck(schema="true", texts=[], timeout_s=START_TIMEOUT_S), START_TIMEOUT_S)
        except ChildTimeoutError:
            raise ChildDiedError(f"it did not start within {START_TIMEOUT_S:.0f} s") from None

    @property
    def pid(self) -> int:
        """The process id."""
        return self._process.pid

    def run(self, job: ChildStart | ChildJob | ChildCheck, timeout_s: float) -> ChildReply:
        """Work on one job. After an error the process is gone.

        Raises:
            ChildTimeoutError: It was killed at the time limit.
            ChildDiedError: It died.
        """
        try:
            self._channel.settimeout(timeout_s)
            send(self._channel, job)
            return msgspec.msgpack.decode(receive(self._channel), type=ChildReply)
        except TimeoutError:
            self.kill()
            raise ChildTimeoutError from None
        except (GoneError, msgspec.MsgspecError) as error:
            self.kill()
            raise ChildDiedError(f"exit code {self._process.returncode}: {error}") from None

    def kill(self) -> None:
        """End it now and reap it."""
        with contextlib.suppress(ProcessLookupError):
            self._process.kill()
        self._process.wait()
        self._channel.close()


class ChildPool:
    """Up to `max_children` processes, started when needed. Thread-safe: one job per calling thread."""

    def __init__(self, start: ChildStart | None, max_children: int) -> None:
        self._start = start
        self._slots: queue.LifoQueue[ChildProcess | None] = queue.LifoQueue()
        for _ in range(max_children):
            self._slots.put(None)
        self._lock = threading.Lock()
        self._living: set[ChildProcess] = set()
        self._closed = False

    @property
    def pids(self) -> list[int]:
        """Ids of the living processes."""
        with self._lock:
            return [child.pid for child in self._living]

    def run(self, job: ChildJob | ChildCheck, timeout_s: float) -> ChildReply:
        """Run a job in a process of the pool; waiting for a free one counts, starting one does not.

        Raises:
            ChildTimeoutError: The job took longer than `timeout_s`; its process was killed.
            ChildDiedError: The process died of the job, or could not be started.
        """
        deadline = time.monotonic() + timeout_s
        try:
            child = self._slots.get(timeout=timeout_s)
        except queue.Empty:
            raise ChildTimeoutError from None
        try:
            waited = time.monotonic()
            child = child or self._spawn()
            deadline += time.monotonic() - waited
            reply = child.run(job, max(0.1, deadline - time.monotonic()))
        except (ChildTimeoutError, ChildDiedError):
            self._forget(child)
            child = None
            raise
        finally:
            self._slots.put(child)
        return reply

    def warm_up(self) -> None:
        """Start one process ahead of the first job."""
        child = self._slots.get()
        try:
            child = child or self._spawn()
        except ChildDiedError:
            child = None
        finally:
            self._slots.put(child)

    def close(self) -> None:
        """End all processes; a job in one of them ends with `ChildDiedError`."""
        with self._lock:
            self._closed = True
            living, self._living = self._living, set()
        for child in living:
            child.kill()

    def _spawn(self) -> ChildProcess:
        child = ChildProcess(self._start)
        with self._lock:
            if not self._closed:
                self._living.add(child)
                return child
        child.kill()
        raise ChildDiedError("the pool was closed")

    def _forget(self, child: ChildProcess | None) -> None:
        with self._lock:
            if child is not None:
                self._living.discard(child)
