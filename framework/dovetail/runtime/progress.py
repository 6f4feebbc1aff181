"""Progress within a step: counts the layers that the device has computed, so that a long step is no hang."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch
from torch import nn

from dovetail.contracts.device import Device, DeviceEvent
from dovetail.runtime.device.devices import device_of
from dovetail.runtime.kernels.repeats import outermost_lists

LONG = 1024
"""New tokens from which on a GPU's eager step is watched by layers. Shorter ones, and graphs, have no hook or event."""


class LayerEvents:
    """Events behind the layers of one step, in order."""

    def __init__(self, device: Device, count: Callable[[], object]) -> None:
        """None is recorded yet; `count` is called for each that the device passes."""
        self._events: deque[DeviceEvent] = deque()
        self._device, self._count = device, count

    def record(self, *_: object) -> None:
        """Put an event behind what was launched so far."""
        if (event := self._device.mark()) is not None:
            self._events.append(event)

    def passed(self, *, wait: bool) -> None:
        """Count what the device has passed by now, or `wait` and count all."""
        while self._events:
            if wait:
                self._events[0].synchronize()
            elif not self._events[0].query():
                return
            self._events.popleft()
            self._count()


class LayerProgress:
    """Counts layers. The engine's thread counts, any thread may read.

    A CPU computes a layer while its `forward` runs, so a hook counts. A GPU gets all layers at once: a hook records an
    event behind each layer of a long step, and whoever waits for that step counts the events that pass.

    Attributes:
        num: Layers that were computed since the start.
    """

    def __init__(self, model: object, device: torch.device) -> None:
        """Watch a model; one that is no module of torch has no layers."""
        self.num = 0
        self._layers = layers_of(model) if isinstance(model, nn.Module) else []
        self._device = device_of(device)
        for layer in self._layers if self._device.is_host else ():
            layer.register_forward_hook(self.count)

    def count(self, *_: object) -> None:
        """Something was computed."""
        self.num += 1

    @contextmanager
    def recording(self, num_tokens: int) -> Iterator[LayerEvents | None]:
        """Inside, the layers of a step of so many new tokens are launched; yields the events of one that has some."""
        if self._device.is_host or num_tokens < LONG:
            yield None
            return
        events = LayerEvents(self._device, self.count)
        hooks = [layer.register_forward_hook(events.record) for layer in self._layers]
        try:
            yield events
        finally:
            for hook in hooks:
                hook.remove()


def layers_of(model: nn.Module) -> list[nn.Module]:
    """Return a model's layers: the items of its outermost module lists, or its parts where it has no list."""
    return [layer for layers in outermost_lists(model, 1) for layer in layers] or [*model.children()]
