"""A device whose effects are late, on CPU tensors: what another accelerator has to say, and what nobody may rely on.

Copies to the host stand in a queue. Until the device comes to one, its host tensor holds `POISON`, so that whoever
reads without waiting reads nonsense. The device comes to one more copy whenever it is asked how far it is.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, ClassVar, TypeVar

import torch
from torch import Tensor

from dovetail.contracts.device import Device
from dovetail.runtime.device.devices import CLASSES, HOST, answer, device_of

T = TypeVar("T")
POISON = -77
"""In host memory of signed numbers whose copy has not come; others are 1."""


class LateEvent:
    """A place in the queue of a `LateDevice`."""

    def __init__(self, device: LateDevice, place: int) -> None:
        """`place` copies are before it."""
        self._device, self._place = device, place

    def query(self) -> bool:
        """See `DeviceEvent`. Answers, then lets the device go on: not true at once while something is before it."""
        is_passed = self._device.num_done >= self._place
        self._device.go_on()
        return is_passed

    def synchronize(self) -> None:
        """See `DeviceEvent`."""
        while self._device.num_done < self._place:
            self._device.go_on()


class LateGraph:
    """Runs a step again, and writes what it makes to where its first results stand."""

    def __init__(self, step: Callable[[], object], results: object) -> None:
        self._step, self._results = step, results

    def replay(self) -> None:
        """See `DeviceGraph`."""
        for old, new in zip(_tensors(self._results), _tensors(self._step()), strict=True):
            if old.data_ptr() != new.data_ptr():
                old.copy_(new)


class LateDevice(Device):
    """See `Device`. It has memory of its own size; what a graph computes is there when its replay returns.

    Attributes:
        num_done: Copies that have come.
        num_sent: Copies that were begun.
    """

    kind = "late"
    is_host = False
    captures = True
    num_bytes: ClassVar[int] = 2 << 30
    model = "a late device"

    def __init__(self, place: torch.device) -> None:
        """Nothing is in its queue."""
        super().__init__(place)
        self.num_done = self.num_sent = 0
        self._queue: deque[Callable[[], object]] = deque()

    @classmethod
    def take(cls, index: int | None) -> torch.device:
        """See `Device`."""
        return torch.device("cpu")

    def go_on(self) -> None:
        """Come to the next copy."""
        if self._queue:
            with torch.inference_mode():  # in which steps make their tensors
                self._queue.popleft()()
            self.num_done += 1

    def memory(self) -> tuple[int, int]:
        """See `Device`."""
        return self.num_bytes // 2, self.num_bytes

    def synchronize(self) -> None:
        """See `Device`."""
        while self._queue:
            self.go_on()

    def is_idle(self) -> bool:
        """See `Device`."""
        is_idle = not self._queue
        self.go_on()
        return is_idle

    def mark(self) -> LateEvent:
        """See `Device`."""
        return LateEvent(self, self.num_sent)

    def to_host(self, tensor: Tensor) -> Tensor:
        """See `Device`."""
        found, host = tensor.clone(), torch.empty_like(tensor, memory_format=torch.contiguous_format)
        host.fill_(POISON if host.dtype.is_signed else True)
        self._queue.append(lambda: host.copy_(found))
        self.num_sent += 1
        return host

    def capture(self, step: Callable[[], T], pool: Any) -> tuple[LateGraph, T, Any]:
        """See `Device`."""
        step()
        result = step()
        return LateGraph(step, result), result, pool or self


def _tensors(results: object) -> list[Tensor]:
    return [each for each in (results if isinstance(results, tuple) else (results,)) if isinstance(each, Tensor)]


@contextmanager
def playing(device: type[Device]) -> Iterator[Device]:
    """Inside, a class answers for the host's tensors as if they lay on its device; yields that device."""
    host = CLASSES[HOST]
    answer(device, HOST)
    try:
        yield device_of(torch.device(HOST))
    finally:
        answer(host, HOST)
