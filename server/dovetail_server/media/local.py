"""Images in files of this machine, below the one directory that the operator allows."""

from __future__ import annotations

import os
import stat
from pathlib import Path
from urllib.parse import unquote, urlsplit

from dovetail_server.media.refusals import MAX_IMAGE_BYTES, MediaError, shown, too_large

NOT_FOUND = "image_file_not_found"


def read_local(url: str, root: Path | None) -> bytes:
    """Return what a `file://` URL names.

    Args:
        url: The URL.
        root: The directory, as `--allowed-local-media-path`; None: no file may be read.

    Raises:
        MediaError: The file may not be read, or is not there. What is outside gets one error, there or not.
    """
    if root is None:
        text = "file:// addresses are not read here; send the image as a data: URL, or have the operator allow its "
        raise MediaError(f"{text}directory (--allowed-local-media-path)", "invalid_image_url")
    try:
        parts = urlsplit(url)
        path = unquote(parts.path, errors="strict")
    except ValueError:
        raise MediaError(
            f"{shown(url)} is no URL; send one such as file:///images/cat.png", "invalid_image_url"
        ) from None
    if parts.netloc not in ("", "localhost") or parts.query or parts.fragment or "\0" in path:
        text = f"{shown(url)} names no file of this machine; send one such as file:///images/cat.png"
        raise MediaError(text, "invalid_image_url")
    top = os.path.realpath(root)
    real = os.path.realpath(path)
    if os.path.commonpath((top, real)) != top or real == top:
        text = f"{shown(url)} is outside of the directory that the operator allows (--allowed-local-media-path)"
        raise MediaError(f"{text}; send the image as a data: URL", "invalid_image_url")
    try:
        return read_regular(_open_below(top, os.path.relpath(real, top).split(os.sep)), shown(url))
    except OSError:
        raise MediaError(f"{shown(url)} cannot be read; check its path and permissions", NOT_FOUND) from None


def _open_below(top: str, names: list[str]) -> int:
    """Open a file by the names of its path, none of which may have become a link since it was checked."""
    at = os.open(top, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        for name in names[:-1]:
            below = os.open(name, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC, dir_fd=at)
            os.close(at)
            at = below
        # A pipe that nobody writes to would block without `O_NONBLOCK`; regular files do not mind it.
        return os.open(names[-1], os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC, dir_fd=at)
    finally:
        os.close(at)


def read_regular(handle: int, what: str) -> bytes:
    """Return what an open file holds, and close it.

    Args:
        handle: The file's descriptor.
        what: Names it in errors.

    Raises:
        MediaError: It is no regular file, or has too many bytes.
        OSError: It cannot be read.
    """
    if not stat.S_ISREG(os.fstat(handle).st_mode):
        os.close(handle)
        raise MediaError(f"{what} is no regular file; name one that holds an image", "invalid_image_url")
    with os.fdopen(handle, "rb", buffering=0) as file:
        data = bytearray()
        while len(data) <= MAX_IMAGE_BYTES and (chunk := file.read(MAX_IMAGE_BYTES + 1 - len(data))):
            data += chunk
    if len(data) > MAX_IMAGE_BYTES:
        raise too_large(what)
    return bytes(data)
