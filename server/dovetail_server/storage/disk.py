"""Bytes on disk: free space, durable writes, and publishing a file so that it is there whole or not at all."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import shutil
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import IO

from dovetail_server.errors import ServiceError

COPY_BYTES = 1 << 20
FULL = frozenset({errno.ENOSPC, errno.EDQUOT})


def disk_full(free: int, floor: int) -> ServiceError:
    """Return the error for a write that would leave too little space."""
    text = (
        f"the server's disk has {free} bytes left, and {floor} are kept free (--min-free-disk-bytes); "
        "delete files, or try again when there is room"
    )
    return ServiceError(text, code="insufficient_storage", status=507, retry_after_s=60)


def free_bytes(folder: Path) -> int:
    """Return what may still be written under `folder`."""
    return shutil.disk_usage(folder).free


def sync_folder(folder: Path) -> None:
    """Make the names in `folder` durable."""
    handle = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def publish(temp: Path, target: Path) -> None:
    """Give a finished file its name; its bytes are durable before the name is."""
    with temp.open("rb") as file:
        os.fsync(file.fileno())
    os.replace(temp, target)
    sync_folder(target.parent)


def write_whole(target: Path, temp: Path, pieces: Iterable[bytes]) -> int:
    """Write a file and publish it.

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
    is_new = not path.exists()
    with path.open("ab") as file:
        file.truncate(at)
        try:
            file.write(b"".join(pieces))
            file.flush()
            os.fsync(file.fileno())
        except OSError:
            with contextlib.suppress(OSError):
                os.ftruncate(file.fileno(), at)
            raise
        end = file.tell()
    if is_new:
        sync_folder(path.parent)
    return end


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
    except OSError:
        shutil.copyfile(source, temp)
        publish(temp, target)


def lock_file(path: Path) -> IO[bytes] | None:
    """Take a lock that ends with this process, or return None if somebody holds it."""
    file = path.open("ab")
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        file.close()
        return None
    return file


@contextlib.contextmanager
def waiting_lock(path: Path) -> Iterator[None]:
    """Hold a lock for a block, after waiting for it."""
    with path.open("ab") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield
