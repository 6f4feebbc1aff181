"""Compiles kernels into Triton's cache, several at once.

Started by `CompileJobs`. Standard input: a line that describes the device, then one line a kernel, all JSON;
standard output: one line for each that is done. The end of the input ends it once all is done. Each kernel is compiled
in a fork of this process, which has Triton and the kernels' modules loaded: a compiler that crashes takes nothing with
it. No CUDA context is made: compiling needs none, and it would take memory of the device.
"""

from __future__ import annotations

import contextlib
import importlib
import json
import os
import selectors
import signal
import sys
import time
from importlib.metadata import entry_points
from typing import Any

MAX_ERROR_LEN = 500
REPLIES = 3
"""File descriptor of the replies: what a kernel's module may print goes to standard error."""


def import_early() -> None:
    """Import the kernels of all sets that are installed, which takes seconds: they import torch."""
    for point in entry_points(group="dovetail.kernels.v1"):
        with contextlib.suppress(Exception):  # a stranger's: who uses it says what is wrong with it
            for module in point.load().modules:
                importlib.import_module(module)


class CompileWorker:
    """Reads kernels, and has up to `num_jobs` compiled at a time."""

    def __init__(self, num_jobs: int) -> None:
        self._num_jobs = num_jobs
        self._waiting: list[tuple[int, str, str, str]] = []
        self._running: dict[int, tuple[int, str, float]] = {}  # by process: number and name, and when it began
        self._seconds: dict[str, float] = {}  # by name: the longest that a variant of it has taken
        self._is_open = True
        self._rest = b""

    def run(self) -> None:
        """Serve until the input ends and all is compiled."""
        reader, writer = os.pipe()
        os.set_blocking(writer, False)
        os.set_blocking(reader, False)
        signal.set_wakeup_fd(writer)
        signal.signal(signal.SIGCHLD, lambda number, frame: None)
        selector = selectors.DefaultSelector()
        selector.register(sys.stdin.fileno(), selectors.EVENT_READ, self._read)
        selector.register(reader, selectors.EVENT_READ, lambda: os.read(reader, 4096))
        while self._is_open or self._waiting or self._running:
            for key, _ in selector.select(timeout=1.0):
                key.data()
            if not self._is_open and sys.stdin.fileno() in selector.get_map():
                selector.unregister(sys.stdin.fileno())
            self._reap()
            while self._waiting and len(self._running) < self._num_jobs:
                self._start(*self._waiting.pop(self._next()))

    def _next(self) -> int:
        """Return which is to be compiled next: the longest first, so that none is alone at the end; new ones before."""
        times = [self._seconds.get(name, float("inf")) for _, _, name, _ in self._waiting]
        return times.index(max(times))

    def _read(self) -> None:
        data = os.read(sys.stdin.fileno(), 1 << 20)
        if not data:
            self._is_open = False
        *lines, self._rest = (self._rest + data).split(b"\n")
        for line in lines:
            self._waiting.append(tuple(json.loads(line)))

    def _start(self, number: int, module: str, name: str, specialization: str) -> None:
        try:
            function: Any = importlib.import_module(module)
            for part in name.split("."):
                function = getattr(function, part)
            while not hasattr(function, "preload"):  # what tunes it, or works out its constants, stands around it
                function = function.fn
        except Exception as error:  # a module that cannot be imported here is compiled where it is used
            say(number, 0.0, f"{type(error).__name__}: {error}")
            return
        pid = os.fork()
        if pid == 0:
            _compile_and_exit(number, function, specialization)
        self._running[pid] = (number, name, time.monotonic())

    def _reap(self) -> None:
        while self._running:
            pid, status = os.waitpid(-1, os.WNOHANG)
            if pid == 0:
                return
            number, name, began = self._running.pop(pid)
            self._seconds[name] = max(self._seconds.get(name, 0.0), time.monotonic() - began)
            code = os.waitstatus_to_exitcode(status)
            if code != 0:  # one that ended well has said so
                say(number, time.monotonic() - began, f"the compiler ended with exit code {code}")


def say(number: int, seconds: float, error: str | None) -> None:
    """Write that a kernel is done: one short line, which the kernel writes in one piece."""
    line = json.dumps([number, round(seconds, 3), None if error is None else error[:MAX_ERROR_LEN]])
    os.write(REPLIES, line.encode() + b"\n")


def _compile_and_exit(number: int, function: Any, specialization: str) -> None:
    """Compile in this fork, and never return."""
    began = time.monotonic()
    error = None
    try:
        signal.set_wakeup_fd(-1)
        kernel = function.preload(specialization)
        make_launcher(kernel)
    except BaseException as caught:
        error = f"{type(caught).__name__}: {caught}"
    say(number, time.monotonic() - began, error)
    os._exit(0)


def make_launcher(kernel: Any) -> None:
    """Compile the C function that launches a kernel, too, where this version of Triton makes one for each."""
    from triton.runtime import driver

    launcher = getattr(driver.active, "launcher_cls", None)
    if launcher is not None:
        launcher(kernel.src, kernel.metadata)


def use_target(backend: str, arch: int | str, warp_size: int) -> None:
    """Let Triton compile for a device without looking for one."""
    from triton.backends import backends
    from triton.backends.compiler import GPUTarget
    from triton.runtime import driver

    target = GPUTarget(backend, arch, warp_size)
    found = next(one for one in backends.values() if one.compiler.supports_target(target))
    try:
        active: Any = found.driver()
    except Exception:  # no driver library: kernels can be compiled all the same, what launches them cannot
        active = _NoDriver()
    active.get_current_device = lambda: 0
    active.get_current_target = lambda: target
    driver.set_active(active)


class _NoDriver:
    """Stands for a driver where there is none."""


def main() -> None:
    """Read the device's line, then serve."""
    os.dup2(1, REPLIES)
    os.dup2(2, 1)
    num_jobs = max(1, len(os.sched_getaffinity(0)) - 1)
    os.nice(5)  # whoever loads weights meanwhile goes first
    import_early()
    from dovetail_backends.kernels.ahead.stable_keys import make_keys_stable

    make_keys_stable()
    line = b""
    while not line.endswith(b"\n"):
        piece = os.read(0, 1)
        if not piece:
            return
        line += piece
    use_target(*json.loads(line))
    CompileWorker(num_jobs).run()
