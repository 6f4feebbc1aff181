"""CUDA devices, through torch, which is imported where a device is used."""

from __future__ import annotations

import statistics
from collections.abc import Callable
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any, TypeVar

from dovetail.contracts.compiler import AheadCompiler
from dovetail.contracts.device import Device, DeviceEvent, DeviceGraph, DeviceView, is_interpreted
from dovetail.contracts.ranks import Communicator
from dovetail_backends.devices import cuda_driver

if TYPE_CHECKING:
    import torch
    from torch import Tensor

T = TypeVar("T")
REPLAYS = 7
"""Runs of a step of which the median is taken."""


class CudaDevice(Device):
    """See `Device`. Streams are torch's current ones: this thread's."""

    kind = "cuda"
    preference = 100
    is_host = False
    captures = True
    compiles = True
    by_rows = frozenset({"sums"})
    activities = {"CPU": "CPU", "GPU": "CUDA"}  # noqa: RUF012 - as the base declares it
    hides = cuda_driver.HIDES

    @classmethod
    def surely_absent(cls) -> str | None:
        """See `Device`."""
        return cuda_driver.why_none()

    @classmethod
    def wake(cls, uses_first: bool) -> None:
        """See `Device`."""
        cuda_driver.wake(uses_first)

    @classmethod
    def compiler(cls) -> type[AheadCompiler] | None:
        """See `Device`. Triton has no wheels for some platforms."""
        if find_spec("triton") is None:
            return None
        from dovetail_backends.kernels.ahead.compiler import TritonCompiler

        return TritonCompiler

    @classmethod
    def absent(cls) -> str | None:
        """See `Device`."""
        import torch

        return None if torch.cuda.is_available() else cuda_driver.without(torch.__version__, torch.version.cuda)

    @classmethod
    def num(cls) -> int:
        """See `Device`."""
        import torch

        return torch.cuda.device_count()

    @classmethod
    def take(cls, index: int | None) -> torch.device:
        """See `Device`."""
        import torch

        if index is not None:
            torch.cuda.set_device(index)
        return torch.device(cls.kind, torch.cuda.current_device())

    def __init__(self, place: torch.device) -> None:
        """See `Device`."""
        import torch

        super().__init__(place)
        self._torch = torch

    @property
    def model(self) -> str:
        """See `Device`."""
        return self._torch.cuda.get_device_name(self.place)

    @property
    def view(self) -> DeviceView:
        """See `Device`."""
        return DeviceView(self.kind, self.model, self._torch.cuda.get_device_capability(self.place), is_interpreted())

    def memory(self) -> tuple[int, int]:
        """See `Device`."""
        return self._torch.cuda.mem_get_info(self.place)

    def trim(self) -> None:
        """See `Device`."""
        self._torch.cuda.empty_cache()

    def synchronize(self) -> None:
        """See `Device`."""
        self._torch.cuda.synchronize(self.place)

    def is_idle(self) -> bool:
        """See `Device`."""
        return self._torch.cuda.current_stream(self.place).query()

    def mark(self) -> DeviceEvent:
        """See `Device`."""
        event = self._torch.cuda.Event()  # type: ignore[no-untyped-call]
        event.record()
        return event

    def pinned(self, tensor: Tensor) -> Tensor:
        """See `Device`."""
        return tensor.pin_memory()

    def to_host(self, tensor: Tensor) -> Tensor:
        """See `Device`."""
        host = self._torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True)
        return host.copy_(tensor, non_blocking=True)

    def capture(self, step: Callable[[], T], pool: Any) -> tuple[DeviceGraph, T, Any]:
        """See `Device`."""
        stream = self._torch.cuda.Stream(self.place)  # type: ignore[no-untyped-call]
        stream.wait_stream(self._torch.cuda.current_stream(self.place))
        with self._torch.cuda.stream(stream):
            step()
        self._torch.cuda.current_stream(self.place).wait_stream(stream)
        graph = self._torch.cuda.CUDAGraph()
        with self._torch.cuda.graph(graph, pool=pool):
            result = step()
        return graph, result, graph.pool()

    def communicator(self, rank: int, size: int) -> Communicator:
        """See `Device`."""
        from dovetail_backends.devices.cuda_ranks import CudaCommunicator

        return CudaCommunicator(rank, size, self)

    def seconds(self, run: Callable[[], object], *, is_captured: bool) -> float:
        """See `Device`."""
        stream = self._torch.cuda.Stream()  # type: ignore[no-untyped-call]
        stream.wait_stream(self._torch.cuda.current_stream())
        with self._torch.cuda.stream(stream):
            run()
        self._torch.cuda.synchronize()
        graph = self._torch.cuda.CUDAGraph()
        if is_captured:
            with self._torch.cuda.graph(graph, stream=stream):
                run()
        again: Callable[[], object] = graph.replay if is_captured else run
        times: list[float] = []
        for _ in range(REPLAYS):
            begin, end = (self._torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]
            begin.record()
            again()
            end.record()
            end.synchronize()
            times.append(begin.elapsed_time(end) / 1e3)
        return statistics.median(times)
