"""Images on their way to an engine: where they stand in the prompt, what they contain, and which file has the arrays.

The arrays of an image are one file in a memory file system (`/dev/shm`). The sender writes the file, keeps it while a
request needs it and removes it; an engine and its ranks map it read-only, each when it runs the vision tower. So pixels
are in no message, and an engine that was restarted finds them again.
"""

from __future__ import annotations

import hashlib
import mmap
import os
from collections.abc import Iterable, Mapping
from math import prod
from pathlib import Path
from typing import TYPE_CHECKING, Literal

import msgspec

from dovetail.contracts.errors import RequestError

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt

ALIGNMENT = 64
"""Each array of a file begins at a multiple of it."""
DIGEST_BYTES = 32
ITEM_BYTES = {"uint8": 1, "int32": 4}


class ArrayRef(msgspec.Struct, frozen=True):
    """An array in a file."""

    name: str
    dtype: Literal["uint8", "int32"]
    shape: tuple[int, ...]
    start: int
    """Of its bytes in the file."""

    @property
    def num_bytes(self) -> int:
        """Size."""
        return prod(self.shape) * ITEM_BYTES[self.dtype]


class MediaSpan(msgspec.Struct, frozen=True, kw_only=True):
    """Tokens of a prompt that stand for an image, one behind another; an image with breaks between has several spans.

    Spans are in the order of the prompt and do not overlap. `first` is the embedding of the image that the token at
    `start` has; `grid` is that of `ImageLayout`. Equal `digest`s mean equal arrays: engines keep tower output and
    cached pages by it.
    """

    start: int
    num: int
    first: int = 0
    grid: tuple[int, int, int]
    num_patches: int
    digest: bytes
    file: str
    arrays: tuple[ArrayRef, ...]


def content_digest(size: tuple[int, int], pixels: bytes | memoryview, fingerprint: str, revision: str) -> bytes:
    """Return the digest of an image, 32 bytes. Each part is framed by its length: no two inputs have the same bytes.

    Args:
        size: Width and height.
        pixels: RGB, row by row: `Image.tobytes()` of a decoded image of mode `RGB`.
        fingerprint: Of the image processor.
        revision: Of the model: what tells its weights from those of others at the same server.
    """
    return framed_digest(b"%d %d" % size, fingerprint.encode(), revision.encode(), pixels)


def framed_digest(*parts: bytes | memoryview) -> bytes:
    """Return the SHA-256 of parts, each framed by its length."""
    found = hashlib.sha256()
    for part in parts:
        found.update(len(part).to_bytes(8, "little"))
        found.update(part)
    return found.digest()


def write_arrays(
    path: Path, arrays: Mapping[str, npt.NDArray[np.uint8] | npt.NDArray[np.int32]]
) -> tuple[ArrayRef, ...]:
    """Write arrays into a new file that only this user may read.

    Raises:
        FileExistsError: There is such a file.
        OSError: It cannot be written, as with a full memory file system; then there is no file.
        ValueError: An array is neither uint8 nor int32.
    """
    import numpy as np  # not at the top: listing plugins, and processes that only pass messages on, have no use for it

    refs: list[ArrayRef] = []
    end = 0
    for name, array in arrays.items():
        if (dtype := array.dtype.name) not in ("uint8", "int32"):
            raise ValueError(f"array {name!r} of an image has dtype {dtype}; possible: uint8, int32")
        refs.append(ArrayRef(name, dtype, array.shape, end))  # type: ignore[arg-type]
        end += -(-refs[-1].num_bytes // ALIGNMENT) * ALIGNMENT
    handle = os.open(path, os.O_CREAT | os.O_EXCL | os.O_WRONLY | os.O_CLOEXEC, 0o600)
    try:
        with os.fdopen(handle, "wb") as file:
            for ref, array in zip(refs, arrays.values(), strict=True):
                file.seek(ref.start)
                file.write(np.ascontiguousarray(array).data)
            file.truncate(end)
    except BaseException:
        path.unlink(missing_ok=True)
        raise
    return tuple(refs)


def read_arrays(path: str, refs: Iterable[ArrayRef]) -> dict[str, npt.NDArray[np.uint8] | npt.NDArray[np.int32]]:
    """Map the arrays of a file. They keep its bytes alive, also once the file is removed; no process writes to them.

    Raises:
        RequestError: The file is gone, or shorter than its arrays.
    """
    import numpy as np

    try:
        with open(path, "rb") as file:
            size = os.fstat(file.fileno()).st_size
            # Writable pages of its own: PyTorch takes no others without a copy.
            data = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_COPY) if size else bytearray()
    except OSError as error:
        raise RequestError(f"the arrays of an image cannot be read: {error}; send the request again") from None
    found = {}
    for ref in refs:
        if ref.start < 0 or min(ref.shape, default=1) < 0 or ref.start + ref.num_bytes > size:
            raise RequestError(
                f"array {ref.name!r} of an image ends at byte {ref.start + ref.num_bytes} of a file of {size} bytes"
            )
        flat = np.frombuffer(data, ref.dtype, prod(ref.shape), ref.start)
        found[ref.name] = flat.reshape(ref.shape)
    return found
