"""The engine's side of the Unix socket to its client: what starts it, what travels, and whether either end is gone."""

from __future__ import annotations

import contextlib
import resource
import select
import signal
import socket
import threading
from pathlib import Path
from typing import Any

import msgspec

from dovetail.engine.loop import ClosedError
from dovetail.engine.submit_delta import SubmitDecoder
from dovetail.messages import FromEngine, ToEngine, Working
from dovetail.messages.frames import FrameReader, frame
from dovetail.plugins import PluginPlan

SIGN_S = 2.0
SHUTDOWN_TIMEOUT_S = 3.0
"""Time for the engine to end in order when its client is gone."""


class Start(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """First frame to an engine process: everything it is started with."""

    settings: dict[str, Any]
    plan: PluginPlan
    log_level: str
    hang_s: float
    """After so long without news a busy engine is ended."""
    num_hangs: int = 0
    """Engines before this one, in a row, to which that happened."""


class StartSigns:
    """Tells the client that the start goes on, as long as it does: weights may take minutes to load.

    A sign is sent where the process has computed or read something since the last one, so that a start which waits for
    what never comes falls silent.
    """

    def __init__(self, transport: SocketTransport) -> None:
        self._transport = transport
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._run, name="dovetail-start-signs", daemon=True)

    def __enter__(self) -> None:
        self._thread.start()

    def __exit__(self, *exc: object) -> None:
        self._ended.set()
        self._thread.join()

    def _run(self) -> None:
        done = _work_done()
        with contextlib.suppress(ClosedError):  # the loop will hear of it, too
            while not self._ended.wait(SIGN_S):
                before, done = done, _work_done()
                if any(now > then for now, then in zip(done, before, strict=True)):
                    self._transport.send(Working())


def _work_done() -> tuple[int, ...]:
    """What this process has done so far: tenths of a second computed, pages read, blocks read."""
    used = resource.getrusage(resource.RUSAGE_SELF)
    return int(10 * (used.ru_utime + used.ru_stime)), used.ru_majflt, used.ru_inblock


class SocketTransport:
    """The engine's side of the socket; a closed socket means that the client died."""

    def __init__(self, path: Path) -> None:
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self._socket.connect(str(path))
        self._reader = FrameReader()
        self._frames: list[bytes] = []
        self._requests = SubmitDecoder()
        self._encoder = msgspec.msgpack.Encoder()
        self._sending = threading.Lock()

    def receive_start(self) -> Start:
        """Wait for the first frame."""
        while not self._frames:
            self._read()
        return msgspec.msgpack.decode(self._frames.pop(0), type=Start)

    def exit_without_client(self) -> None:
        """End this process soon after the client's death, even in the middle of a step that takes long."""
        threading.Thread(target=self._watch, name="dovetail-client-watch", daemon=True).start()

    def _watch(self) -> None:
        poller = select.poll()
        poller.register(self._socket, 0)  # a hang-up is always told
        poller.poll()
        # The loop sees it too, and ends in order if it comes to it. A signal ends also what never does.
        signal.setitimer(signal.ITIMER_REAL, SHUTDOWN_TIMEOUT_S)

    def poll(self, timeout_s: float) -> list[ToEngine]:
        """See `Transport.poll`."""
        ready, _, _ = select.select([self._socket], [], [], 0 if self._frames else timeout_s)
        if ready:
            self._read()
        frames, self._frames = self._frames, []
        return [self._requests.decode(data) for data in frames]

    def send(self, message: FromEngine) -> None:
        """See `Transport.send`; also called by the thread that looks at the engine's."""
        try:
            with self._sending:
                self._socket.sendall(frame(self._encoder.encode(message)))
        except OSError as error:
            raise ClosedError(str(error)) from None

    def _read(self) -> None:
        try:
            data = self._socket.recv(1 << 20)
        except OSError as error:
            raise ClosedError(str(error)) from None
        if not data:
            raise ClosedError("the socket was closed")
        self._frames += self._reader.feed(data)
