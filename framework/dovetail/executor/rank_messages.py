"""What the first rank says to the others, and what they answer: msgpack over a pipe, arrays as bytes.

A rank that starts says `Built`, then `WeightsLoaded`, or `RankFailed`, and hears `SetMemoryPlan`; says `Done`, and
hears `Connect`. Then `Launch` and `Choose` are not answered, so that nobody waits for what goes well; all others are,
by `Done`. What failed is told with the next one. A step takes 17 µs to tell, whatever its rows, and its `Read` is
answered while the device computes the next.
"""

from __future__ import annotations

from multiprocessing.connection import Connection
from typing import Any

import msgspec
import numpy as np
import numpy.typing as npt

from dovetail.messages import KernelUse, ProfileSpec
from dovetail.messages.step import DecodeGraph, PrefillGraph, StepInput, StepLate
from dovetail.plugins import PluginPlan
from dovetail.runtime.memory.plan import MemoryPlan


class StartRank(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """All that a rank is started with. `attention`, `kernels`: see `Meeting`."""

    settings: dict[str, Any]
    plan: PluginPlan
    log_level: int
    rank: int
    attention: tuple[tuple[str, str], ...] = ()
    kernels: tuple[KernelUse, ...] = ()


class SetMemoryPlan(msgspec.Struct, frozen=True, tag=True):
    """What the first rank has planned, pages and rows, is every rank's."""

    memory: MemoryPlan


class Connect(msgspec.Struct, frozen=True, tag=True):
    """Meet the others by this file; nothing in a collective may take longer."""

    meeting: str
    timeout_s: float


class Launch(msgspec.Struct, frozen=True, tag=True):
    """See `Executor.launch`."""

    step: StepInput


class Choose(msgspec.Struct, frozen=True, tag=True):
    """See `Executor.choose`; with the masks that the engine has written."""

    late: StepLate
    masks: npt.NDArray[np.int32]


class Prepare(msgspec.Struct, frozen=True, tag=True):
    """See `Executor.prepare`; at most one is given."""

    decode: DecodeGraph | None = None
    prefill: PrefillGraph | None = None


class Settle(msgspec.Struct, frozen=True, tag=True):
    """Say how the last step failed, if it did, and go on with the next one."""


class Ping(msgspec.Struct, frozen=True, tag=True):
    """Say that you are there."""


class Read(msgspec.Struct, frozen=True, tag=True):
    """See `Executor.read`."""


class StartProfile(msgspec.Struct, frozen=True, tag=True):
    """See `Executor.start_profile`."""

    spec: ProfileSpec


class StopProfile(msgspec.Struct, frozen=True, tag=True):
    """See `Executor.stop_profile`."""


class Built(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """The model is built, and its weights are about to be read.

    Attributes:
        version: Of Dovetail.
        plugins: Kind, name, version and state of those that take part.
        device: Where.
        free: Its free bytes.
    """

    version: str
    plugins: tuple[tuple[str, ...], ...]
    device: str
    free: int


class WeightsLoaded(msgspec.Struct, frozen=True, tag=True):
    """The weights are read, and so many bytes are left."""

    left: int


class RankFailed(msgspec.Struct, frozen=True, tag=True):
    """It could not be; the rank ends."""

    text: str
    is_users: bool


class Done(msgspec.Struct, frozen=True, tag=True):
    """It was done, or failed so: a rank that fails goes on with what comes next."""

    failure: str | None = None
    files: tuple[str, ...] = ()


Command = (
    StartRank | SetMemoryPlan | Connect | Launch | Choose | Read | Prepare | Settle | Ping | StartProfile | StopProfile
)
Answer = Built | WeightsLoaded | RankFailed | Done


def _as_bytes(value: object) -> object:
    if isinstance(value, np.ndarray):
        return (value.dtype.str, value.shape, value.tobytes())
    raise NotImplementedError(type(value).__name__)


def _as_array(kind: Any, value: Any) -> Any:
    dtype, shape, data = value
    return np.frombuffer(data, dtype=dtype).reshape(shape).copy()


_encoder = msgspec.msgpack.Encoder(enc_hook=_as_bytes)
_commands: msgspec.msgpack.Decoder[Command] = msgspec.msgpack.Decoder(Command, dec_hook=_as_array)
_answers: msgspec.msgpack.Decoder[Answer] = msgspec.msgpack.Decoder(Answer)


def send(pipe: Connection, message: Command | Answer) -> None:
    """Send a message.

    Raises:
        OSError: The other side has ended.
    """
    pipe.send_bytes(_encoder.encode(message))


def next_command(pipe: Connection) -> Command:
    """Wait for the first rank.

    Raises:
        EOFError: It has ended.
    """
    return _commands.decode(pipe.recv_bytes())


def next_answer(pipe: Connection) -> Answer:
    """Wait for an answer.

    Raises:
        EOFError: The rank has ended.
    """
    return _answers.decode(pipe.recv_bytes())
