"""Processes that are forked for a job, from one that has everything loaded.

Work that may never end, or may crash its process, runs in such a process. It costs that one job at most, and its memory
goes back to the system. One that has done its job well may be given another (`put_back`). The parent starts a template
with `ForkServer`. The template calls `serve_forks` and does no work itself. Messages are msgpack structs in
length-prefixed frames, never pickle.
"""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import subprocess
import sys
import threading
import weakref
from collections import deque
from collections.abc import Callable, Hashable, Mapping
from concurrent.futures import Future

import msgspec

from dovetail.base import log
from dovetail.base.frames import HEADER, MAX_FRAME
from dovetail.base.orphans import wake_when_orphaned

START_TIMEOUT_S = 60.0
ONE_THREAD = dict.fromkeys(("OMP_NUM_THREADS", "MKL_NUM_THREADS", "RAYON_NUM_THREADS"), "1")
"""In the environment of a template: threads do not survive a fork."""
NO_THREADS = {"TOKENIZERS_PARALLELISM": "false"}


class GoneError(Exception):
    """The other end of the socket is gone."""


class ForkStartError(Exception):
    """A template could not be started."""


class PreloadedModules(msgspec.Struct, frozen=True):
    """What a template sends when it is ready, or cannot be."""

    error: str | None = None


Waiting = deque[tuple[Hashable, socket.socket]]
"""Processes without a job, oldest first: for whom, None: for anyone, and the socket."""


def _end(process: subprocess.Popen[bytes], control: socket.socket, waiting: Waiting, owner: int) -> None:
    """End a process now, if it is a child of this one, and reap it, so that no zombie stays."""
    if os.getpid() == owner:
        with contextlib.suppress(ProcessLookupError):
            process.kill()
        process.wait()
    control.close()
    while waiting:
        waiting.pop()[1].close()  # at which the process that waits for a job ends


class ForkServer:
    """The process that forks one for each job, and the socket to it."""

    def __init__(self, module: str, environment: Mapping[str, str] | None = None) -> None:
        """Start the process; `load` has to follow.

        Args:
            module: What runs: its `main` calls `serve_forks`.
            environment: Variables that it has beside those of this process.

        Raises:
            ForkStartError: The system has no room for another process or socket.
        """
        try:
            self._control, theirs = socket.socketpair()
            with theirs:
                self._process = subprocess.Popen(
                    [sys.executable, "-m", module, str(theirs.fileno())],
                    pass_fds=(theirs.fileno(),),
                    stdin=subprocess.DEVNULL,
                    process_group=0,  # Ctrl-C, which would find it among its imports, is its parent's affair
                    env={**os.environ, **ONE_THREAD, **NO_THREADS, **(environment or {})},
                )
        except OSError as error:
            raise ForkStartError(str(error)) from None
        self._waiting: Waiting = deque()
        self._end = weakref.finalize(self, _end, self._process, self._control, self._waiting, os.getpid())
        self._end.atexit = False  # the process notices by itself that its parent has gone

    def load(self, start: msgspec.Struct) -> None:
        """Have it load what copies will find, and wait until it has.

        Args:
            start: The first message that it gets.

        Raises:
            ForkStartError: It could not start.
        """
        self._control.settimeout(START_TIMEOUT_S)
        try:
            send(self._control, start)
            error = msgspec.msgpack.decode(receive(self._control), type=PreloadedModules).error
        except (TimeoutError, GoneError) as gone:
            self.kill()
            raise ForkStartError(f"it did not start (exit code {self._process.returncode}): {gone}") from None
        if error is not None:
            self.kill()
            raise ForkStartError(error)

    @property
    def pid(self) -> int:
        """The process id."""
        return self._process.pid

    def take_waiting(self, owner: Hashable = None) -> socket.socket | None:
        """Return the socket to a process that waits: the owner's last one, else one for anyone; it may have ended."""
        for kind in dict.fromkeys((owner, None)):
            for at in reversed(range(len(self._waiting))):
                if self._waiting[at][0] == kind:
                    channel = self._waiting[at][1]
                    del self._waiting[at]
                    return channel
        return None

    def fork_ahead(self) -> None:
        """Start the process for the next job, if none waits for anyone's; a job that comes then need not wait for it.

        Raises:
            GoneError: The template is gone.
            ForkStartError: The system has no room for another socket.
        """
        if all(owner is not None for owner, _ in self._waiting):
            ours, theirs = _pair()
            # Before there is a process: a job that comes now takes it, and starts no other.
            self._waiting.append((None, ours))
            self._send(theirs)

    def put_back(self, channel: socket.socket, most: int, owner: Hashable = None) -> None:
        """Let a process that has done its job wait for the next one, of that owner or anyone.

        Of those for owners `most` wait, and of those for anyone: the one that has waited longest ends.
        """
        if not self._end.alive:
            channel.close()
            return
        self._waiting.append((owner, channel))
        alike = [each for each in self._waiting if (each[0] is None) == (owner is None)]
        for each in alike[: -most or None]:
            self._waiting.remove(each)
            each[1].close()

    def fork(self) -> socket.socket:
        """Start a process for one job; returns the socket to it.

        Raises:
            GoneError: The template is gone.
            ForkStartError: The system has no room for another socket.
        """
        ours, theirs = _pair()
        try:
            self._send(theirs)
        except GoneError:
            ours.close()
            raise
        return ours

    def _send(self, theirs: socket.socket) -> None:
        """Have a process started with its end of a socket, which is closed here."""
        with theirs:
            try:
                socket.send_fds(self._control, [b"f"], [theirs.fileno()])
            except OSError as error:
                raise GoneError(str(error)) from None

    def kill(self) -> None:
        """End it now and reap it. Processes that it forked go on."""
        self._end()


def _pair() -> tuple[socket.socket, socket.socket]:
    try:
        return socket.socketpair()
    except OSError as error:
        raise ForkStartError(str(error)) from None


class ForkTemplate:
    """Keeps one `ForkServer`: started when it is first wanted, and again when it has died. Thread-safe.

    It starts in a thread of its own, so that callers may stop waiting. All callers wait for the same start.

    Attributes:
        failure: Why the last attempt to start it failed; None where it did not.
    """

    def __init__(self, module: str, start: msgspec.Struct) -> None:
        """Start nothing yet; the arguments are those of `ForkServer`."""
        self.failure: str | None = None
        self._module, self._start = module, start
        self._lock = threading.Lock()
        self._server: ForkServer | None = None
        self._starting: ForkServer | None = None
        self._attempt: Future[ForkServer] | None = None
        self._is_closed = False

    @property
    def pid(self) -> int | None:
        """The process id; None while there is none."""
        server = self._server
        return None if server is None else server.pid

    @property
    def is_ready(self) -> bool:
        """Whether the process has started. It may have died since, undetected."""
        return self._server is not None

    def ready(self) -> Future[ForkServer]:
        """Return what becomes the process, or a `ForkStartError`. Not to be cancelled: others wait for it, too."""
        with self._lock:
            if (attempt := self._attempt) is None:
                self._attempt = attempt = Future[ForkServer]()
                if self._is_closed:
                    attempt.set_exception(ForkStartError("the server ends"))
                else:
                    self._start_in_thread(attempt)
            return attempt

    def _start_in_thread(self, attempt: Future[ForkServer]) -> None:
        try:
            threading.Thread(target=self._begin, args=(attempt,), daemon=True, name="dovetail-fork").start()
        except RuntimeError as error:  # no room for a thread: the next caller tries again
            self._attempt = None
            attempt.set_exception(ForkStartError(str(error)))

    def get(self, timeout_s: float) -> ForkServer:
        """Return the process.

        Raises:
            ForkStartError: It could not be started, or not in time. It goes on starting.
        """
        try:
            return self.ready().result(timeout_s)
        except TimeoutError:
            raise ForkStartError("it is still starting") from None

    def discard(self, server: ForkServer) -> None:
        """Let the next caller start another process, because this one has exited."""
        server.kill()
        with self._lock:
            if self._server is server:
                self._server = self._attempt = None

    def close(self) -> None:
        """End the process, also while it starts."""
        with self._lock:
            self._is_closed = True
            found = [server for server in (self._server, self._starting) if server is not None]
            self._server = self._attempt = None
        for server in found:
            server.kill()

    def _begin(self, attempt: Future[ForkServer]) -> None:
        try:
            made = self._make()
        except BaseException as error:
            with self._lock:
                if self._attempt is attempt:
                    self._attempt = None
                self.failure = str(error) or repr(error)
            attempt.set_exception(error if isinstance(error, ForkStartError) else ForkStartError(repr(error)))
        else:
            self.failure = None
            attempt.set_result(made)

    def _make(self) -> ForkServer:
        made = ForkServer(self._module)
        with self._lock:
            self._starting = made
            is_closed = self._is_closed
        if is_closed:
            made.kill()
        try:
            made.load(self._start)
        finally:
            with self._lock:
                self._starting = None
        with self._lock:
            if not self._is_closed:
                self._server = made
                return made
        made.kill()
        raise ForkStartError("the server ends")


def control_of(argv: list[str]) -> socket.socket:
    """Be a template that begins: returns the socket of its parent, from which the first message comes."""
    wake_when_orphaned()
    log.follow("worker")
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # copies are not waited for: the socket reports their end
    return socket.socket(fileno=int(argv[0]))


def serve_forks(control: socket.socket, serve: Callable[[socket.socket], None]) -> int:
    """Be a template: say that everything is loaded, and fork for every socket that comes, until `control` closes.

    Args:
        control: The inherited socket, whose first message has been read.
        serve: A copy's part: one job. The copy ends when it returns.
    """
    try:
        send(control, PreloadedModules())
        while True:
            _, fds, _, _ = socket.recv_fds(control, 1, 1)
            if not fds:
                return 0
            with socket.socket(fileno=fds[0]) as channel:
                if _fork() == 0:
                    control.close()
                    _run(serve, channel)
    except (GoneError, OSError):
        return 0


def _fork() -> int:
    """Fork, and say why that cannot be: who asked for the job sees a closed socket only."""
    try:
        return os.fork()
    except OSError as error:
        log.complain(f"dovetail: there is no room for a process that does one job: {error}")
        raise


def _run(serve: Callable[[socket.socket], None], channel: socket.socket) -> None:
    status = 1
    try:
        wake_when_orphaned()
        serve(channel)
        status = 0
    except (GoneError, TimeoutError):
        pass  # the job is no longer wanted
    finally:
        os._exit(status)


def send(channel: socket.socket, message: msgspec.Struct) -> None:
    """Send one message.

    Raises:
        GoneError: The other end closed or died.
        TimeoutError: The socket's time-out passed.
    """
    payload = msgspec.msgpack.encode(message)
    try:
        channel.sendall(HEADER.pack(len(payload)) + payload)
    except TimeoutError:
        raise
    except OSError as error:
        raise GoneError(str(error)) from None


def receive(channel: socket.socket) -> bytes:
    """Wait for one message's payload.

    Raises:
        GoneError: The other end closed or died.
        TimeoutError: The socket's time-out passed.
    """
    (length,) = HEADER.unpack(receive_bytes(channel, HEADER.size))
    if length > MAX_FRAME:
        raise GoneError(f"a frame of {length} bytes")
    return bytes(receive_bytes(channel, length))


def receive_bytes(channel: socket.socket, num_bytes: int) -> bytearray:
    """Receive exactly `num_bytes` bytes.

    Raises:
        GoneError: The other end closed or died.
        TimeoutError: The socket's time-out passed.
    """
    data = bytearray(num_bytes)
    view, at = memoryview(data), 0
    while at < num_bytes:
        try:
            num = channel.recv_into(view[at:])
        except TimeoutError:
            raise
        except OSError as error:
            raise GoneError(str(error)) from None
        if not num:
            raise GoneError("the socket was closed")
        at += num
    return data


def kill_process(pid: int) -> None:
    """Kill a process that may have ended by itself."""
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, signal.SIGKILL)
