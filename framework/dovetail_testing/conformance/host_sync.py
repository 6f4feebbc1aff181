"""Finds code that waits for the device: what a CUDA graph cannot record, noticed on any machine."""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from types import TracebackType
from typing import Any

import torch
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

_METHODS = frozenset(
    {"item", "tolist", "cpu", "numpy", "__bool__", "__int__", "__float__", "__index__", "__array__", "nonzero"}
    | {"argwhere", "masked_select", "unique", "is_nonzero", "equal", "allclose", "__contains__"}
)
_OPERATORS = frozenset(
    {"_local_scalar_dense", "nonzero", "masked_select", "_unique2", "unique_dim", "is_nonzero", "equal"}
)
_INDEXING = frozenset({"index", "index_put", "index_put_", "_index_put_impl_"})


class HostSyncs:
    """Notes every call inside its `with` block that reads a tensor's values on the host.

    Attributes:
        found: One line per call: what was called and where.
    """

    def __init__(self) -> None:
        self.found: list[str] = []
        self._stack = ExitStack()
        self._function = _Functions(self.found)
        self._dispatch = _Operators(self.found)

    def __enter__(self) -> HostSyncs:
        self._stack.enter_context(self._dispatch)
        self._stack.enter_context(self._function)
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        self._stack.close()


class _Functions(TorchFunctionMode):
    """Sees calls of Python, of which some never reach an operator on CPU (`tolist`, `cpu`)."""

    def __init__(self, found: list[str]) -> None:
        super().__init__()
        self._found = found

    def __torch_function__(
        self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        name = getattr(func, "__name__", "")
        if name in _METHODS:
            self._found.append(f"{name}() at {_place()}")
        return func(*args, **(kwargs or {}))


class _Operators(TorchDispatchMode):
    """Sees operators, also those that others call."""

    def __init__(self, found: list[str]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._found = found

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        name = func.overloadpacket.__name__
        if name in _OPERATORS:
            self._found.append(f"{name} at {_place()}")
        if name in _INDEXING and any(_is_mask(index) for index in args[1]):
            self._found.append(f"indexing with a mask at {_place()}")
        return func(*args, **(kwargs or {}))


def _is_mask(index: Any) -> bool:
    return isinstance(index, torch.Tensor) and index.dtype in (torch.bool, torch.uint8)


def _place() -> str:
    """Return file and line of the innermost caller outside torch and this module."""
    frame = sys._getframe(1)
    while frame.f_back is not None:
        file = frame.f_code.co_filename
        if file != __file__ and "/torch/" not in file and not file.startswith("<"):
            return f"{file.rpartition('/')[2]}:{frame.f_lineno} in {frame.f_code.co_name}"
        frame = frame.f_back
    return "an unknown place"
