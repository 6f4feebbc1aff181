"""`TritonCompiler`: compiles Triton's kernels ahead, in processes of their own, and notes for which engines it has.

A file in Triton's cache says that all kernels of an engine were compiled, and from which sources; where it holds,
nothing is collected, and a start with compiled kernels is as fast as it was. Importing this module imports no Triton.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import sys
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from dovetail.contracts.compiler import AheadCompiler
from dovetail_backends.kernels.ahead.jobs import CompileJobs
from dovetail_backends.kernels.ahead.spare import DIGEST_LEN, cache_folder, records, spare

if TYPE_CHECKING:
    from dovetail_backends.kernels.ahead.collect import Kernel

COMPILED = (".cubin", ".hsaco", ".o")
"""Endings of a compiled kernel's file."""


class TritonCompiler(AheadCompiler):
    """See `AheadCompiler`. The worker starts with it, so that it is ready when there is something to compile."""

    @classmethod
    def folder(cls) -> Path:
        """See `AheadCompiler`."""
        return cache_folder()

    @classmethod
    def kept(cls) -> dict[str, int]:
        """See `AheadCompiler`."""
        found, folder = {}, cls.folder()
        for root, _, names in os.walk(folder):
            for name in names:
                if name.endswith(COMPILED):
                    path = os.path.join(root, name)
                    found[os.path.relpath(path, folder)] = os.path.getsize(path)
        return found

    @classmethod
    def wake(cls) -> None:
        """See `AheadCompiler`: where nothing was ever compiled."""
        spare.start()

    @classmethod
    def release(cls) -> None:
        """See `AheadCompiler`."""
        spare.close()

    @classmethod
    def report_late(cls, report: Callable[[str, float], None]) -> None:
        """See `AheadCompiler`."""
        import triton

        def note(*, src: Any, cache_hit: bool, times: Any, **facts: Any) -> None:
            if not cache_hit:
                report(src.name, times.total / 1e6)

        triton.knobs.compilation.listener = note

    def __init__(self, fingerprint: str) -> None:
        """See `AheadCompiler`."""
        import triton

        from dovetail_backends.kernels.ahead.stable_keys import make_keys_stable

        make_keys_stable()
        name = hashlib.sha256(f"{fingerprint} {triton.__version__}".encode()).hexdigest()[:DIGEST_LEN]
        self._record = records() / f"{name}.json"
        self._jobs = None if _holds(self._record) else CompileJobs()

    @property
    def is_known(self) -> bool:
        """See `AheadCompiler`."""
        return self._jobs is None

    @contextmanager
    def collecting(self) -> Iterator[None]:
        """See `AheadCompiler`."""
        from dovetail_backends.kernels.ahead.collect import collecting, current_target

        if self._jobs is None:
            raise RuntimeError("the kernels are known: there is nothing to collect")
        self._jobs.set_target(current_target())
        with collecting(self._jobs.add):
            yield

    def compile(self) -> tuple[int, int]:
        """See `AheadCompiler`."""
        if self._jobs is None:
            return 0, 0
        num_failed = self._jobs.wait()
        if not num_failed:
            with contextlib.suppress(OSError):  # then the next start looks again
                _note(self._record, self._jobs.kernels)
        return len(self._jobs.kernels), num_failed

    def close(self) -> None:
        """See `AheadCompiler`."""
        if self._jobs is not None:
            self._jobs.close()


def _holds(record: Path) -> bool:
    """Whether an engine's kernels were compiled from sources as they are."""
    try:
        sources = json.loads(record.read_text())
    except (OSError, ValueError):
        return False
    return all(_stamp(path) == stamp for path, stamp in sources.items())


def _note(record: Path, kernels: list[Kernel]) -> None:
    modules = {sys.modules[kernel.module] for kernel in kernels if kernel.module in sys.modules}
    paths = {module.__file__ for module in modules if module.__file__ is not None}
    record.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.NamedTemporaryFile("w", dir=record.parent, delete=False) as file:
        json.dump({path: _stamp(path) for path in sorted(paths)}, file)
    os.replace(file.name, record)


def _stamp(path: str) -> list[int] | None:
    """Time of change and size of a file."""
    try:
        found = os.stat(path)
    except OSError:
        return None
    return [found.st_mtime_ns, found.st_size]
