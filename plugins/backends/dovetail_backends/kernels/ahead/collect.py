"""Collects the Triton kernels that a piece of code would launch: nothing is compiled, nothing is launched.

Triton asks a hook before it compiles a variant of a kernel; a hook that says so has it skip the launch. What skipped
kernels would have written is then read by whatever comes after them, as indices too, so all memory that torch hands out
meanwhile is zeroed, and matrix products, which would take most of the time, give zeros. Kernels of any plugin are
collected in this way, by no more than running a step.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
import triton
from torch.utils._python_dispatch import TorchDispatchMode
from triton.runtime.autotuner import Autotuner

aten = torch.ops.aten
UNINITIALISED = frozenset(
    {
        aten.empty.memory_format,
        aten.empty_strided.default,
        aten.empty_like.default,
        aten.new_empty.default,
        aten.new_empty_strided.default,
    }
)


class Kernel(NamedTuple):
    """A variant of a kernel: where its function is, and how Triton specialises it, as Triton writes that down."""

    module: str
    name: str
    specialization: str


class _Nothing:
    """Stands for a compiled kernel, and does nothing when it is launched."""

    function = packed_metadata = None

    def launch_metadata(self, *args: Any) -> None:
        """Describe the launch to a profiler: not at all."""

    def run(self, *args: Any) -> None:
        """Launch."""


_NOTHING = _Nothing()


class _Zeros(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """New memory is zero, and products are not computed."""

    def _dispatch(self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None) -> Any:
        kwargs = kwargs or {}
        if func in UNINITIALISED:
            return func(*args, **kwargs).zero_()
        if func is aten.mm.default:
            return args[0].new_zeros(args[0].shape[0], args[1].shape[1])
        if func is aten.addmm.default:
            return args[1].new_zeros(args[1].shape[0], args[2].shape[1])
        if func is aten.bmm.default:
            return args[0].new_zeros(args[0].shape[0], args[0].shape[1], args[1].shape[2])
        found = func(*args, **kwargs)
        if isinstance(found, list):  # an undefined tensor in it is None, which torch does not take back from a mode
            return [torch.empty(0) if one is None else one for one in found]
        return found


# Not in the class: torch wraps what it finds there for its compiler, which the first call then imports, in 0.6 s.
_Zeros.__torch_dispatch__ = _Zeros._dispatch  # type: ignore[assignment, method-assign]


@contextmanager
def collecting(found: Callable[[Kernel], None]) -> Iterator[None]:
    """Tell `found` of every variant that is not loaded yet and would be launched inside, each once.

    Whatever the code inside computes is meaningless; tensors that existed before may be written.
    """
    stand_ins: list[tuple[dict[str, Any], str]] = []

    def hook(**facts: Any) -> bool:
        function, data = facts["fn"], facts["compile"]
        found(Kernel(function.module, function.name, data["specialization_data"]))
        # In the place of the kernel, so that its next launches cost as little as real ones: there are thousands.
        kernels = function.jit_function.device_caches[data["device"]][0]
        kernels[data["key"]] = _NOTHING
        stand_ins.append((kernels, data["key"]))
        return True

    before, tune = triton.knobs.runtime.jit_cache_hook, Autotuner.run
    triton.knobs.runtime.jit_cache_hook, Autotuner.run = hook, _run_all
    try:
        with _Zeros():  # type: ignore[no-untyped-call]
            yield
    finally:
        triton.knobs.runtime.jit_cache_hook, Autotuner.run = before, tune
        for kernels, key in stand_ins:
            kernels.pop(key, None)


def _run_all(self: Any, *args: Any, **kwargs: Any) -> None:
    """In place of `Autotuner.run`, which would time kernels that do nothing and keep the fastest: collect each."""
    self.nargs = dict(zip(self.arg_names, args, strict=False))
    for config in self.prune_configs(kwargs):
        self.fn.run(*args, **{**kwargs, **config.all_kwargs()})


def current_target() -> str:
    """Describe the current device to whoever compiles for it, as JSON: back end, architecture, threads per warp."""
    target = triton.runtime.driver.active.get_current_target()
    return json.dumps([target.backend, target.arch, target.warp_size])
