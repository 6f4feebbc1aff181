"""Has all kernels of an engine compiled before it is ready, unless those of an engine like it are."""

from __future__ import annotations

import hashlib
import json
import logging
import time
from collections.abc import Callable, Sequence
from functools import partial

import torch

from dovetail.contracts.compiler import AheadCompiler
from dovetail.contracts.device import Device

logger = logging.getLogger(__name__)


class CompiledAhead:
    """Kernels of one engine."""

    def __init__(self, device: Device, fingerprint: object) -> None:
        """What compiles starts at once where something has to be compiled.

        Args:
            device: Where the engine runs.
            fingerprint: What decides which kernels it launches; anything that JSON can write.
        """
        self._cls, self._compiler = device.compiler(), None
        if self._cls is not None:
            self._compiler = _begun(self._cls, _digest([fingerprint, torch.__version__, device.model]))

    def compile(self, rehearsals: Sequence[Callable[[], None]]) -> None:
        """Run what will launch kernels without launching any, and compile these, with a progress bar.

        Afterwards the memory that the rehearsals wrote to holds anything.
        """
        compiler = self._compiler
        if compiler is None or compiler.is_known:
            return
        started = time.perf_counter()
        try:
            _rehearse(rehearsals, compiler)
            collected_s = time.perf_counter() - started
            num, num_failed = compiler.compile()
            logger.info(
                "Compiled %d kernels ahead in %.1f s (collected in %.1f s).",
                num - num_failed,
                time.perf_counter() - started,
                collected_s,
            )
        finally:
            compiler.close()

    def report_late(self) -> None:
        """From now on, log each kernel that is compiled: whoever is being served waits for it."""
        if self._cls is not None:
            self._cls.report_late(partial(logger.warning, "Compiled the kernel %s while serving: %.2f s."))


def _begun(cls: type[AheadCompiler], fingerprint: str) -> AheadCompiler | None:
    try:
        return cls(fingerprint)
    except OSError as error:  # no process or memory is left for it
        logger.warning("Kernels are compiled at first use, as no process that compiles them can start: %s", error)
        return None


def _rehearse(rehearsals: Sequence[Callable[[], None]], compiler: AheadCompiler) -> None:
    """Collect. A plugin may stumble over numbers that are all zero, which real ones never are: that is no fault."""
    for rehearse in rehearsals:
        try:
            with compiler.collecting(), torch.inference_mode():
                rehearse()
        except Exception as error:
            logger.warning(
                "Some kernels are compiled at first use, as a rehearsal of them failed: %s: %s",
                type(error).__name__,
                str(error).partition("\n")[0],
            )


def _digest(fingerprint: object) -> str:
    return hashlib.sha256(json.dumps(fingerprint, sort_keys=True, default=str).encode()).hexdigest()
