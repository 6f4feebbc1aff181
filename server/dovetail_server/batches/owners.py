"""Which process holds what, and finding out that one is gone.

A process is named by the running kernel, its number and a random part, and holds a lock on a file as long as it lives.
On the same machine a free lock proves that it is gone; what a process elsewhere held is free when its leases run out.
"""

from __future__ import annotations

import os
import secrets
from pathlib import Path
from typing import IO

from dovetail_server.storage.disk import lock_file
from dovetail_server.storage.paths import Layout

BOOT_ID = Path("/proc/sys/kernel/random/boot_id")


def machine() -> str:
    """Return a name for this run of this machine, the same for all its processes."""
    try:
        return BOOT_ID.read_text("ascii").strip().replace("-", "")[:16]
    except OSError:
        return f"unknown{os.getpid()}"


class Owner:
    """This process, as leases name it."""

    def __init__(self, layout: Layout) -> None:
        """Take a fresh name and its lock."""
        self.machine = machine()
        self.name = f"{self.machine}-{os.getpid()}-{secrets.token_hex(4)}"
        self.layout = layout
        self._path = layout.owners / f"{self.name}.lock"
        self._lock = lock_file(self._path)

    def bury(self, other: str) -> IO[bytes] | None:
        """Return the lock of another process of this machine if it is gone, else None."""
        if other == self.name or not other.startswith(f"{self.machine}-") or "/" in other:
            return None
        return lock_file(self.layout.owners / f"{other}.lock")

    def forget(self, other: str) -> None:
        """Remove what is left of a process."""
        (self.layout.owners / f"{other}.lock").unlink(missing_ok=True)

    def close(self) -> None:
        """Give the name up."""
        if self._lock is not None:
            self._lock.close()
        self._path.unlink(missing_ok=True)
