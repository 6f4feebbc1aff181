"""A folder that appears when it is whole: until then it is another one beside it, which a killed process leaves.

While a process fills `OUT.partial-PID`, it holds a lock on a file there. The system lets go of it when the process
ends, however that is. So whoever gets the lock knows that nobody writes there any more, whoever has that PID today.
"""

from __future__ import annotations

import fcntl
import logging
import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import count
from pathlib import Path

from dovetail.contracts.errors import ModelError
from dovetail.sdk.config import some

logger = logging.getLogger(__name__)
MARK = ".dovetail-partial"
"""The file with the lock; a folder without it is somebody else's, whatever its name is."""


def check_new(out: Path) -> None:
    """Check that `whole_folder` can give a folder its name, before the work that fills it.

    Raises:
        ModelError: There is something that an empty folder cannot replace.
    """
    if out.is_symlink():
        raise ModelError(f"{out}: is a symbolic link; give the folder that it stands for, or another one")
    if os.path.ismount(out):
        raise ModelError(f"{out}: is a mount point; give a folder in it")
    if out.exists() and (not out.is_dir() or any(out.iterdir())):
        raise ModelError(f"{out}: is there already, and not an empty folder; give another one")
    if not out.name or out.name == "..":
        raise ModelError(f"{out}: give the folder a name")


@contextmanager
def whole_folder(out: Path) -> Iterator[Path]:
    """Give a folder to fill, which becomes `out` at the end, and is removed if there is an exception.

    What processes have left that died while they filled one for this `out` is removed first.

    Args:
        out: Must not exist, or be empty.

    Raises:
        OSError: It cannot be written.
    """
    out.parent.mkdir(parents=True, exist_ok=True)
    remove_left(out)
    part, lock = _claimed(out)
    try:
        yield part
        (part / MARK).unlink()
        if out.exists():
            out.rmdir()
        part.rename(out)
    finally:
        shutil.rmtree(part, ignore_errors=True)
        os.close(lock)


def remove_left(out: Path) -> None:
    """Remove folders that were to become `out` and whose process is gone, and name in the log those of others."""
    start, foreign = f"{out.name}.partial-", []
    for path in sorted(out.parent.iterdir()):
        if not path.name.startswith(start) or path.is_symlink() or not path.is_dir():
            continue
        if not (path / MARK).is_file():
            foreign.append(str(path))
            continue
        lock = _locked(path / MARK)
        if lock is None:
            logger.warning("%s: another process writes there.", path)
            continue
        try:
            shutil.rmtree(path)
        finally:
            os.close(lock)
        logger.warning("%s: removed; the process that wrote it ended before it was whole.", path)
    if foreign:
        logger.warning("Not known, and left as it is: %s. If it is an old attempt, remove it.", some(foreign))


def _claimed(out: Path) -> tuple[Path, int]:
    """Make a folder of our own, and lock it."""
    for number in count():
        part = out.with_name(f"{out.name}.partial-{os.getpid()}" + (f"-{number}" if number else ""))
        try:
            part.mkdir()
            (part / MARK).touch()
            lock = _locked(part / MARK)
        except FileExistsError:
            continue
        except FileNotFoundError:  # whoever looks for left ones was faster than the lock, and has removed it
            continue
        if lock is not None:
            return part, lock
    raise RuntimeError("there are no more numbers")


def _locked(path: Path) -> int | None:
    """Return an open file with its lock, None where somebody has that, or has removed the file meanwhile."""
    lock = os.open(path, os.O_RDWR)
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        os.close(lock)
        return None
    if os.fstat(lock).st_nlink == 0:
        os.close(lock)
        return None
    return lock
