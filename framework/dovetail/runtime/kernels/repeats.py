"""Layers that only repeat earlier ones are left out of steps that compile or load kernels: these are the same.

A model of 80 layers launches the kernels of one or two. Which layers are alike is found by comparing all that they
hold; whoever differs in anything but values of weights and its own number is gone through. Triton specialises on
whether an integer is 1 or a multiple of 16, and a layer may hand its number to a kernel, so the first two and every
sixteenth are gone through, too.
"""

from __future__ import annotations

import logging
import re
from collections import OrderedDict
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from types import FunctionType, MethodType
from typing import Any

import torch
from torch import Tensor, nn

logger = logging.getLogger(__name__)

MIN_LAYERS = 4
"""Lists of fewer modules are gone through as they are."""
PERIOD = 16


class Repeats:
    """The layers of a model that are like earlier ones."""

    def __init__(self, model: object) -> None:
        """Find them. What is no module of torch has none."""
        lists = outermost_lists(model, MIN_LAYERS) if isinstance(model, nn.Module) else ()
        self._pairs = [pair for layers in lists for pair in _repeats(layers)]

    @contextmanager
    def left_out(self) -> Iterator[None]:
        """Inside, a layer like an earlier one returns what that one returned last, for inputs of the same shapes."""
        changed: list[tuple[nn.Module, Any]] = []

        def put(layer: nn.Module, forward: Any) -> None:
            changed.append((layer, vars(layer).get("forward")))
            layer.forward = forward

        recorded: dict[nn.Module, _Recorded] = {}
        for layer, first in self._pairs:
            if first not in recorded:
                recorded[first] = _Recorded(first.forward)
                put(first, recorded[first])
            put(layer, _Repeated(layer.forward, recorded[first]))
        try:
            yield
        finally:
            for layer, before in changed:
                del layer.forward
                if before is not None:
                    layer.forward = before


class _Recorded:
    """Stands before the forward pass of a layer that others are like, and keeps what it returned last."""

    def __init__(self, original: Any) -> None:
        self.original, self.shapes, self.returned = original, None, None

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        shapes = _shapes((args, kwargs))
        self.returned = self.original(*args, **kwargs)
        self.shapes = shapes
        return self.returned


class _Repeated:
    """Stands before that of a layer that is like another one."""

    def __init__(self, original: Any, first: _Recorded) -> None:
        self.original, self._first = original, first

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if _shapes((args, kwargs)) != self._first.shapes:
            return self.original(*args, **kwargs)
        return self._first.returned


def outermost_lists(module: nn.Module, min_layers: int) -> Iterator[nn.ModuleList]:
    """Yield the outermost lists of at least `min_layers` modules."""
    for child in module.children():
        if isinstance(child, nn.ModuleList) and len(child) >= min_layers:
            yield child
        else:
            yield from outermost_lists(child, min_layers)


def _repeats(layers: nn.ModuleList) -> Iterator[tuple[nn.Module, nn.Module]]:
    """Yield layers that need no rehearsal, each with the first one that is like it."""
    kinds: list[tuple[int, nn.Module]] = []
    for i, layer in enumerate(layers):
        like = next((first for j, first in kinds if alike(first, layer, (j, i))), None)
        if like is None:
            kinds.append((i, layer))
        elif i > 1 and i % PERIOD:
            yield layer, like


def alike(a: Any, b: Any, numbers: tuple[int, int]) -> bool:
    """Whether two layers, or things in them, are the same but for values of tensors and their own `numbers`.

    Things of anybody's classes that cannot be looked at are different.
    """
    try:
        return _alike(a, b, numbers, set())
    except Exception as error:
        logger.debug("layers %d and %d cannot be compared: %s: %s", *numbers, type(error).__name__, error)
        return False


def _alike(a: Any, b: Any, numbers: tuple[int, int], seen: set[tuple[int, int]]) -> bool:
    """As `alike`; `seen`: pairs that are being compared, by identity, as things may hold each other."""
    if a is b:
        return True
    if type(a) is not type(b):
        return False
    if isinstance(a, Tensor):
        return _same_form(a, b)
    if isinstance(a, int):
        return a == b or (a, b) == numbers
    if isinstance(a, str):
        one, other = (re.sub(rf"\b{number}\b", "#", text) for text, number in zip((a, b), numbers, strict=True))
        return a == b or one == other
    of_a, of_b = _inside(a), _inside(b)
    if of_a is None or of_b is None:
        return bool(a == b)
    if (id(a), id(b)) in seen:
        return True
    seen.add((id(a), id(b)))
    pairs = zip(of_a, of_b, strict=False)
    return len(of_a) == len(of_b) and all(_alike(one, other, numbers, seen) for one, other in pairs)


def _same_form(a: Tensor, b: Tensor) -> bool:
    """Whether kernels are the same for two tensors. Of what has no plain memory, packed by a library, nobody knows."""
    return a.layout == b.layout == torch.strided and _form(a) == _form(b)


def _form(tensor: Tensor) -> tuple[Any, ...]:
    """What a kernel is specialised on."""
    start = tensor.data_ptr() % PERIOD if not tensor.is_meta else 0
    return tensor.shape, tensor.dtype, tensor.device, tensor.stride(), start


def _inside(value: Any) -> list[Any] | None:
    """Return what a thing consists of, or None if it is taken as a whole."""
    if isinstance(value, OrderedDict) and all(isinstance(key, int) for key in value):
        return list(value.values())  # hooks of a module: torch numbers each anew
    if isinstance(value, dict):
        return [*value.keys(), *value.values()]
    if isinstance(value, (list, tuple)):
        return list(value)
    if isinstance(value, MethodType):
        return [value.__func__, value.__self__]
    if isinstance(value, partial):
        return [value.func, value.args, value.keywords]
    if isinstance(value, FunctionType):
        cells = value.__closure__ or ()
        return [value.__code__, value.__defaults__, *(cell.cell_contents for cell in cells)]
    names = [name for one in type(value).__mro__ for name in _slots(one)]
    if not names and not hasattr(value, "__dict__"):
        return None
    return [getattr(value, name, None) for name in names] + [getattr(value, "__dict__", {})]


def _slots(kind: type) -> list[str]:
    slots = kind.__dict__.get("__slots__", ())
    named = [slots] if isinstance(slots, str) else list(slots)
    return [name for name in named if name not in ("__dict__", "__weakref__") and not name.startswith("__")]


def _shapes(value: Any) -> Any:
    """Shapes of all tensors that a call was given, those in a residual stream included."""
    if isinstance(value, Tensor):
        return value.shape, value.dtype
    if isinstance(value, dict):
        return [(key, _shapes(one)) for key, one in value.items()]
    if isinstance(value, (list, tuple)):
        return [_shapes(one) for one in value]
    inner = getattr(value, "value", None)
    return _shapes(inner) if isinstance(inner, Tensor) else type(value)
