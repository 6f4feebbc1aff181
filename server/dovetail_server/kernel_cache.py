"""The folder in which Triton keeps compiled kernels: what is in it, and what a start found there."""

from __future__ import annotations

import os
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path

from dovetail.runtime.kernels import spare


def cache_folder() -> Path | None:
    """Return where Triton keeps compiled kernels; None without Triton."""
    return None if find_spec("triton") is None else spare.cache_folder()


def kernels_in(folder: Path) -> dict[str, int]:
    """Return the compiled kernels of a cache: their files' names below it, and the bytes of each."""
    found = {}
    for root, _, names in os.walk(folder):
        for name in names:
            if name.endswith((".cubin", ".hsaco", ".o")):
                path = os.path.join(root, name)
                found[os.path.relpath(path, folder)] = os.path.getsize(path)
    return found


@dataclass(frozen=True, slots=True)
class CacheLook:
    """A cache as it was before a server was started."""

    folder: Path | None
    before: frozenset[str]

    @classmethod
    def now(cls) -> CacheLook:
        """Look at the cache that a process started from here will use."""
        folder = cache_folder()
        return cls(folder, frozenset(kernels_in(folder) if folder is not None else ()))

    @property
    def num_new(self) -> int:
        """Kernels that were compiled since."""
        return len(kernels_in(self.folder).keys() - self.before) if self.folder is not None else 0

    def state(self) -> str:
        """Say what a server met that was started then: `empty`, `full`, or how much was missing so far."""
        new = self.num_new
        if not self.before:
            return "empty"
        return f"{len(self.before):,} kernels there, {new:,} missing" if new else "full"
