"""Bytes on disk: free space, durable writes, and publishing a file so that it is there whole or not at all.

All that storage does to the disk goes through `os` here. What is created is for this user alone, from its first moment:
the mode is given with the creation, so that no umask and no later `chmod` leaves a gap.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import logging
import os
import shutil
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import IO

from dovetail_server.errors.catalogue import ServiceError

logger = logging.getLogger("dovetail.server")
COPY_BYTES = 1 << 20
FILE_MODE, FOLDER_MODE = 0o600, 0o700
FULL = frozenset({errno.ENOSPC, errno.EDQUOT})
PASSING = frozenset(
    {errno.EMFILE, errno.ENFILE, errno.ENOMEM, errno.EAGAIN, errno.EINTR, errno.EBUSY, errno.ETIMEDOUT, *FULL}
)
"""Errors that say nothing of the file: they pass when there is more of something."""


def disk_full(free: int, min_free: int) -> ServiceError:
    """Return the error for a write that would leave too little space."""
    logger.warning("The disk has %d bytes left; %d are kept free (--min-free-disk-bytes).", free, min_free)
    text = "the server's disk is full but for --min-free-disk-bytes; delete files of yours, or try again later"
    return ServiceError(text, code="insufficient_storage", status=507, retry_after_s=60)


def write_failed(error: OSError, min_free: int) -> Exception:
    """Return what a client is told of a write that failed: to come again, where that may help."""
    if error.errno in FULL:
        return disk_full(0, min_free)
    if error.errno in PASSING:
        text = f"the server cannot write files now: {error.strerror}"
        return ServiceError(text, code="storage_unavailable", status=503, retry_after_s=5)
    return error


def free_bytes(folder: Path) -> int:
    """Return what may still be written under `folder`."""
    found = os.statvfs(folder)
    return found.f_bavail * found.f_frsize


def make_folder(path: Path) -> None:
    """Make a folder for this user alone, if it is not there."""
    with contextlib.suppress(FileExistsError):
        os.mkdir(path, FOLDER_MODE)


def create(path: Path) -> IO[bytes]:
    """Make a file for this user alone, or empty the one that is there, and open it for writing."""
    return os.fdopen(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, FILE_MODE), "wb")


def touch(path: Path) -> None:
    """Make an empty file for this user alone, if it is not there."""
    os.close(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_CLOEXEC, FILE_MODE))


def open_to_read(path: Path) -> IO[bytes]:
    """Open a file."""
    return os.fdopen(os.open(path, os.O_RDONLY | os.O_CLOEXEC), "rb")


def read_at(path: Path, offset: int, length: int) -> bytes:
    """Read a piece of a file.

    Raises:
        OSError: It cannot be read, or ends too soon.
    """
    handle = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        found = os.pread(handle, length, offset)
    finally:
        os.close(handle)
    if len(found) != length:
        raise OSError(errno.ENODATA, f"the file has {offset + len(found)} bytes, {offset + length} are needed")
    return found


def exists(path: Path) -> bool:
    """Tell whether something is there.

    Raises:
        OSError: That cannot be told.
    """
    try:
        os.stat(path)
    except FileNotFoundError:
        return False
    return True


def names_in(folder: Path) -> list[str]:
    """Return what is in a folder."""
    return os.listdir(folder)


def age_of(path: Path, now: float) -> float:
    """Return how long ago a file was last written, in seconds; 0 where it is gone."""
    try:
        return now - os.stat(path).st_mtime
    except FileNotFoundError:
        return 0.0


def remove(path: Path) -> None:
    """Remove a file, if it is there."""
    with contextlib.suppress(FileNotFoundError):
        os.unlink(path)


def remove_folder(path: Path) -> None:
    """Remove a folder of files, as far as that goes now: what is left is removed by a later sweep."""
    with contextlib.suppress(OSError):
        for name in os.listdir(path):
            remove(path / name)
        os.rmdir(path)


def sync_folder(folder: Path) -> None:
    """Make the names in `folder` durable."""
    handle = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def publish(temp: Path, target: Path) -> None:
    """Give a finished file its name; its bytes are durable before the name is."""
    handle = os.open(temp, os.O_RDONLY | os.O_CLOEXEC)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
    os.replace(temp, target)
    sync_folder(target.parent)


def write_whole(target: Path, temp: Path, pieces: Iterable[bytes]) -> int:
    """Write a file of the user's own, with the mode that files of this user have, and publish it.

    Returns:
        Its length in bytes.
    """
    size = 0
    try:
        with temp.open("wb") as file:
            for piece in pieces:
                size += file.write(piece)
        publish(temp, target)
    finally:
        temp.unlink(missing_ok=True)
    return size


def append(path: Path, pieces: list[bytes], at: int) -> int:
    """Append to a segment and make it durable; on failure the segment is cut back to `at`.

    Args:
        path: The segment; created if need be.
        pieces: What to append.
        at: Its length that counts; what lies beyond was never committed and is overwritten.

    Returns:
        The new length.
    """
    is_new = not exists(path)
    handle = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_CLOEXEC, FILE_MODE)
    with os.fdopen(handle, "wb") as file:
        os.ftruncate(handle, at)
        file.seek(at)
        try:
            file.write(b"".join(pieces))
            file.flush()
            os.fsync(handle)
        except OSError:
            with contextlib.suppress(OSError):
                os.ftruncate(handle, at)
            raise
        end = file.tell()
    if is_new:
        sync_folder(path.parent)
    return end


def copy(source: Path, target: Path) -> None:
    """Copy a file to one for this user alone."""
    with open_to_read(source) as read, create(target) as written:
        shutil.copyfileobj(read, written, COPY_BYTES)


def link_or_copy(source: Path, target: Path, temp: Path) -> None:
    """Give `target` the bytes of `source`, shared where the file system can.

    Raises:
        FileNotFoundError: The source is gone.
    """
    try:
        os.link(source, target)
    except FileExistsError:
        return
    except FileNotFoundError:
        raise
    except OSError as error:
        if error.errno in PASSING:
            raise
        try:
            copy(source, temp)
            publish(temp, target)
        finally:
            remove(temp)


def lock_file(path: Path) -> IO[bytes] | None:
    """Take a lock that ends with this process, or return None if somebody holds it."""
    file = os.fdopen(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_CLOEXEC, FILE_MODE), "wb")
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        file.close()
        return None
    except BaseException:
        file.close()
        raise
    return file


@contextlib.contextmanager
def waiting_lock(path: Path) -> Iterator[None]:
    """Hold a lock for a block, after waiting for it."""
    with os.fdopen(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_CLOEXEC, FILE_MODE), "wb") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield
