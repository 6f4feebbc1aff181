"""A process that reads bodies: `python -m dovetail_server.reading.child FD`. Started by `BodyPool`.

It loads tokenizer, template and parsers, and reads none itself: for each socket that it is sent it forks a copy, which
takes a job, and another one where the last left little behind. Whatever a body does to a copy (time, memory, a crash in
native code) costs that one request.
"""

from __future__ import annotations

import gc
import os
import resource
import signal
import socket
import sys
import time
from collections.abc import Mapping
from types import FrameType
from typing import Any

import msgspec

from dovetail.base import log
from dovetail.base.forks import GoneError, PreloadedModules, control_of, receive, receive_bytes, send, serve_forks
from dovetail.base.process_limits import lower
from dovetail.contracts.errors import DovetailError
from dovetail.grammar.compile.memory import address_space, resident_bytes
from dovetail.processing.processor import Processor
from dovetail.sdk.pixels import MANY_THREADS, THREADS
from dovetail_server.apis.loaded import apis_of
from dovetail_server.apis.parsing.serve import installed
from dovetail_server.apis.responses.references import ReferencedItems
from dovetail_server.apis.watch import WATCH, Interruption
from dovetail_server.errors.catalogue import PLUGIN_FAILED
from dovetail_server.media.decode import NO_PILLOW
from dovetail_server.media.rules import MediaAnswer, MediaMessage
from dovetail_server.reading import wire
from dovetail_server.reading.allocator import count_most_anew, keep_blocks, most_own_bytes, return_large_blocks
from dovetail_server.reading.tasks import add_routes
from dovetail_server.reading.threads import set_threads
from dovetail_server.reading.work import do, part_of
from dovetail_server.schema.unknown import LEFT_OUT, LeftOut

NICE = 5
"""Large bodies yield to the engine: they must not delay anybody's tokens."""
MEMORY_BYTES = 512 << 20
MEMORY_FACTOR = 48
"""A job may have so much, and of its body so many times. A token takes a tokenizer a hundred bytes."""
THREAD_BYTES = 130 << 20
"""Of address space, while a thread's heap and stack are laid out; it takes a few megabytes of memory."""
MAX_JOBS, KEPT_BYTES, MAX_IMAGE_JOBS = 256, 64 << 20, 32
"""A copy ends after so many jobs, or when it holds so much more than before. A new one takes half as long again for its
first text: its memory is shared until it is written to, and its tokenizer knows no words. Once it has decoded an image,
only that image's owner has it for further jobs, and for fewer: decoders are native code. What a crafted image may do to
a process meets nobody else, and ends with the process."""
GRACE_S, MIN_S = 0.5, 0.05
LIMITED, HURRIED = (
    wire.Refusal(
        message=f"the server's own limit of {what} leaves too little to read this request",
        param=None,
        code="server_limits",
        status=503,
    )
    for what in ("address space (ulimit -v, LimitAS)", "processor time (ulimit -t, LimitCPU)")
)
"""Not the client's fault: the operator allows less than a job is meant to have."""
WARM_UP = "The quick brown fox jumps over the lazy dog. " * 500
"""Long enough for every thread."""


class OutOfTimeError(Interruption):
    """The job's processor time is over."""


def main(argv: list[str]) -> int:
    """Load, then fork for every socket that comes, until the inherited one closes."""
    control = control_of(argv)
    try:
        start = msgspec.msgpack.decode(receive(control), type=wire.WorkerStart)
        try:
            worker = PreloadedState(start)
        except DovetailError as error:
            send(control, PreloadedModules(str(error)))
            return 1
    except GoneError:
        return 0
    warn_of_limits()
    return_large_blocks()
    gc.collect()
    gc.freeze()
    gc.disable()  # a copy ends with its job, and a round over all that it makes takes longer than the rest
    return serve_forks(control, worker.serve)


def warn_of_limits() -> None:
    """Say at the start what an operator's limit of address space takes from the jobs to come."""
    soft, wanted = (
        resource.getrlimit(resource.RLIMIT_AS)[0],
        address_space() + MEMORY_BYTES + MEMORY_FACTOR * wire.LARGE,
    )
    if soft != resource.RLIM_INFINITY and soft < wanted:
        log.complain(
            f"dovetail: this process may have {soft >> 20} MiB of address space (ulimit -v, LimitAS), and reading a "
            f"large request may take {wanted >> 20}: requests that do not fit are refused with 503"
        )


class PreloadedState:
    """What copies find loaded."""

    def __init__(self, start: wire.WorkerStart) -> None:
        """Load."""
        self._text = Processor.of_start(start.processor)
        add_routes(apis_of(start.processor.setup.plan))
        WATCH.start_timing()
        self._served = start.served
        self._media = start.media
        self._text.template.no_images = start.no_images
        if start.media is not None:
            from dovetail_server.media.loader import preload  # once, for all copies

            try:
                preload(start.media)
            except ImportError as error:  # texts are read all the same
                self._media = self._text.images = None
                self._text.template.no_images = f"{NO_PILLOW} ({' '.join(str(error).split())[:120]})"
                log.complain(f"dovetail: requests with images are refused: {self._text.template.no_images}")
        self._num_threads, self._num_cores = start.num_threads, start.num_cores
        installed()

    def serve(self, channel: socket.socket) -> None:
        """Do one job after another, as long as they leave little behind, or until the socket closes."""
        os.nice(NICE)
        num_threads = self._num_threads
        if self._media is not None:
            keep_blocks()  # before there is a job: of what an image takes, a third were page faults
            if self._num_cores >= MANY_THREADS:
                THREADS.number = MANY_THREADS
                num_threads += MANY_THREADS
        addresses = address_space()
        set_threads(self._num_threads)
        if self._text.tokenizer.inline_chars:
            self._text.tokenizer.encode(WARM_UP, add_special_tokens=False)  # starts them, before there is a job
        limits = {kind: resource.getrlimit(kind) for kind in (resource.RLIMIT_AS, resource.RLIMIT_CPU)}
        base, left, is_bound = resident_bytes(), MAX_JOBS, False
        while True:
            job = msgspec.msgpack.decode(receive(channel), type=wire.BodyJob)
            left -= 1
            outcome = self._done(channel, job, addresses, num_threads)
            has_failed = outcome.refusal is not None or outcome.fault is not None
            if outcome.is_bound and not is_bound:
                is_bound, left = True, min(left, MAX_IMAGE_JOBS - 1)
            stays = left > 0 and outcome.stays and not has_failed and resident_bytes() - base <= KEPT_BYTES
            send(channel, msgspec.structs.replace(outcome, stays=stays, is_bound=is_bound))
            if not stays:
                return
            del outcome
            for kind, limit in limits.items():
                resource.setrlimit(kind, limit)
            gc.collect()  # what the template's process had is frozen: this takes a millisecond
            count_most_anew()

    def _done(self, channel: socket.socket, job: wire.BodyJob, addresses: int, num_threads: int) -> wire.BodyResult:
        """Do a job. The process ends by itself when the job's time is over, in native code too."""
        began, before = time.process_time(), most_own_bytes()
        body = [bytes(receive_bytes(channel, job.num_bytes))]
        send(channel, wire.Begun(pid=os.getpid()))
        soft = {kind: resource.getrlimit(kind)[0] for kind in (resource.RLIMIT_AS, resource.RLIMIT_CPU)}
        has_memory, has_time = set_limits(job, addresses, num_threads)

        def allow_images() -> None:
            raise_limits(job, soft, has_time=has_time)

        def ask(question: wire.Question) -> ReferencedItems:
            send(channel, question)
            return msgspec.msgpack.decode(receive(channel), type=ReferencedItems)

        def ask_media(question: MediaMessage) -> MediaAnswer:
            send(channel, question)
            return msgspec.msgpack.decode(receive(channel), type=MediaAnswer)

        loader = None
        if self._media is not None and self._text.images is not None:
            from dovetail_server.media.loader import ImageLoader

            loader = ImageLoader(self._text.images, self._media, job.media, ask_media, allow_images)
            self._text.load_images = loader

        def give_up(why: str) -> None:
            send(
                channel, wire.BodyResult(refusal=wire.Refusal(message=why, param=None, code=PLUGIN_FAILED, status=500))
            )
            os._exit(0)

        WATCH.give_up = give_up
        left_out = LeftOut(lambda name: None) if job.leaves_out else None
        LEFT_OUT.set(left_out)
        try:
            outcome = do(job, body.pop, self._text, self._served, ask, lambda message: send(channel, message))
        except OutOfTimeError as error:
            outcome = wire.BodyResult(
                refusal=wire.too_costly("time", job.num_bytes, part_of(error)) if has_time else HURRIED
            )
        if not has_memory and wire.is_short(outcome.refusal, job.num_bytes):
            outcome = wire.BodyResult(refusal=LIMITED)
        signal.setitimer(signal.ITIMER_PROF, 0)
        took_s, grown = time.process_time() - began, most_own_bytes() - before
        names = [] if left_out is None else list(left_out.names)
        stays = loader is None or not loader.has_fetched
        is_bound = loader is not None and loader.has_decoded
        more: dict[str, Any] = {"cpu_s": took_s, "grown_bytes": grown, "stays": stays, "is_bound": is_bound}
        return msgspec.structs.replace(outcome, left_out=names, **more)


def set_limits(job: wire.BodyJob, addresses: int, num_threads: int) -> tuple[bool, bool]:
    """Bound what this process takes; return whether it may take all the memory, and the time, that a job may have.

    Args:
        job: What it does.
        addresses: Bytes of address space that it had before its threads.
        num_threads: Threads of its tokenizer, and of its images.
    """
    memory = addresses + MEMORY_BYTES + MEMORY_FACTOR * job.num_bytes + num_threads * THREAD_BYTES
    has_memory = lower(resource.RLIMIT_AS, memory)
    lower(resource.RLIMIT_CORE, 0)
    wanted = int(time.process_time() + job.cpu_s + GRACE_S) + 1
    has_time, most = lower(resource.RLIMIT_CPU, wanted), resource.getrlimit(resource.RLIMIT_CPU)[0]
    signal.signal(signal.SIGPROF, _out_of_time)
    signal.setitimer(signal.ITIMER_PROF, job.cpu_s if has_time else max(MIN_S, most - time.process_time() - GRACE_S))
    return has_memory, has_time


def raise_limits(job: wire.BodyJob, soft: Mapping[int, int], *, has_time: bool) -> None:
    """Let this process take what images need beside the rest of its job, and no more than an operator allowed it.

    Args:
        job: What it does.
        soft: The limits before `set_limits`.
        has_time: As that returned it.
    """
    from dovetail_server.media.loader import MEMORY_BYTES as IMAGE_BYTES

    memory = resource.getrlimit(resource.RLIMIT_AS)[0] + IMAGE_BYTES
    for kind, wanted in (
        (resource.RLIMIT_AS, memory),
        (resource.RLIMIT_CPU, int(time.process_time() + job.media_cpu_s + GRACE_S) + 1),
    ):
        resource.setrlimit(kind, (soft[kind], resource.getrlimit(kind)[1]))
        lower(kind, wanted)
    if has_time:
        signal.setitimer(signal.ITIMER_PROF, job.media_cpu_s)


def _out_of_time(number: int, frame: FrameType | None) -> None:
    raise OutOfTimeError


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
