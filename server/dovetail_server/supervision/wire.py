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
from msgspec.structs import replace

from dovetail.base.frames import FrameReader, frame
from dovetail.engine.loop import ClosedError
from dovetail.messages import Abort, Control, FromEngine, SamplerParams, Submit, ToEngine, Working
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


# What one request has in common with the one before it is sent to the engine once.
#
# The choices of a request share their prompt, their grammar and nearly all parameters, and so do its prompts. Copies of
# these would cost memory and time in proportion to the number of choices: 128 of a prompt of a million tokens 600 MB.

OWN = frozenset({"seed", "max_tokens"})
"""Parameters that differ between choices."""
SHARED_PARAMS = tuple(name for name in SamplerParams.__struct_fields__ if name not in OWN)


class DeltaSubmit(msgspec.Struct, frozen=True, kw_only=True, tag=True, omit_defaults=True):
    """A `Submit` as the one before it on the same channel, but for what stands here. `prompt_ids` None: its prompt."""

    handle: int
    rid: str
    seed: int | None
    max_tokens: int
    prompt_ids: list[int] | None = None
    output_ids: list[int] = []
    cached_tokens: int | None = None
    num_retractions: int = 0
    grammar_option: int | None = None
    again: bool = False

    def after(self, before: Submit) -> Submit:
        """Return the request."""
        return replace(
            before,
            handle=self.handle,
            rid=self.rid,
            params=replace(before.params, seed=self.seed, max_tokens=self.max_tokens),
            prompt_ids=before.prompt_ids if self.prompt_ids is None else self.prompt_ids,
            output_ids=self.output_ids,
            cached_tokens=self.cached_tokens,
            num_retractions=self.num_retractions,
            grammar_option=self.grammar_option,
            again=self.again,
        )


SHARED = tuple(sorted(set(Submit.__struct_fields__) - set(DeltaSubmit.__struct_fields__) - {"params"}))


def is_alike(one: Submit, other: Submit) -> bool:
    """Whether two requests share what choices share, by identity: comparing may take as long as sending."""
    return all(getattr(one, name) is getattr(other, name) for name in SHARED) and all(
        getattr(one.params, name) is getattr(other.params, name) for name in SHARED_PARAMS
    )


class SubmitEncoder:
    """Encodes what goes to an engine through one channel."""

    def __init__(self) -> None:
        """Begin with nothing sent."""
        self._encode = msgspec.msgpack.Encoder().encode
        self._last: Submit | None = None

    def encode(self, message: ToEngine) -> bytes:
        """Return a message as it is sent."""
        if not isinstance(message, Submit):
            return self._encode(message)
        last, self._last = self._last, message
        if last is None or not is_alike(last, message):
            return self._encode(message)
        is_same = last.prompt_ids is message.prompt_ids
        return self._encode(
            DeltaSubmit(
                handle=message.handle,
                rid=message.rid,
                seed=message.params.seed,
                max_tokens=message.params.max_tokens,
                prompt_ids=None if is_same else message.prompt_ids,
                output_ids=message.output_ids,
                cached_tokens=message.cached_tokens,
                num_retractions=message.num_retractions,
                grammar_option=message.grammar_option,
                again=message.again,
            )
        )


class SubmitDecoder:
    """Decodes what a `SubmitEncoder` wrote, in its order."""

    def __init__(self) -> None:
        """Begin with nothing received."""
        self._decode = msgspec.msgpack.Decoder(Submit | DeltaSubmit | Abort | Control).decode
        self._last: Submit | None = None

    def decode(self, data: bytes) -> ToEngine:
        """Return a message.

        Raises:
            ValueError: It refers to a request before the first.
        """
        message: Submit | DeltaSubmit | Abort | Control = self._decode(data)
        if isinstance(message, DeltaSubmit):
            if self._last is None:
                raise ValueError("a request refers to the one before it, but is the first")
            message = message.after(self._last)
        if isinstance(message, Submit):
            self._last = message
        return message
