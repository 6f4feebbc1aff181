"""Tensors in one `.npz` of NumPy: a ZIP archive with a file `NAME.npy` for each. Imports neither torch nor NumPy."""

from __future__ import annotations

import ast
import struct
import zipfile
import zlib
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import IO, TYPE_CHECKING

from dovetail.contracts import CheckpointFormat, Listing, ModelError, TensorHeader

if TYPE_CHECKING:
    import torch

DTYPES = {"<f4": "F32", "<f2": "F16", "|i1": "I8", "|u1": "U8", "<i4": "I32", "<i8": "I64"}
TORCH = {"F32": "float32", "F16": "float16", "I8": "int8", "U8": "uint8", "I32": "int32", "I64": "int64"}
MAX_HEAD = 1 << 12
"""Bytes of the head of a `.npy`: NumPy writes 128."""
MAX_TENSORS = 1 << 16
LOCAL = struct.Struct("<26xHH")
"""Head of a file in an archive: what follows it is a name and further fields of these lengths."""


class Npz(CheckpointFormat):
    """Reads heads alone; the core hands out the bytes behind them."""

    @classmethod
    def claims(cls, listing: Listing) -> Sequence[str]:
        """Return the archive of a folder, or the one that is given.

        Raises:
            ModelError: There are several.
        """
        found = [name for name in listing.names if name.endswith(".npz") and listing.head(name, 2) == b"PK"]
        if len(found) > 1:
            raise ModelError(f"{listing.folder}: several .npz; give one of them as the path: {', '.join(found[:8])}")
        return found

    def headers(self) -> Iterable[TensorHeader]:
        """Return a header for each array.

        Raises:
            ModelError: The archive is broken, or an array cannot be a tensor.
        """
        (path,) = self.files
        try:
            with zipfile.ZipFile(path) as archive, path.open("rb") as file:
                entries = archive.infolist()
                if len(entries) > MAX_TENSORS:
                    raise ModelError(f"{path}: {len(entries):,} arrays; at most {MAX_TENSORS:,} are read")
                return [_header(path, file, entry) for entry in entries]
        except (OSError, ValueError, KeyError, struct.error, zipfile.BadZipFile, NotImplementedError) as error:
            raise ModelError(f"{path}: cannot be read as .npz ({error}); get the file again") from None

    def tensor(self, header: TensorHeader, data: torch.Tensor) -> torch.Tensor:
        """Return an array: a view where it is not compressed.

        Raises:
            ModelError: What is compressed is broken, or has another size than its head says.
        """
        import torch

        if header.num_stored >= 0:
            data = torch.frombuffer(_unpacked(header, data.numpy().tobytes()), dtype=torch.uint8)
        return data.view(getattr(torch, TORCH[header.dtype])).view(header.shape)


def _header(path: Path, file: IO[bytes], entry: zipfile.ZipInfo) -> TensorHeader:
    """Read the head of one array.

    Raises:
        ValueError: It is none that is read.
    """
    file.seek(entry.header_offset)
    local = file.read(LOCAL.size)
    start = entry.header_offset + LOCAL.size + sum(LOCAL.unpack(local))
    file.seek(start)
    raw = file.read(min(MAX_HEAD, entry.compress_size))
    packed = entry.compress_type == zipfile.ZIP_DEFLATED
    if packed:
        try:
            raw = zlib.decompressobj(-15).decompress(raw, MAX_HEAD)
        except zlib.error as error:
            raise ValueError(f"{entry.filename[:80]!r}: {error}") from None
    elif entry.compress_type != zipfile.ZIP_STORED:
        raise ValueError(f"{entry.filename[:80]!r} is compressed by method {entry.compress_type}")
    shape, dtype, length = _parsed(entry.filename, raw)
    name, stored = entry.filename.removesuffix(".npy"), entry.compress_size if packed else -1
    return TensorHeader(name, path, shape, dtype, start=start + (0 if packed else length), num_stored=stored)


def _parsed(name: str, raw: bytes) -> tuple[tuple[int, ...], str, int]:
    """Return shape, dtype and length of the head of a `.npy`."""
    if raw[:8] != b"\x93NUMPY\x01\x00":
        raise ValueError(f"{name[:80]!r} is no .npy of version 1.0")
    length = 10 + int.from_bytes(raw[8:10], "little")
    try:
        fields = ast.literal_eval(raw[10:length].decode("latin-1").strip())
        shape, descr, is_fortran = fields["shape"], fields["descr"], fields["fortran_order"]
    except (SyntaxError, TypeError, MemoryError, RecursionError) as error:
        raise ValueError(f"{name[:80]!r}: {error}") from None
    if descr not in DTYPES or is_fortran is not False:
        raise ValueError(f"{name[:80]!r} holds {str(descr)[:80]!r}, fortran_order {str(is_fortran)[:8]}")
    if not isinstance(shape, tuple) or not all(type(size) is int and 0 <= size < 1 << 40 for size in shape):
        raise ValueError(f"{name[:80]!r} has the shape {str(shape)[:80]}")
    return shape, DTYPES[descr], length


def _unpacked(header: TensorHeader, packed: bytes) -> bytearray:
    """Unpack an array and no byte more than its head says."""
    reader = zlib.decompressobj(-15)
    try:
        head = reader.decompress(packed, 10)
        length = int.from_bytes(head[8:10], "little")
        reader_rest = reader.decompress(reader.unconsumed_tail, length) if length else b""
        data = bytearray(reader.decompress(reader.unconsumed_tail, header.num_bytes) if header.num_bytes else b"")
    except zlib.error as error:
        raise ModelError(f"{header.file}: {header.name} is broken ({error}); get the file again") from None
    if len(reader_rest) != length or len(data) != header.num_bytes:
        raise ModelError(f"{header.file}: {header.name} is cut short; get the file again")
    return data
