"""Compiled kernels that are kept for later starts: what a start found."""

from __future__ import annotations

from dataclasses import dataclass

from dovetail.contracts.compiler import AheadCompiler
from dovetail.plugins.plan import AUTO
from dovetail.plugins.registry import Registry
from dovetail.runtime.device.devices import best, installed


@dataclass(frozen=True, slots=True)
class CacheLook:
    """A cache as it was before a server was started.

    Attributes:
        compiler: Whose cache; None: the device keeps no kernels.
        before: The kernels in it.
    """

    compiler: type[AheadCompiler] | None
    before: frozenset[str]

    @classmethod
    def now(cls) -> CacheLook:
        """Look at the cache that a server will use which takes the best device, without importing torch."""
        compiler = best(each for _, each in installed(Registry.scan(), AUTO)).compiler()
        return cls(compiler, frozenset(compiler.kept() if compiler is not None else ()))

    @property
    def num_new(self) -> int:
        """Kernels that were compiled since."""
        return len(self.compiler.kept().keys() - self.before) if self.compiler is not None else 0

    def state(self) -> str:
        """Say what a server met that was started then: `empty`, `full`, or how much was missing so far."""
        new = self.num_new
        if not self.before:
            return "empty"
        return f"{len(self.before):,} kernels there, {new:,} missing" if new else "full"
