"""Compiles all kernels of an engine before it is ready, unless an engine like it has done so before."""

from __future__ import annotations

import contextlib
import hashlib
import json
import logging
import os
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from typing import Any

import torch
import triton

from dovetail.runtime.kernels.collect import Kernel, collecting, current_target
from dovetail.runtime.kernels.compiler import KernelCompiler
from dovetail.runtime.kernels.spare import DIGEST_LEN, records
from dovetail.runtime.kernels.stable_keys import make_keys_stable

logger = logging.getLogger(__name__)


class CompiledAhead:
    """Kernels of one engine. The worker starts with it, so that it is ready when there is something to compile.

    A file in Triton's cache folder says that all kernels of an engine like this one were compiled, and from which
    sources; where it holds, nothing is collected, and a start with compiled kernels is as fast as it was.
    """

    def __init__(self, fingerprint: object) -> None:
        """`fingerprint`: what decides which kernels an engine launches; anything that JSON can write."""
        make_keys_stable()
        self._record = records() / f"{_digest(fingerprint)}.json"
        self._compiler = None if self._is_done() else self._start()

    def compile(self, rehearsals: Sequence[Callable[[], None]]) -> None:
        """Run what will launch kernels without launching any, and compile these, with a progress bar.

        Afterwards the memory that the rehearsals wrote to holds anything.
        """
        compiler = self._compiler
        if compiler is None:
            return
        started = time.perf_counter()
        try:
            compiler.set_target(current_target())
            self._rehearse(rehearsals, compiler)
            collected_s = time.perf_counter() - started
            num_failed = compiler.wait()
            logger.info(
                "Compiled %d kernels ahead in %.1f s (collected in %.1f s).",
                len(compiler.kernels) - num_failed,
                time.perf_counter() - started,
                collected_s,
            )
            if not num_failed:
                with contextlib.suppress(OSError):  # then the next start looks again
                    self._note(compiler.kernels)
        finally:
            compiler.close()

    @staticmethod
    def _start() -> KernelCompiler | None:
        try:
            return KernelCompiler()
        except OSError as error:  # no process or memory is left for it
            logger.warning("Kernels are compiled at first use, as no process that compiles them can start: %s", error)
            return None

    @staticmethod
    def _rehearse(rehearsals: Sequence[Callable[[], None]], compiler: KernelCompiler) -> None:
        """Collect. A plugin may stumble over numbers that are all zero, which real ones never are: that is no fault."""
        for rehearse in rehearsals:
            try:
                with collecting(compiler.add), torch.inference_mode():
                    rehearse()
            except Exception as error:
                logger.warning(
                    "Some kernels are compiled at first use, as a rehearsal of them failed: %s: %s",
                    type(error).__name__,
                    str(error).partition("\n")[0],
                )

    @staticmethod
    def report_late() -> None:
        """From now on, log each kernel that is compiled: whoever is being served waits for it."""

        def note(*, src: Any, cache_hit: bool, times: Any, **facts: Any) -> None:
            if not cache_hit:
                logger.warning("Compiled the kernel %s while serving: %.2f s.", src.name, times.total / 1e6)

        triton.knobs.compilation.listener = note

    def _is_done(self) -> bool:
        try:
            sources = json.loads(self._record.read_text())
        except (OSError, ValueError):
            return False
        return all(_stamp(path) == stamp for path, stamp in sources.items())

    def _note(self, kernels: Sequence[Kernel]) -> None:
        modules = {sys.modules[kernel.module] for kernel in kernels if kernel.module in sys.modules}
        paths = {module.__file__ for module in modules if module.__file__ is not None}
        self._record.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.NamedTemporaryFile("w", dir=self._record.parent, delete=False) as file:
            json.dump({path: _stamp(path) for path in sorted(paths)}, file)
        os.replace(file.name, self._record)


def _digest(fingerprint: object) -> str:
    facts = [fingerprint, triton.__version__, torch.__version__, torch.cuda.get_device_name()]
    return hashlib.sha256(json.dumps(facts, sort_keys=True, default=str).encode()).hexdigest()[:DIGEST_LEN]


def _stamp(path: str) -> list[int] | None:
    """Time of change and size of a file."""
    try:
        found = os.stat(path)
    except OSError:
        return None
    return [found.st_mtime_ns, found.st_size]
