"""`BodyPool`: bodies that are large, or that a checkpoint's files take long for, go to processes, a few at a time.

A body waits for its turn as it was sent, so what waits is bounded by `--max-queued-bytes`. Its process is killed when
the client leaves, and ends at its limits of processor time and memory. One that has done well takes the next body, with
its tokenizer's threads, memory and words; else one is started ahead: a body does not wait for that.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import socket
import time
from collections.abc import Awaitable, Callable
from concurrent.futures import Future
from contextlib import ExitStack
from typing import TYPE_CHECKING, Any

import msgspec

from dovetail.base.forks import ForkServer, ForkStartError, ForkTemplate, GoneError, kill_process
from dovetail.base.frames import HEADER
from dovetail.contracts.errors import PluginError, RequestError
from dovetail.text.chat.budget import FULL
from dovetail_server.apis.responses.references import ReferencedItems
from dovetail_server.errors.catalogue import PLUGIN_FAILED, ServiceError
from dovetail_server.http.auth import CALLER
from dovetail_server.media.cache import ImageCache
from dovetail_server.media.folder import MediaFolder
from dovetail_server.media.rules import MediaMessage
from dovetail_server.reading import wire
from dovetail_server.reading.media import FindFile, MediaExchange
from dovetail_server.reading.turns import Turns
from dovetail_server.schema.unknown import LEFT_OUT

if TYPE_CHECKING:
    from dovetail.contracts.api import Route
    from dovetail_server.reading.tasks import RawTask, Task

logger = logging.getLogger("dovetail.server")
MODULE = "dovetail_server.reading.child"
SLOWER = 20
"""On a busy machine a job may take so many times its processor time before it counts as hanging."""
SMALL_CPU_S = FULL.seconds
"""Processor time of a small body, which comes here for its template or tokenizer only."""
DIED = "body_process_died"
MAX_FETCHES = 16
"""Requests whose images are fetched at a time. Each has a process meanwhile, but no turn."""
_decode = msgspec.msgpack.Decoder(wire.Begun | wire.PromptBegun | wire.Question | MediaMessage | wire.BodyResult).decode
Answering = Callable[[wire.Question], Awaitable[ReferencedItems]]
PromptBeginning = Callable[[wire.PromptBegun], None]
"""Takes what is known of a prompt so far."""


class BodyPool:
    """Of one server. Used from its event loop."""

    def __init__(self, max_processes: int, cpu_s: float) -> None:
        """Start nothing yet.

        Args:
            max_processes: Bodies that are read at a time; 0 has the server read all of them itself.
            cpu_s: Processor time that a body may take.
        """
        self._cpu_s = cpu_s
        self._turns = Turns(max_processes, spare=1)
        self._max_processes = max_processes
        self._is_closed = False
        self._template: ForkTemplate | None = None
        self._fetches = Turns(MAX_FETCHES)
        self._media: MediaFolder | None = None
        self._find_file: FindFile | None = None
        self._image_cache: ImageCache | None = None
        self.pids: set[int] = set()
        """Processes that read a body."""

    @property
    def is_on(self) -> bool:
        """Whether other processes read bodies."""
        return self._max_processes > 0 and self._template is not None and not self._is_closed

    @property
    def fork_server_pid(self) -> int | None:
        """Id of the process that forks the others; None while there is none."""
        return None if self._template is None else self._template.pid

    @property
    def num_waiting(self) -> int:
        """Bodies that wait for their turn."""
        return self._turns.num_waiting

    def problem(self) -> str | None:
        """Return why no large body can be read now, or None. Where there is a reason, another start is tried."""
        template = self._template
        if not self.is_on or template is None or (failure := template.failure) is None:
            return None
        template.ready()
        return f"the process that reads requests could not be started: {failure}"

    def load_media(self, folder: MediaFolder, find_file: FindFile, cache: ImageCache | None) -> None:
        """Have the processes load images from now on: into `folder`, some from uploaded files or `cache`."""
        self._media, self._find_file, self._image_cache = folder, find_file, cache

    def ready_with(self, start: wire.WorkerStart | None) -> None:
        """Set what the processes load; None where only this process can have it."""
        if self._template is not None:
            self._template.close()
        self._template = None if start is None else ForkTemplate(MODULE, start)

    def takes(self, num_bytes: int) -> bool:
        """Whether a body of this size is read by another process."""
        return num_bytes > wire.LARGE and self.is_on

    async def run(
        self,
        task: Task[Any] | RawTask | Route,
        raw: bytes,
        *,
        owner: str,
        is_background: bool = False,
        is_line: bool = False,
        context: str = "",
        answer: Answering | None = None,
        begun: PromptBeginning | None = None,
    ) -> wire.BodyResult:
        """Read a body. Cancelling this kills the process.

        Args:
            task: What for.
            raw: The body.
            owner: Whose turn it is.
            is_background: Others go first.
            is_line: See `BodyJob`.
            context: See `BodyJob`.
            answer: Fetches what the body refers to.
            begun: Called while a long prompt is tokenized.

        Raises:
            RequestError: The body is refused, or takes too much time or memory.
            PluginError: A package's code failed on it, or did not end.
            ServiceError: Its process died, or could not be started.
        """
        media = self._media
        cpu_s = self._cpu_s if len(raw) > wire.LARGE else min(self._cpu_s, SMALL_CPU_S)
        left_out = LEFT_OUT.get()
        job = wire.BodyJob(
            task=task.name,
            num_bytes=len(raw),
            is_line=is_line,
            cpu_s=cpu_s,
            context=context,
            leaves_out=left_out is not None,
            keeps=not CALLER.get().cache_root,
            media="" if media is None else media.job(),
            media_cpu_s=0.0 if media is None else self._cpu_s,  # a short body may name large images
        )
        async with self._turns.turn(owner, is_background=is_background) as turn:
            exchange = MediaExchange(self._fetches, turn, self._find_file, self._image_cache, job.media)
            try:
                outcome = await self._attempt(job, raw, answer, begun, exchange)
            except BaseException:
                if media is not None and exchange.has_images:
                    media.forget(job.media)
                raise
            finally:
                exchange.close()
        if media is not None and exchange.has_images:
            media.forget(job.media, keep=outcome.files)
        took = f"{outcome.cpu_s * 1000:.0f} ms and {outcome.grown_bytes} bytes of memory"
        logger.debug("A body of %d bytes (%s) took %s in a process of its own.", len(raw), job.task, took)
        if left_out is not None:
            left_out.add(outcome.left_out)
        if outcome.refusal is not None:
            refusal = outcome.refusal
            if refusal.code == PLUGIN_FAILED:
                raise PluginError(refusal.message) from (RuntimeError(outcome.fault) if outcome.fault else None)
            raise RequestError(refusal.message, param=refusal.param, code=refusal.code, status=refusal.status)
        if outcome.fault is not None:
            raise RuntimeError(f"reading a body failed:\n{outcome.fault}")
        return outcome

    def warm_up(self) -> None:
        """Begin to start the template ahead of the first body, which tries again where it fails, and says so."""
        if self.is_on and self._template is not None:
            self._template.ready().add_done_callback(_started)

    def close(self) -> None:
        """End all processes."""
        self._is_closed = True
        if self._template is not None:
            self._template.close()
        for pid in list(self.pids):
            kill_process(pid)

    async def _attempt(
        self,
        job: wire.BodyJob,
        raw: bytes,
        answer: Answering | None,
        begun: PromptBeginning | None,
        media: MediaExchange,
    ) -> wire.BodyResult:
        if self._template is None:
            raise died("is not there")
        num_gone = 0
        while num_gone < 2:  # those that waited may be gone, all of them, then their template, which starts again
            server = await self._ready(self._template, SLOWER * job.cpu_s)
            waiting = server.take_waiting(media.owner)
            try:
                with ExitStack() as stack:
                    channel = stack.enter_context(waiting or server.fork())
                    outcome = await WorkerExchange(channel, self.pids, media, begun).run(job, raw, answer)
                    if outcome.stays:
                        stack.pop_all()
                        server.put_back(channel, self._max_processes, media.owner if outcome.is_bound else None)
            except ForkStartError as error:
                raise died(f"could not be started: {error}") from None
            except GoneError:  # before the job began
                if waiting is None:
                    num_gone += 1
                    await asyncio.to_thread(self._template.discard, server)
            else:
                fork_ahead(server)
                return outcome
        raise died("could not be started")

    async def _ready(self, template: ForkTemplate, timeout_s: float) -> ForkServer:
        """Wait for the process that forks the others, no longer than for one that reads a body."""
        try:
            return await asyncio.wait_for(asyncio.shield(asyncio.wrap_future(template.ready())), timeout_s)
        except TimeoutError:
            raise died("could not be started in time") from None
        except ForkStartError as error:
            raise died(f"could not be started: {error}") from None


class WorkerExchange:
    """What is said with one process."""

    def __init__(
        self, channel: socket.socket, pids: set[int], media: MediaExchange, begun: PromptBeginning | None = None
    ) -> None:
        """Begin; `pids` gets the process's id while it works, `media` what it asks of images, `begun` the prompt's."""
        channel.setblocking(False)
        self._media = media
        self._begun = begun
        self._channel = channel
        self._pids = pids
        self._pid = 0
        self._loop = asyncio.get_running_loop()

    async def run(self, job: wire.BodyJob, raw: bytes, answer: Answering | None) -> wire.BodyResult:
        """Bring a job and wait for its outcome.

        Raises:
            GoneError: The process ended before it had begun.
            RequestError: It took too long.
            ServiceError: It died.
        """
        began, is_over = time.monotonic(), False
        try:
            async with asyncio.timeout(SLOWER * max(job.cpu_s, job.media_cpu_s)):
                await self._send(job, raw)
                outcome = await self._follow(answer)
            is_over = True
            return outcome
        except TimeoutError:
            return wire.BodyResult(refusal=wire.too_costly("time", job.num_bytes, self._part))
        except GoneError:
            if not self._pid:
                raise
            is_over = True
            if time.monotonic() - began >= job.cpu_s:  # the system's limit ended it, in native code
                return wire.BodyResult(refusal=wire.too_costly("time", job.num_bytes, self._part))
            logger.error("Process %d exited while it read a body of %d bytes (%s).", self._pid, len(raw), job.task)
            ran = "" if job.num_bytes > wire.LARGE else f" while it ran the model's {' or '.join(wire.PARTS)}"
            if self._part is not None:  # a decoder that fails on damaged data so is no fault of the server's
                text = "the process that decoded the images of this request died; send images that are whole"
                raise RequestError(text, code="image_parse_error") from None
            raise died(f"died{ran}") from None
        finally:
            if self._pid and not is_over:
                kill_process(self._pid)
            self._pids.discard(self._pid)

    @property
    def _part(self) -> str | None:
        return wire.IMAGES if self._media.has_images else None

    async def _follow(self, answer: Answering | None) -> wire.BodyResult:
        while True:
            message = _decode(await self._receive())
            if isinstance(message, wire.BodyResult):
                return message
            if isinstance(message, wire.Begun):
                self._pid = message.pid
                self._pids.add(message.pid)
            elif isinstance(message, wire.PromptBegun):
                if self._begun is not None:
                    self._begun(message)
            elif isinstance(message, MediaMessage):
                await self._send(await self._media.answer(message))
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


def _started(attempt: Future[ForkServer]) -> None:
    if attempt.exception() is None:
        fork_ahead(attempt.result())


def fork_ahead(server: ForkServer) -> None:
    """Have a process wait for the next body; where that fails, whoever comes next meets it."""
    with contextlib.suppress(GoneError, ForkStartError):
        server.fork_ahead()


def died(what: str) -> ServiceError:
    """Return the error for a body whose process is gone."""
    text = f"the process that reads requests {what}; the server goes on, and so do other requests"
    return ServiceError(text, code=DIED, retry_after_s=1)
