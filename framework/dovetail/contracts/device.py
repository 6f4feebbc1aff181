"""What the core asks of a device: memory, queue, copies, graphs and what holds for it. `Device` answers for a host.

Each method's own text says what a device must do that computes behind the host's back; what stands here is right where
a call has been computed when it returns. A class of another device overrides all that is not so there, and sets the
facts. Outside of it nothing in the core asks which device there is. Importing this module does not import torch; nor
may a plugin's module, which the HTTP process asks for `surely_absent`.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any, ClassVar, NamedTuple, NoReturn, Protocol, TypeVar

from dovetail.contracts.compiler import AheadCompiler
from dovetail.contracts.options import Configurable
from dovetail.contracts.ranks import Communicator

if TYPE_CHECKING:
    import torch
    from torch import Tensor

T = TypeVar("T")
NUM_RUNS = 7
"""Runs of which the host's clock takes the median."""


class DeviceView(NamedTuple):
    """What kernel sets know of a device.

    Attributes:
        kind: As `Device.kind`.
        name: Of the model of it, as `Device.model`; "" where it has none.
        capability: Compute capability of a CUDA device, or None.
        is_interpreted: Triton's kernels run in its interpreter (`TRITON_INTERPRET=1`).
    """

    kind: str
    name: str = ""
    capability: tuple[int, int] | None = None
    is_interpreted: bool = False


def is_interpreted() -> bool:
    """Whether Triton's kernels run in its interpreter, on any device."""
    return os.environ.get("TRITON_INTERPRET", "0") not in ("", "0")


def is_on_host(place: torch.device) -> bool:
    """Whether tensors at a place of torch's are in the host's memory, and its processor computes with them."""
    return place.type == "cpu"


class DeviceEvent(Protocol):
    """A place in the queue of a device."""

    def query(self) -> bool:
        """Whether the device has come to it; never waits."""

    def synchronize(self) -> None:
        """Wait until it has."""


class DeviceGraph(Protocol):
    """Launches that were recorded."""

    def replay(self) -> None:
        """Launch them again, on the current queue, with the same addresses."""


class Device(Configurable):
    """One device; made without touching it. This class is the host's own processor.

    Attributes:
        place: As torch names it.
        kind: What messages, tables and plugins' manifests call it; the plugin's name, unless there is a reason.
        preference: `--device auto` takes the device with the highest of those that are there.
        is_host: A call has been computed when it returns, in the host's memory, by its threads.
        captures: It records graphs.
        compiles: Its kernels are compiled at run time, so that a start prepares and tries them.
        by_rows: What chooses its kernels by the number of rows, so that results depend on the batch: `sums` of ranks,
            or nothing.
        activities: What a profile can record: `CPU`, `GPU`, each with its name in torch's `ProfilerActivity`.
        hides: The environment variable that chooses which devices a process sees; "" where none does.
    """

    kind: ClassVar[str] = "cpu"
    preference: ClassVar[int] = 0
    is_host: ClassVar[bool] = True
    captures: ClassVar[bool] = False
    compiles: ClassVar[bool] = False
    by_rows: ClassVar[frozenset[str]] = frozenset()
    activities: ClassVar[Mapping[str, str]] = {"CPU": "CPU"}
    hides: ClassVar[str] = ""

    @classmethod
    def surely_absent(cls) -> str | None:
        """Say why there surely is no such device here, and what to do, in milliseconds and without torch.

        None where there may be one. A start is refused by it before any process begins.
        """
        return None

    @classmethod
    def wake(cls, uses_first: bool) -> None:
        """Begin, without waiting and without torch, what takes long before the first use of the device.

        Called once in an engine's process, while torch is being imported. What fails here fails again later.

        Args:
            uses_first: The engine will use the first device, and no other.
        """

    @classmethod
    def compiler(cls) -> type[AheadCompiler] | None:
        """Return what compiles its kernels before requests wait for them; None: each is compiled at first use.

        It does not import torch.
        """
        return None

    @classmethod
    def absent(cls) -> str | None:
        """Say why there is no such device here, and what to do; None where there is one. It may ask torch."""
        return cls.surely_absent()

    @classmethod
    def num(cls) -> int:
        """Return how many this process sees."""
        return 1

    @classmethod
    def take(cls, index: int | None) -> torch.device:
        """Make a device, counted from 0, the one that this thread uses, and return it; None: the one that it is."""
        if not cls.is_host:
            raise NotImplementedError(f"{cls.__name__} does not say where it is")
        import torch

        return torch.device("cpu")

    def __init__(self, place: torch.device) -> None:
        """Take the place; nothing is asked of the device yet."""
        self.place = place

    @property
    def model(self) -> str:
        """Whose product it is, as its maker calls it; figures that were measured on it go by that."""
        return self.kind

    @property
    def view(self) -> DeviceView:
        """The facts about the device that kernel sets receive."""
        return DeviceView(self.kind, is_interpreted=is_interpreted())

    def memory(self) -> tuple[int, int] | None:
        """Return free and total bytes of its own memory; None: it has the host's, which the core measures."""
        return None

    def trim(self) -> None:
        """Give back what torch keeps of freed memory."""

    def synchronize(self) -> None:
        """Wait until all that was launched is computed.

        Raises:
            RuntimeError: The device is lost; no later call succeeds.
        """

    def is_idle(self) -> bool:
        """Whether all that was launched on the current queue is computed; never waits."""
        return True

    def mark(self) -> DeviceEvent | None:
        """Record an event behind what was launched so far; None where all of it has been computed."""
        return None

    def pinned(self, tensor: Tensor) -> Tensor:
        """Return a fresh host tensor in memory from which the device copies without the host's waiting."""
        return tensor

    def to_host(self, tensor: Tensor) -> Tensor:
        """Begin to copy a tensor to the host; what overwrites it afterwards does not matter to the copy.

        The copy may be read behind a `mark` that is made later.
        """
        return tensor.clone()

    def capture(self, step: Callable[[], T], pool: Any) -> tuple[DeviceGraph, T, Any]:
        """Run a step aside, which loads its kernels and makes its caches, then record it.

        Args:
            step: Launches, and returns its results; it waits for nothing.
            pool: What an earlier call returned, whose memory this graph shares; None for memory of its own.

        Returns:
            The graph, the results, which a replay fills, and the pool.
        """
        self._lacks("graphs", "captures")

    def seconds(self, run: Callable[[], object], *, is_captured: bool) -> float:
        """Return the median seconds of some runs, by the device's own clock, in a graph if `is_captured`."""
        if not self.is_host:
            self._lacks("a clock", "compiles")
        run()
        return sorted(self._timed(run) for _ in range(NUM_RUNS))[NUM_RUNS // 2]

    @staticmethod
    def _timed(run: Callable[[], object]) -> float:
        began = time.perf_counter()
        run()
        return time.perf_counter() - began

    def communicator(self, rank: int, size: int) -> Communicator | None:
        """Return what ranks on devices of this kind exchange tensors by; None: the host does it.

        Args:
            rank: This one, from 0.
            size: How many there are, on this host.
        """
        return None

    def _lacks(self, what: str, fact: str) -> NoReturn:
        raise NotImplementedError(f"{type(self).__name__} has no {what}: whoever asks looks at `{fact}` first")
