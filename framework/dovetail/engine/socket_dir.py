"""The directory of the socket between server and engine, which only this user can enter.

A server that was killed leaves its directory behind. So each holds a lock on its own for as long as it lives, which the
system releases when it dies, and removes the directories without a holder.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import stat
import tempfile
from pathlib import Path

PREFIX = "dovetail-engine-"
SOCKET = "engine.sock"
TRIES = 10
MAX_PATH = 104
"""Bytes of a socket's path, its end included, that every system takes."""


class SocketDir:
    """A directory in the system's one for temporary files.

    Attributes:
        path: Of the socket in it.
    """

    def __init__(self) -> None:
        """Make and lock it.

        Raises:
            OSError: There is no room for it.
        """
        for _ in range(TRIES):
            directory = Path(tempfile.mkdtemp(prefix=PREFIX, dir=_parent()))  # mode 0700
            held = _lock(directory)
            if held is not None:
                self._directory, self._held, self.path = directory, held, directory / SOCKET
                return
        raise OSError(f"directories of sockets cannot be locked in {_parent()}")

    def close(self) -> None:
        """Remove it."""
        _remove(self._directory)
        os.close(self._held)


def remove_stale() -> None:
    """Remove the directories of servers that were killed."""
    with contextlib.suppress(OSError), os.scandir(_parent()) as entries:
        for entry in entries:
            if entry.name.startswith(PREFIX) and _is_own(entry):
                directory = Path(entry.path)
                held = _lock(directory)
                if held is not None:
                    _remove(directory)
                    os.close(held)


def _parent() -> str:
    """The directory for temporary files; /tmp where a socket's path would be too long in it."""
    found = tempfile.gettempdir()
    longest = os.path.join(found, f"{PREFIX}12345678", SOCKET)
    return found if len(os.fsencode(longest)) < MAX_PATH else "/tmp"


def _is_own(entry: os.DirEntry[str]) -> bool:
    with contextlib.suppress(OSError):
        found = entry.stat(follow_symlinks=False)
        return stat.S_ISDIR(found.st_mode) and found.st_uid == os.getuid()
    return False


def _lock(directory: Path) -> int | None:
    """Return the lock's descriptor; None if another process has it or has removed the directory."""
    try:
        held = os.open(directory, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
    except FileNotFoundError:
        return None
    try:
        fcntl.flock(held, fcntl.LOCK_EX | fcntl.LOCK_NB)
        if os.path.samestat(os.fstat(held), os.stat(directory)):
            return held
    except (BlockingIOError, FileNotFoundError):
        pass
    except BaseException:
        os.close(held)
        raise
    os.close(held)
    return None


def _remove(directory: Path) -> None:
    """Remove a directory that holds only a socket; other files stay, and the directory with them."""
    with contextlib.suppress(OSError):
        (directory / SOCKET).unlink(missing_ok=True)
    with contextlib.suppress(OSError):
        directory.rmdir()
