"""Arrays of images in files: what is written is read, files that lie are refused, digests differ for other inputs."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest

from dovetail.contracts.errors import RequestError
from dovetail.messages.media import ALIGNMENT, ArrayRef, MediaSpan, content_digest, read_arrays, write_arrays

ARRAYS: dict[str, Any] = {
    "patches": np.arange(7 * 5, dtype=np.uint8).reshape(7, 5),
    "grid": np.array([1, 7, 5], np.int32),
    "none": np.empty((0, 3), np.uint8),
}


def test_what_is_written_is_read(tmp_path: Path) -> None:
    """Arrays come back with name, dtype, shape and values, aligned, and only their owner may read the file."""
    file = tmp_path / "a"
    refs = write_arrays(file, ARRAYS)
    found = read_arrays(str(file), refs)
    assert found.keys() == ARRAYS.keys()
    for name, array in ARRAYS.items():
        assert (found[name].dtype, found[name].shape) == (array.dtype, array.shape)
        assert (found[name] == array).all()
    assert [ref.start % ALIGNMENT for ref in refs] == [0, 0, 0]
    assert file.stat().st_mode & 0o777 == 0o600


def test_mapped_arrays_outlive_their_file(tmp_path: Path) -> None:
    """The sender may remove a file while an engine still reads it. Who writes to its arrays changes nobody else's."""
    file = tmp_path / "a"
    refs = write_arrays(file, ARRAYS)
    mine, other = (read_arrays(str(file), refs)["patches"] for _ in range(2))
    mine[:] = 255 - mine
    found = read_arrays(str(file), refs)["patches"]
    file.unlink()
    for each in (255 - mine, other, found):
        assert (each == ARRAYS["patches"]).all()


def test_a_file_is_never_written_over_and_a_failed_one_goes(tmp_path: Path) -> None:
    """Two senders cannot use one name, and an array of another dtype leaves no file."""
    file = tmp_path / "a"
    write_arrays(file, ARRAYS)
    with pytest.raises(FileExistsError):
        write_arrays(file, ARRAYS)
    with pytest.raises(ValueError, match="dtype float32; possible: uint8, int32"):
        write_arrays(tmp_path / "b", {"patches": np.zeros(3, np.float32)})  # type: ignore[dict-item]
    assert os.listdir(tmp_path) == ["a"]


@pytest.mark.parametrize(
    ("ref", "why"),
    [
        (ArrayRef("patches", "uint8", (1 << 40,), 0), "ends at byte 1099511627776 of a file of 128 bytes"),
        (ArrayRef("patches", "int32", (32,), 4), "ends at byte 132"),
        (ArrayRef("patches", "uint8", (-1, 5), 0), "ends at byte"),
        (ArrayRef("patches", "uint8", (5,), -8), "ends at byte"),
    ],
)
def test_references_beyond_a_file_are_refused(tmp_path: Path, ref: ArrayRef, why: str) -> None:
    """Nothing is read outside of a file, whatever a message says of it."""
    file = tmp_path / "a"
    write_arrays(file, ARRAYS)
    with pytest.raises(RequestError, match=why):
        read_arrays(str(file), [ref])


def test_a_file_that_is_gone_is_said(tmp_path: Path) -> None:
    """The request is at fault, not the engine."""
    with pytest.raises(RequestError, match=r"No such file .*; send the request again"):
        read_arrays(str(tmp_path / "gone"), [])


def test_digests_are_framed() -> None:
    """Inputs whose parts have the same bytes together have different digests; equal inputs equal ones."""
    given = ((2, 1), b"abcdef", "qwen 14", "rev")
    others: list[Any] = [
        ((21, 1), b"abcdef", "qwen 14", "rev"),
        ((1, 2), b"abcdef", "qwen 14", "rev"),
        ((2, 1), b"abcdeg", "qwen 14", "rev"),
        ((2, 1), b"abcdef", "qwen 1", "4rev"),
        ((2, 1), b"revabcdef", "qwen 14", ""),
        ((2, 1), b"abcdef", "", "qwen 14rev"),
    ]
    digests = {content_digest(*given), *(content_digest(*other) for other in others)}
    assert len(digests) == 7
    assert content_digest(*given) == content_digest((2, 1), memoryview(b"abcdef"), "qwen 14", "rev")
    assert {len(digest) for digest in digests} == {32}


def test_a_span_travels() -> None:
    """A span of a message is the same once it was packed and unpacked."""
    span = MediaSpan(
        start=3, num=4, grid=(1, 2, 2), num_patches=16, digest=bytes(32), file="/dev/shm/x",
        arrays=(ArrayRef("patches", "uint8", (16, 588), 0),),
    )  # fmt: skip
    assert msgspec.msgpack.decode(msgspec.msgpack.encode(span), type=MediaSpan) == span
