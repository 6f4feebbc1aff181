"""Reads the small files of a model folder, and recognises what stands in a file's place. Does not import torch."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from dovetail.contracts.errors import ModelError

MAX_JSON_BYTES = 8 << 20
"""Of one file: a config with the names of 100,000 labels takes 4 MB."""
MAX_ID = (1 << 31) - 1
"""Of a token."""
LFS_HEAD = b"version https://git-lfs.github.com/spec/"
LFS_FIX = "run `git lfs install` and `git lfs pull` in the folder, or download the model with `hf download`"


def is_there(path: Path) -> bool:
    """Whether a file is there.

    Raises:
        ModelError: It is a link to a file that is not: a hub's cache has links, and its files may have been removed.
            Or it is a folder, or a pipe, whose reader would wait for ever.
    """
    if path.is_file():
        return True
    if path.exists():
        raise ModelError(f"{path}: is a {'folder' if path.is_dir() else 'pipe or device'}, not a file; remove it")
    if path.is_symlink():
        raise ModelError(f"{path}: is a link to a file that is not there; download the model again")
    return False


def check_is_file(path: Path) -> None:
    """Refuse a file that holds nothing of its own.

    A clone without Git LFS has a pointer of three lines in place of every large file, and a download that broke off
    or a full disk leaves files of no bytes. A hub that wants a login sends a page.

    Raises:
        ModelError: It is a pointer, a page, empty, or no file.
        OSError: It cannot be opened.
    """
    is_there(path)
    with path.open("rb") as file:
        head = file.read(len(LFS_HEAD))
    if not head:
        raise ModelError(f"{path}: is empty; download it again")
    if head == LFS_HEAD:
        raise ModelError(f"{path}: is a Git LFS pointer, not the file itself; {LFS_FIX}")
    if head.lstrip().lower().startswith((b"<!doctype", b"<html")):
        raise ModelError(f"{path}: is a page of HTML, not the file itself; download it again, logged in if it is gated")


def read_text(path: Path, max_bytes: int = MAX_JSON_BYTES) -> str:
    """Return the text of a file: UTF-8, or as its byte order mark says.

    Raises:
        ModelError: It cannot be read, holds nothing of its own, is longer than that, or no text.
    """
    try:
        if (size := path.stat().st_size) > max_bytes:
            raise ModelError(f"{path}: {size:,} bytes; at most {max_bytes:,} are read of such a file")
        check_is_file(path)
        data = path.read_bytes()
        return data.decode(json.detect_encoding(data))
    except (OSError, ValueError) as error:
        raise ModelError(f"{path}: cannot be read as text in UTF-8: {error}; download it again") from error


def read_json(path: Path, max_bytes: int = MAX_JSON_BYTES) -> Any:
    """Parse a file of a model folder.

    Raises:
        ModelError: As `read_text`, or it is no JSON.
    """
    text = read_text(path, max_bytes)
    try:
        return json.loads(text)
    except RecursionError:
        raise ModelError(f"{path} cannot be read as JSON: it is nested too deeply; download it again") from None
    except ValueError as error:
        raise ModelError(f"{path} cannot be read as JSON: {error}; correct it, or download it again") from None


def read_object(path: Path, max_bytes: int = MAX_JSON_BYTES) -> dict[str, Any]:
    """Parse a file of a model folder that holds an object.

    Raises:
        ModelError: As `read_json`, or it holds something else.
    """
    value = read_json(path, max_bytes)
    if not isinstance(value, dict):
        raise ModelError(f"{path}: a JSON object is expected, not {type(value).__name__}; download it again")
    return value


def object_if_there(path: Path) -> dict[str, Any]:
    """As `read_object`; empty for a file that is not there.

    Raises:
        ModelError: As `read_object`.
    """
    return read_object(path) if is_there(path) else {}
