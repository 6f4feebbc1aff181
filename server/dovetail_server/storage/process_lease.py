"""The name under which a process holds leases, and finding out at once that another of this machine is gone.

A process is named by the running kernel, its number and a random part, and holds a lock on a file as long as it lives.
On the same machine a free lock proves that it is gone. Names are never used again, nor are segments, which bear them.
"""

from __future__ import annotations

import os
import secrets
from pathlib import Path
from typing import IO

from dovetail_server.storage.disk import lock_file, remove
from dovetail_server.storage.paths import StoragePaths

BOOT_ID = Path("/proc/sys/kernel/random/boot_id")


def machine() -> str:
    """Return a name for this run of this machine, the same for all its processes."""
    try:
        return BOOT_ID.read_text("ascii").strip().replace("-", "")[:16]
    except OSError:
        return f"unknown{os.getpid()}"


class ProcessLease:
    """This process, as leases name it. Whoever holds something notes the name under which it was taken."""

    def __init__(self, layout: StoragePaths) -> None:
        """Take a fresh name and its lock."""
        self.machine = machine()
        self.layout = layout
        self.name = ""
        self._lock: IO[bytes] | None = None
        self.rename()

    def rename(self) -> None:
        """Take another name: what was held under the old one is given up.

        Raises:
            OSError: Its lock cannot be had; the old name stays.
        """
        name = f"{self.machine}-{os.getpid()}-{secrets.token_hex(4)}"
        lock = lock_file(self._path(name))
        self.close()
        self.name, self._lock = name, lock

    def _path(self, name: str) -> Path:
        return self.layout.owners / f"{name}.lock"

    def acquire_dead_lock(self, other: str) -> IO[bytes] | None:
        """Return the lock of another process of this machine if it is gone, else None."""
        if other == self.name or not other.startswith(f"{self.machine}-") or "/" in other:
            return None
        return lock_file(self._path(other))

    def forget(self, other: str) -> None:
        """Remove what is left of a process."""
        remove(self._path(other))

    def close(self) -> None:
        """Give the name up."""
        if self._lock is not None:
            self._lock.close()
            self._lock = None
            remove(self._path(self.name))
