"""What travels between the engine and a compile process: msgpack structs in length-prefixed frames, never pickle."""

from __future__ import annotations

import socket

import msgspec

from dovetail.contracts.grammar import GrammarSpec, Kind
from dovetail.engine.wire import HEADER, MAX_FRAME
from dovetail.messages import GrammarStep
from dovetail.plugins import PluginPlan


class ChildStart(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """First message to a template process; it answers with a `ChildReply` when it is ready.

    Without a `plan` it judges texts only. `max_bytes` is what a job may allocate beyond what was loaded.
    """

    plan: PluginPlan | None = None
    vocabulary: bytes = b""
    max_bytes: int = 0


class ChildJob(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """Compile one grammar within `timeout_s`."""

    step: GrammarStep
    timeout_s: float


class ChildCheck(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """Judge finished texts by a JSON Schema within `timeout_s`."""

    schema: str
    texts: list[str]
    timeout_s: float


class ChildBegun(msgspec.Struct, frozen=True, kw_only=True):
    """A process has taken its job and has what it needs: the job's time begins."""

    pid: int


class ChildReply(msgspec.Struct, frozen=True, kw_only=True):
    """The outcome of a job. With neither `blob` nor `error` the grammar compiles, but its result cannot travel.

    `ignored` names what had to be left out of the source, as JSON pointers into it. `load_s` (of processor time) and
    `load_bytes` are what it takes to bring the result into another process.
    """

    blob: bytes | None = None
    ignored: tuple[str, ...] = ()
    load_s: float = 0.0
    load_bytes: int = 0
    error: str | None = None
    code: str | None = None
    verdicts: list[bool] = []


class GoneError(Exception):
    """The other end of the socket is gone."""


def send(channel: socket.socket, message: msgspec.Struct) -> None:
    """Send one message.

    Raises:
        GoneError: Nobody reads.
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
    (length,) = HEADER.unpack(_read(channel, HEADER.size))
    if length > MAX_FRAME:
        raise GoneError(f"a frame of {length} bytes")
    return _read(channel, length)


def _read(channel: socket.socket, num_bytes: int) -> bytes:
    parts: list[bytes] = []
    while num_bytes:
        try:
            part = channel.recv(min(num_bytes, 1 << 20))
        except TimeoutError:
            raise
        except OSError as error:
            raise GoneError(str(error)) from None
        if not part:
            raise GoneError("the socket was closed")
        parts.append(part)
        num_bytes -= len(part)
    return b"".join(parts)


def spec_of(step: GrammarStep) -> GrammarSpec:
    """Return a step's spec.

    Raises:
        ValueError: Unknown kind: the client is of another release.
    """
    return GrammarSpec(
        kind=Kind(step.kind),
        source=step.source,
        max_whitespace=step.max_whitespace,
        whitespace=step.whitespace,
    )


def step_of(backend: str, spec: GrammarSpec, *, weaken: bool = False) -> GrammarStep:
    """Return a spec as data, for the backend of this name."""
    return GrammarStep(
        backend=backend,
        kind=spec.kind.value,
        source=spec.source,
        max_whitespace=spec.max_whitespace,
        whitespace=spec.whitespace,
        weaken=weaken,
    )
