"""A device that computes on the host and answers late, as an accelerator does: a thread of its own makes its copies.

`LAG_S` is how long each takes. Whatever reads a copy before the event behind it has passed reads zeros: so a start with
`--device delayed` shows who does not wait.
"""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Callable
from typing import TYPE_CHECKING

from dovetail.contracts import Device

if TYPE_CHECKING:
    import torch
    from torch import Tensor

LAG_S = 0.001
TOTAL_BYTES = 2 << 30
LIMIT_S = 60.0


class Passed:
    """An event: the thread sets it when it comes to it."""

    def __init__(self) -> None:
        self._event = threading.Event()
        self.set = self._event.set

    def query(self) -> bool:
        """Never waits."""
        return self._event.is_set()

    def synchronize(self) -> None:
        """Wait; a device that does not answer is lost."""
        if not self._event.wait(LIMIT_S):
            raise RuntimeError(f"the device has not answered for {LIMIT_S:g} s")


class Delayed(Device):
    """One queue, which a daemon thread works off in order."""

    kind = "delayed"
    is_host = False

    @classmethod
    def take(cls, index: int | None) -> torch.device:
        """Tensors are the host's."""
        import torch

        return torch.device("cpu")

    def __init__(self, place: torch.device) -> None:
        super().__init__(place)
        self._num_sent = self._num_made = 0
        self._queue: queue.SimpleQueue[Callable[[], object]] = queue.SimpleQueue()
        threading.Thread(target=self._work, name="delayed device", daemon=True).start()

    def _work(self) -> None:
        while True:
            self._queue.get()()
            self._num_made += 1

    def _send(self, work: Callable[[], object]) -> None:
        self._num_sent += 1
        self._queue.put(work)

    @property
    def model(self) -> str:
        """Figures that were measured on it go by this name."""
        return "delayed host"

    def memory(self) -> tuple[int, int]:
        """A part of the host's, so that the core plans with it."""
        return TOTAL_BYTES // 2, TOTAL_BYTES

    def mark(self) -> Passed:
        """It passes when the thread has made all copies before it."""
        passed = Passed()
        self._send(passed.set)
        return passed

    def synchronize(self) -> None:
        """Wait for an event that is behind everything."""
        self.mark().synchronize()

    def is_idle(self) -> bool:
        """The thread has made all that was sent."""
        return self._num_made == self._num_sent

    def to_host(self, tensor: Tensor) -> Tensor:
        """Note what is there now, and let the thread write it later."""
        import torch

        found, host = tensor.clone(), torch.zeros_like(tensor, memory_format=torch.contiguous_format)

        def copy() -> None:
            time.sleep(LAG_S)
            with torch.inference_mode():  # in which steps make their tensors
                host.copy_(found)

        self._send(copy)
        return host
