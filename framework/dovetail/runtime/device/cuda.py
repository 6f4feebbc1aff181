"""CUDA devices, through torch: the one file of the core that asks `torch.cuda`, but for kernels and layers."""

from __future__ import annotations

import statistics
from collections.abc import Callable
from typing import Any, TypeVar

import torch
from torch import Tensor

from dovetail.contracts.device import Device, DeviceEvent, DeviceGraph, DeviceView, is_interpreted
from dovetail.runtime.device.present import HIDES, without

T = TypeVar("T")
REPLAYS = 7
"""Runs of a step of which the median is taken."""


class CudaDevice(Device):
    """See `Device`. Streams are torch's current ones: this thread's."""

    kind = "cuda"
    is_host = False
    captures = True
    compiles = True
    reads_peers = True
    by_rows = frozenset({"experts", "sums"})
    activities = ("CPU", "GPU")
    hides = HIDES

    @classmethod
    def absent(cls) -> str | None:
        """See `Device`."""
        return None if torch.cuda.is_available() else without(torch.__version__, torch.version.cuda)

    @classmethod
    def num(cls) -> int:
        """See `Device`."""
        return torch.cuda.device_count()

    @classmethod
    def take(cls, index: int | None) -> torch.device:
        """See `Device`."""
        if index is not None:
            torch.cuda.set_device(index)
        return torch.device(cls.kind, torch.cuda.current_device())

    @property
    def model(self) -> str:
        """See `Device`."""
        return torch.cuda.get_device_name(self.place)

    @property
    def view(self) -> DeviceView:
        """See `Device`."""
        return DeviceView(self.kind, self.model, torch.cuda.get_device_capability(self.place), is_interpreted())

    def memory(self) -> tuple[int, int]:
        """See `Device`."""
        return torch.cuda.mem_get_info(self.place)

    def trim(self) -> None:
        """See `Device`."""
        torch.cuda.empty_cache()

    def synchronize(self) -> None:
        """See `Device`."""
        torch.cuda.synchronize(self.place)

    def is_idle(self) -> bool:
        """See `Device`."""
        return torch.cuda.current_stream(self.place).query()

    def mark(self) -> DeviceEvent:
        """See `Device`."""
        event = torch.cuda.Event()  # type: ignore[no-untyped-call]
        event.record()
        return event

    def pinned(self, tensor: Tensor) -> Tensor:
        """See `Device`."""
        return tensor.pin_memory()

    def to_host(self, tensor: Tensor) -> Tensor:
        """See `Device`."""
        host = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True)
        return host.copy_(tensor, non_blocking=True)

    def capture(self, step: Callable[[], T], pool: Any) -> tuple[DeviceGraph, T, Any]:
        """See `Device`."""
        stream = torch.cuda.Stream(self.place)  # type: ignore[no-untyped-call]
        stream.wait_stream(torch.cuda.current_stream(self.place))
        with torch.cuda.stream(stream):
            step()
        torch.cuda.current_stream(self.place).wait_stream(stream)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, pool=pool):
            result = step()
        return graph, result, graph.pool()

    def seconds(self, run: Callable[[], object], *, is_captured: bool) -> float:
        """See `Device`."""
        stream = torch.cuda.Stream()  # type: ignore[no-untyped-call]
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            run()
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        if is_captured:
            with torch.cuda.graph(graph, stream=stream):
                run()
        again: Callable[[], object] = graph.replay if is_captured else run
        times: list[float] = []
        for _ in range(REPLAYS):
            begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]
            begin.record()
            again()
            end.record()
            end.synchronize()
            times.append(begin.elapsed_time(end) / 1e3)
        return statistics.median(times)
