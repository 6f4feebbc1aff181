"""`ChildPool`: jobs in processes that are killed at their time limit, forked from one that has everything loaded."""

from __future__ import annotations

import contextlib
import socket
import threading
import time

import msgspec

from dovetail.forks import START_TIMEOUT_S, ForkServer, ForkStartError, GoneError, kill_process, receive, send
from dovetail.grammar.wire import MIN_S, ChildBegun, ChildCheck, ChildJob, ChildReply, ChildStart, time_left

GRACE_S = 1.0
"""After a job's time limit, which its process keeps itself; a process that is still there then is killed."""


class ChildTimeoutError(Exception):
    """The job took longer than it may."""


class ChildDiedError(Exception):
    """The job's process died, or could not be started."""


class ChildPool:
    """Up to `max_jobs` jobs at a time. Thread-safe: a job blocks the thread that brings it."""

    def __init__(self, start: ChildStart, max_jobs: int) -> None:
        """Start nothing yet."""
        self._start = start
        self._slots = threading.Semaphore(max_jobs)
        self._lock = threading.Lock()
        self._starting = threading.Lock()
        self._template: ForkServer | None = None
        self._working: set[int] = set()
        self._closed = False

    @property
    def template_pid(self) -> int | None:
        """Id of the process that forks the others; None while there is none."""
        template = self._template
        return None if template is None else template.pid

    @property
    def pids(self) -> list[int]:
        """Ids of the processes that work on a job."""
        with self._lock:
            return list(self._working)

    def run(self, job: ChildJob | ChildCheck, timeout_s: float) -> ChildReply:
        """Run a job in a process of its own; waiting for others' jobs counts, starting the first process does not.

        Raises:
            ChildTimeoutError: The job took longer than `timeout_s` and was killed.
            ChildDiedError: Its process died, or could not be started.
        """
        began = time.monotonic()
        if not self._slots.acquire(timeout=timeout_s):
            raise ChildTimeoutError
        try:
            job = msgspec.structs.replace(job, timeout_s=max(MIN_S, timeout_s - (time.monotonic() - began)))
            for _ in range(2):
                template = self._get_template()
                try:
                    with template.fork() as channel:
                        return self._follow(channel, job)
                except GoneError:  # before the job began
                    self._discard(template)
            raise ChildDiedError("its process did not start")
        finally:
            self._slots.release()

    def warm_up(self) -> None:
        """Start the template ahead of the first job."""
        with contextlib.suppress(ChildDiedError):  # the first job tries again, and says so
            self._get_template()

    def close(self) -> None:
        """End all processes; a job in one of them ends with `ChildDiedError`."""
        with self._lock:
            self._closed = True
            template, self._template = self._template, None
            working = list(self._working)
        if template is not None:
            template.kill()
        for pid in working:
            kill_process(pid)

    def _follow(self, channel: socket.socket, job: ChildJob | ChildCheck) -> ChildReply:
        """Send a job to the process that waits for it, and wait for the reply.

        Raises:
            GoneError: The process, or the one that was to start it, ended before the job began.
        """
        pid, began = 0, time.monotonic()
        try:
            channel.settimeout(START_TIMEOUT_S)
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

    def _discard(self, template: ForkServer) -> None:
        """Have the next job start another template."""
        template.kill()
        with self._lock:
            if self._template is template:
                self._template = None

    def _get_template(self) -> ForkServer:
        with self._starting:
            if self._template is None:
                try:
                    made = ForkServer("dovetail.grammar.child", self._start)
                except ForkStartError as error:
                    raise ChildDiedError(str(error)) from None
                with self._lock:
                    if not self._closed:
                        self._template = made
                        return made
                made.kill()
                raise ChildDiedError("the pool was closed")
            return self._template
