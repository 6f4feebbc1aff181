"""A compiler's worker that is started before it is known to be needed: importing torch takes it seconds.

With an empty kernel cache it is needed: then it imports while the engine does, before this process has torch. The
compiler takes it. Nothing here imports torch or Triton.
"""

from __future__ import annotations

import contextlib
import os
import subprocess
from pathlib import Path

from dovetail.contracts.compiler import ASIDE

DIGEST_LEN = 32
"""Letters of a record's name, by which it is told from what else is kept there."""


def cache_folder() -> Path:
    """Return where Triton keeps compiled kernels: `triton.knobs.cache.dir`, without Triton."""
    home = os.environ.get("TRITON_HOME") or Path.home()
    return Path(os.environ.get("TRITON_CACHE_DIR") or Path(home) / ".triton" / "cache")


def records() -> Path:
    """Return where it is noted which engines' kernels are all compiled."""
    return cache_folder() / "dovetail"


def start_worker() -> subprocess.Popen[bytes]:
    """Start a worker, which ends when its standard input is closed."""
    return subprocess.Popen(
        [*ASIDE, "compiler", "dovetail_backends.kernels.ahead.worker:main"],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        env={**os.environ, "PYTHONUNBUFFERED": "1"},
    )


class Spare:
    """At most one worker that has not been taken yet."""

    def __init__(self) -> None:
        self._worker: subprocess.Popen[bytes] | None = None

    def start(self) -> None:
        """Start it where no record says that anything was compiled."""
        if self._worker is None and not any(len(path.stem) == DIGEST_LEN for path in records().glob("*.json")):
            with contextlib.suppress(OSError):  # the compiler then starts one, and reports the error
                self._worker = start_worker()

    def take(self) -> subprocess.Popen[bytes] | None:
        """Hand it over, if there is one."""
        worker, self._worker = self._worker, None
        return worker

    def close(self) -> None:
        """End the worker if it was not taken."""
        worker = self.take()
        if worker is not None:
            worker.kill()
            worker.communicate()


spare = Spare()
"""This process's."""
