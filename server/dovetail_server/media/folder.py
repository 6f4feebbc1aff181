"""`MediaFolder`: where the arrays of images lie while a request needs them."""

from __future__ import annotations

import contextlib
import fcntl
import os
import shutil
import tempfile
import time
import weakref
from collections.abc import Collection, Iterable
from pathlib import Path

MEMORY = Path("/dev/shm")
PREFIX = "dovetail-media-"
MIN_BYTES = 1 << 30
"""A memory file system that is smaller, as containers have it by default, is not used."""
LOCK = "lock"
KEPT = "kept"
"""Its folder of files that are no job's: the others are looked through with every job."""
SWEEP_EVERY, LEFT_S = 64, 900.0
"""Jobs between two sweeps, and what is older than any job."""
_HELD: set[str] = set()
"""Files that requests hold."""


class MediaFolder:
    """A folder of this server alone, which ends with it. What killed servers left is removed at the next start."""

    def __init__(self, base: Path | None = None) -> None:
        """Create it.

        Args:
            base: Where. Default: the memory file system, or the folder of temporary files where that is small.

        Raises:
            OSError: It cannot be.
        """
        base = base or (MEMORY if _size(MEMORY) >= MIN_BYTES else Path(tempfile.gettempdir()))
        for left in base.glob(f"{PREFIX}*"):
            _remove_if_left(left)
        self.path = Path(tempfile.mkdtemp(prefix=PREFIX, dir=base))  # of mode 0700
        self._lock = os.open(self.path / LOCK, os.O_CREAT | os.O_RDWR | os.O_CLOEXEC, 0o600)
        fcntl.flock(self._lock, fcntl.LOCK_EX)
        self.close = weakref.finalize(self, _close, self.path, self._lock, os.getpid())
        self._num_jobs = 0

    def job(self) -> str:
        """Return what the files of the next job begin with."""
        self._num_jobs += 1
        if self._num_jobs % SWEEP_EVERY == 0:
            self.sweep()
        return f"{self._num_jobs:x}-"

    def sweep(self, age_s: float = LEFT_S) -> None:
        """Remove old files that no request holds: its client left just as its job was done."""
        before = time.time() - age_s
        for path in self.path.iterdir():
            with contextlib.suppress(FileNotFoundError):
                if path.name not in (LOCK, KEPT) and str(path) not in _HELD and path.stat().st_mtime < before:
                    path.unlink()

    def forget(self, job: str, keep: Collection[str] = ()) -> None:
        """Remove the files of a job, but for those that its requests need."""
        for path in self.path.glob(f"{job}*"):
            if str(path) not in keep:
                path.unlink(missing_ok=True)


class MediaFiles:
    """Files of one request, which are removed when this object is gone, or closed."""

    def __init__(self, paths: Iterable[str]) -> None:
        """Take them over."""
        held = frozenset(paths)
        _HELD.update(held)
        self.close = weakref.finalize(self, _unlink, held)


def _unlink(paths: Iterable[str]) -> None:
    for path in paths:
        Path(path).unlink(missing_ok=True)
        _HELD.discard(path)


def _size(folder: Path) -> int:
    try:
        found = os.statvfs(folder)
    except OSError:
        return 0
    return found.f_blocks * found.f_frsize if os.access(folder, os.W_OK | os.X_OK) else 0


def _remove_if_left(folder: Path) -> None:
    """Remove the folder of a server that is gone: nobody holds its lock."""
    try:
        lock = os.open(folder / LOCK, os.O_RDWR | os.O_NOFOLLOW | os.O_CLOEXEC)
    except OSError:
        return  # another user's, or one that is being made
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        shutil.rmtree(folder, ignore_errors=True)
    except OSError:
        pass
    finally:
        os.close(lock)


def _close(path: Path, lock: int, owner: int) -> None:
    if os.getpid() == owner:  # and not a process that was forked
        shutil.rmtree(path, ignore_errors=True)
        os.close(lock)
