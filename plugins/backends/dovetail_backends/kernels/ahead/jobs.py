"""The engine's side of compiling kernels ahead: starts the worker, sends it what was collected, waits."""

from __future__ import annotations

import contextlib
import fcntl
import json
import logging
import os
import selectors
import time
from collections.abc import Iterator
from typing import TYPE_CHECKING

from tqdm import tqdm

from dovetail_backends.kernels.ahead.spare import spare, start_worker

if TYPE_CHECKING:
    from dovetail_backends.kernels.ahead.collect import Kernel

logger = logging.getLogger("dovetail.kernels")

PIPE_BYTES = 1 << 20
STALL_S = 120.0
"""A worker from which nothing comes for so long hangs: it is ended, and what is left is compiled where it is used."""


class CompileJobs:
    """Sends kernels to a worker process. What it cannot compile, for whatever reason, Triton compiles at first use."""

    def __init__(self) -> None:
        """Take the worker that was started early, or start it; it loads Triton while this process goes on."""
        self._process = spare.take() or start_worker()
        self.kernels: list[Kernel] = []
        self._target: str | None = None
        self._sent: set[Kernel] = set()
        with contextlib.suppress(OSError):  # so that sending waits for nobody
            fcntl.fcntl(self._process.stdin, fcntl.F_SETPIPE_SZ, PIPE_BYTES)  # type: ignore[arg-type]

    def set_target(self, target: str) -> None:
        """Say what to compile for; before anything is added. `target`: see `collect.current_target`.

        Raises:
            RuntimeError: Another one was named before.
        """
        if self._target is None:
            self._send(target.encode() + b"\n")
            self._target = target
        elif self._target != target:
            raise RuntimeError(f"kernels are collected for {target}, and were for {self._target}")

    def add(self, kernel: Kernel) -> None:
        """Have a kernel compiled, once however often it is added: each rehearsal collects what it launches."""
        if kernel in self._sent:
            return
        self._sent.add(kernel)
        self._send(json.dumps([len(self.kernels), *kernel]).encode() + b"\n")
        self.kernels.append(kernel)

    def wait(self) -> int:
        """Wait until everything is compiled, with a progress bar; returns how many kernels were not."""
        num_failed, started = 0, time.perf_counter()
        with tqdm(total=len(self.kernels), desc="Compiling kernels", unit="kernel") as bar:
            with contextlib.suppress(BrokenPipeError):
                self._process.stdin.close()  # type: ignore[union-attr]
            for number, seconds, error in self._replies():
                bar.update()
                kernel = self.kernels[number]
                if error is not None:
                    num_failed += 1
                    logger.debug("%s.%s was not compiled ahead: %s", kernel.module, kernel.name, error)
                else:
                    logger.debug("compiled %s in %.2f s", kernel.name, seconds)
            num_failed += len(self.kernels) - int(bar.n)
        logger.debug("%d kernels in %.2f s", len(self.kernels), time.perf_counter() - started)
        return num_failed

    def close(self) -> None:
        """End the worker. Safe to call twice."""
        if self._process.poll() is None:
            self._process.kill()
        for pipe in (self._process.stdin, self._process.stdout):
            if pipe is not None:
                with contextlib.suppress(BrokenPipeError):
                    pipe.close()
        self._process.wait()

    def _send(self, line: bytes) -> None:
        with contextlib.suppress(BrokenPipeError):  # it has died: `wait` says how many kernels it did not compile
            self._process.stdin.write(line)  # type: ignore[union-attr]
            self._process.stdin.flush()  # type: ignore[union-attr]

    def _replies(self) -> Iterator[tuple[int, float, str | None]]:
        """Yield what the worker says until it ends, dies or is silent for too long."""
        pipe = self._process.stdout
        if pipe is None:
            return
        rest = b""
        with selectors.DefaultSelector() as selector:
            selector.register(pipe, selectors.EVENT_READ)
            while selector.select(timeout=STALL_S):
                data = os.read(pipe.fileno(), 1 << 16)
                if not data:
                    return
                *lines, rest = (rest + data).split(b"\n")
                for line in lines:
                    number, seconds, error = json.loads(line)
                    yield number, seconds, error
        logger.warning("The kernel compiler has said nothing for %g s; it was ended.", STALL_S)
