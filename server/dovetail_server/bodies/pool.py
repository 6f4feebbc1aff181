"""`BodyPool`: large bodies go to processes of their own, a few at a time.

A body waits for its turn as it was sent, so what waits is bounded by `--max-queued-bytes`. Its process is killed when
the client leaves, and ends at its limits of processor time and memory.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import socket
import threading
import time
from collections.abc import Awaitable, Callable
from typing import TYPE_CHECKING, Any

import msgspec

from dovetail.engine.wire import HEADER
from dovetail.errors import RequestError
from dovetail.forks import ForkServer, ForkStartError, GoneError, kill_process
from dovetail_server.bodies.turns import Turns
from dovetail_server.bodies.wire import Answer, Begun, Job, Outcome, Question, WorkerStart, too_costly
from dovetail_server.errors import ServiceError

if TYPE_CHECKING:
    from dovetail_server.bodies.tasks import Task

logger = logging.getLogger("dovetail.server")
MODULE = "dovetail_server.bodies.child"
LARGE = 1 << 16
"""Bodies above this many bytes go to another process: what is smaller is read in less time than that takes."""
SLOWER = 20
"""On a busy machine a job may take so many times its processor time before it counts as hanging."""
DIED = "body_process_died"
_decode = msgspec.msgpack.Decoder(Begun | Question | Outcome).decode
Answering = Callable[[Question], Awaitable[Answer]]


class BodyPool:
    """Of one server. Used from its event loop."""

    def __init__(self, max_processes: int, cpu_s: float) -> None:
        """Start nothing yet.

        Args:
            max_processes: Bodies that are read at a time; 0 has the server read all of them itself.
            cpu_s: Processor time that a body may take.
        """
        self._cpu_s = cpu_s
        self._turns = Turns(max_processes)
        self._is_on = max_processes > 0
        self._start: WorkerStart | None = None
        self._template: ForkServer | None = None
        self._starting = asyncio.Lock()
        self._lock = threading.Lock()
        self.pids: set[int] = set()
        """Processes that read a body."""

    @property
    def template_pid(self) -> int | None:
        """Id of the process that forks the others; None while there is none."""
        return None if self._template is None else self._template.pid

    @property
    def num_waiting(self) -> int:
        """Bodies that wait for their turn."""
        return self._turns.num_waiting

    def ready_with(self, start: WorkerStart | None) -> None:
        """Set what the processes load; None where only this process can have it."""
        self._start = start

    def takes(self, num_bytes: int) -> bool:
        """Whether a body of this size is read by another process."""
        return num_bytes > LARGE and self._is_on and self._start is not None

    async def run(
        self,
        task: Task[Any],
        raw: bytes,
        *,
        owner: str,
        is_background: bool = False,
        is_line: bool = False,
        context: str = "",
        answer: Answering | None = None,
    ) -> Outcome:
        """Read a body. Cancelling this kills the process.

        Args:
            task: What for.
            raw: The body.
            owner: Whose turn it is.
            is_background: Others go first.
            is_line: See `Job`.
            context: See `Job`.
            answer: Fetches what the body refers to.

        Raises:
            RequestError: The body is refused, or takes too much time or memory.
            ServiceError: Its process died, or could not be started.
        """
        job = Job(task=task.name, num_bytes=len(raw), is_line=is_line, cpu_s=self._cpu_s, context=context)
        async with self._turns.turn(owner, is_background=is_background):
            outcome = await self._attempt(job, raw, answer)
        if outcome.refusal is not None:
            refusal = outcome.refusal
            raise RequestError(refusal.message, param=refusal.param, code=refusal.code, status=refusal.status)
        if outcome.fault is not None:
            raise RuntimeError(f"reading a large body failed:\n{outcome.fault}")
        return outcome

    async def warm_up(self) -> None:
        """Start the template ahead of the first body."""
        if self._is_on and self._start is not None:
            with contextlib.suppress(ServiceError):  # the first body tries again, and says so
                await self._get_template()

    def close(self) -> None:
        """End all processes."""
        with self._lock:
            self._is_on = False
            template, self._template = self._template, None
        if template is not None:
            template.kill()
        for pid in self.pids:
            kill_process(pid)

    async def _attempt(self, job: Job, raw: bytes, answer: Answering | None) -> Outcome:
        for _ in range(2):
            template = await self._get_template()
            try:
                with template.fork() as channel:
                    return await Conversation(channel, self.pids).run(job, raw, answer)
            except GoneError:  # before the job began
                if self._template is template:
                    self._template = None
                    template.kill()
        raise died("could not be started")

    async def _get_template(self) -> ForkServer:
        async with self._starting:
            if self._template is None and self._start is not None:
                try:
                    await asyncio.to_thread(self._make_template, self._start)
                except ForkStartError as error:
                    raise died(f"could not be started: {error}") from None
            if self._template is None:
                raise died("is not there: the server ends")
            return self._template

    def _make_template(self, start: WorkerStart) -> None:
        """Start a template. Whoever waited for that may have left, or the server may have ended meanwhile."""
        made = ForkServer(MODULE, start)
        with self._lock:
            if self._is_on and self._template is None:
                self._template = made
                return
        made.kill()


class Conversation:
    """What is said with one process."""

    def __init__(self, channel: socket.socket, pids: set[int]) -> None:
        """Begin; `pids` gets the process's id while it works."""
        channel.setblocking(False)
        self._channel = channel
        self._pids = pids
        self._pid = 0
        self._loop = asyncio.get_running_loop()

    async def run(self, job: Job, raw: bytes, answer: Answering | None) -> Outcome:
        """Bring a job and wait for its outcome.

        Raises:
            GoneError: The process ended before it had begun.
            RequestError: It took too long.
            ServiceError: It died.
        """
        began, is_over = time.monotonic(), False
        try:
            async with asyncio.timeout(SLOWER * job.cpu_s):
                await self._send(job, raw)
                outcome = await self._follow(answer)
            is_over = True
            return outcome
        except TimeoutError:
            return Outcome(refusal=too_costly("time"))
        except GoneError:
            if not self._pid:
                raise
            is_over = True
            if time.monotonic() - began >= job.cpu_s:  # the system's limit ended it, in native code
                return Outcome(refusal=too_costly("time"))
            logger.error("The process %d that read a body of %d bytes (%s) died.", self._pid, len(raw), job.task)
            raise died("died") from None
        finally:
            if self._pid and not is_over:
                kill_process(self._pid)
            self._pids.discard(self._pid)

    async def _follow(self, answer: Answering | None) -> Outcome:
        while True:
            message = _decode(await self._receive())
            if isinstance(message, Outcome):
                return message
            if isinstance(message, Begun):
                self._pid = message.pid
                self._pids.add(message.pid)
            else:
                if answer is None:
                    raise RuntimeError("a task asked for what it refers to, and refers to nothing")
                await self._send(await answer(message))

    async def _send(self, message: msgspec.Struct, raw: bytes = b"") -> None:
        payload = msgspec.msgpack.encode(message)
        try:
            await self._loop.sock_sendall(self._channel, HEADER.pack(len(payload)) + payload)
            if raw:
                await self._loop.sock_sendall(self._channel, raw)
        except OSError as error:
            raise GoneError(str(error)) from None

    async def _receive(self) -> bytearray:
        (length,) = HEADER.unpack(await self._receive_bytes(HEADER.size))
        return await self._receive_bytes(length)

    async def _receive_bytes(self, num_bytes: int) -> bytearray:
        data = bytearray(num_bytes)
        view, at = memoryview(data), 0
        while at < num_bytes:
            try:
                num = await self._loop.sock_recv_into(self._channel, view[at:])
            except OSError as error:
                raise GoneError(str(error)) from None
            if not num:
                raise GoneError("the socket was closed")
            at += num
        return data


def died(what: str) -> ServiceError:
    """Return the error for a body whose process is gone."""
    text = f"the process that reads large requests {what}; the server goes on, and so do other requests"
    return ServiceError(text, code=DIED, retry_after_s=1)
