"""Reads the head of a GGUF file: its metadata, and where its tensors lie.

```
"GGUF" · version u32 · tensors u64 · keys u64
keys x (text · type u32 · value)              text: length u64, UTF-8
tensors x (text · axes u32 · axes x u64, the innermost first · type u32 · offset u64)
padding to a multiple of general.alignment · data
```

Every count is held against what is left of the file before anything is read for it, and arrays are decoded when they
are asked for: a vocabulary of 150,000 tokens takes 0.1 s to walk over. (gguf-py's own reader took 7.9 s and 560 MB for
it, which is why there is one here.)

Source: ggml's `docs/gguf.md`, read November 2026.
"""

from __future__ import annotations

import mmap
import struct
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import lru_cache
from math import prod
from pathlib import Path
from typing import Any, NamedTuple

from dovetail.contracts.errors import ModelError
from dovetail_backends.gguf.blocks import TYPES

MAGIC = b"GGUF"
VERSIONS = (2, 3)
SCALARS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}
"""Types of values that `struct` knows."""
TEXT, ARRAY = 8, 9
KEY_BYTES, TENSOR_BYTES = 13, 24
"""The least that an entry takes."""
MAX_NAME = 1 << 16
MAX_KEYS, MAX_TENSORS = 1 << 16, 1 << 20
"""Entries of one file: a large model of experts has 100 keys and 2,000 tensors, and each takes some 500 bytes here."""
MAX_TEXT = 16 << 20
"""Bytes of one value: a chat template takes 100 KB."""
MAX_ITEMS = 1 << 22
"""Of one array: eight times the most merges. A decoded number takes 40 bytes, in the file perhaps one."""
MAX_ITEM = 1 << 12
"""Bytes of a text in one: a token, or the two of a merge."""
MAX_AXES = 4
MAX_ALIGNMENT = 1 << 20


class TensorPlace(NamedTuple):
    """Where a tensor lies.

    Attributes:
        name: In the file: `blk.0.attn_q.weight`.
        kind: The name of a `BlockType`.
        shape: Numbers, the outermost axis first.
        row_bytes: Bytes of the innermost axis.
        file: That it is in.
        offset: In bytes from the file's start.
    """

    name: str
    kind: str
    shape: tuple[int, ...]
    row_bytes: int
    file: Path
    offset: int

    @property
    def num_bytes(self) -> int:
        """Size in the file."""
        return prod(self.shape[:-1]) * self.row_bytes


class LazyArray:
    """An array of the metadata, decoded when it is asked for."""

    def __init__(self, head: GgufHead, kind: int, num: int, offset: int) -> None:
        self._head, self._kind, self._num, self._offset = head, kind, num, offset

    @property
    def of(self) -> str:
        """What it holds: `texts` or `numbers`."""
        return "texts" if self._kind == TEXT else "numbers"

    def __len__(self) -> int:
        return self._num

    def __repr__(self) -> str:
        return f"an array of {self._num:,} {self.of}"

    def decode(self) -> list[Any]:
        """Return the values.

        Raises:
            ModelError: A text is no UTF-8.
        """
        with self._head.opened(self._offset) as head:
            if self._kind == TEXT:
                return [head.text(MAX_ITEM) for _ in range(self._num)]
            return list(head.many(SCALARS[self._kind], self._num))


@dataclass(frozen=True, slots=True)
class Gguf:
    """What the heads of a model's files say.

    Attributes:
        files: In their order.
        metadata: Of the first: values by key; arrays are `LazyArray`.
        tensors: Of all files, by name.
    """

    files: tuple[Path, ...]
    metadata: Mapping[str, Any]
    tensors: Mapping[str, TensorPlace]

    def numbers(self, key: str) -> list[Any] | None:
        """Return an array of numbers, None where it is not there.

        Raises:
            ModelError: It is something else.
        """
        return self._array(key, "numbers")

    def texts(self, key: str) -> list[str] | None:
        """Return an array of texts, None where it is not there.

        Raises:
            ModelError: It is something else.
        """
        return self._array(key, "texts")

    def _array(self, key: str, of: str) -> list[Any] | None:
        value = self.metadata.get(key)
        if value is None:
            return None
        if not isinstance(value, LazyArray) or value.of != of:
            raise ModelError(f"{self.files[0]}: {key} is {value!r} instead of an array of {of}")
        return value.decode()

    def token_id(self, name: str) -> int | None:
        """Return `tokenizer.ggml.NAME_token_id`, None where it is not there.

        Raises:
            ModelError: It is no number.
        """
        value = self.metadata.get(key := f"tokenizer.ggml.{name}_token_id")
        if value is not None and type(value) is not int:
            raise ModelError(f"{self.files[0]}: {key} is {value!r} instead of a whole number")
        return value


def read_files(files: tuple[Path, ...]) -> Gguf:
    """Return what the heads of a model's files say; read once for as long as the files are the same.

    Raises:
        ModelError: One is broken, or they do not go together.
    """
    try:
        stamps = tuple((one.stat().st_size, one.stat().st_mtime_ns) for one in files)
    except OSError as error:
        raise ModelError(f"{files[0]}: cannot be read as GGUF: {error}") from None
    return _read(files, stamps)


@lru_cache(maxsize=4)
def _read(files: tuple[Path, ...], stamps: tuple[tuple[int, int], ...]) -> Gguf:
    heads = [GgufHead(file).read() for file in files]
    metadata = heads[0][0]
    tensors: dict[str, TensorPlace] = {}
    for number, (file, (own, places)) in enumerate(zip(files, heads, strict=True)):
        count, at = (own.get(f"split.{key}", default) for key, default in (("count", 1), ("no", 0)))
        if type(count) is not int or type(at) is not int:
            raise ModelError(f"{file}: split.count is {count!r} and split.no {at!r} instead of whole numbers")
        if (max(1, count), at) != (len(files), number):
            raise ModelError(
                f"{file}: says that it is file {at + 1} of {count}, and stands as {number + 1} of {len(files)}; "
                "keep the names that the files were published under"
            )
        for place in places:
            if place.name in tensors:
                raise ModelError(f"{file}: the tensor {place.name} is there twice")
            tensors[place.name] = place
    total = metadata.get("split.tensors.count", len(tensors))
    if total != len(tensors):
        raise ModelError(f"{files[0]}: says {total} tensors, and its files have {len(tensors)}; get them again")
    return Gguf(files, metadata, tensors)


class GgufHead:
    """A cursor over a file's head; a context while its file is open."""

    def __init__(self, file: Path) -> None:
        self.file = file
        self._at = self._size = 0
        self._map: mmap.mmap | None = None

    def opened(self, at: int) -> GgufHead:
        """Return a cursor at a place."""
        head = GgufHead(self.file)
        head._at = at
        return head

    def __enter__(self) -> GgufHead:
        try:
            with self.file.open("rb") as file:
                self._map = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
        except (OSError, ValueError) as error:  # an empty file cannot be mapped
            raise ModelError(f"{self.file}: cannot be read as GGUF: {error}") from None
        self._size = len(self._map)
        return self

    def __exit__(self, *exception: object) -> None:
        if self._map is not None:
            self._map.close()
            self._map = None

    def read(self) -> tuple[dict[str, Any], list[TensorPlace]]:
        """Return metadata and tensors.

        Raises:
            ModelError: The file is broken, or of another version.
        """
        with self:
            if self._bytes(4, "the magic word") != MAGIC:
                raise ModelError(f"{self.file}: does not begin with GGUF: no such file, or a broken download")
            (version,) = self.many("I", 1)
            if version not in VERSIONS:
                swapped = int.from_bytes(version.to_bytes(4, "little"), "big")
                what = "big-endian" if swapped in VERSIONS else f"version {version}"
                raise ModelError(f"{self.file}: a GGUF file of {what}; possible: little-endian versions 2 and 3")
            num_tensors, num_keys = self.many("Q", 2)
            self._expect(num_keys, KEY_BYTES, "keys", MAX_KEYS)
            metadata = self._metadata(num_keys)
            self._expect(num_tensors, TENSOR_BYTES, "tensors", MAX_TENSORS)
            return metadata, list(self._tensors(num_tensors, metadata))

    def _metadata(self, num: int) -> dict[str, Any]:
        found: dict[str, Any] = {}
        for _ in range(num):
            key = self.text(MAX_NAME)
            if key in found:
                raise ModelError(f"{self.file}: the key {key!r} is there twice")
            (kind,) = self.many("I", 1)
            found[key] = self._value(key, kind)
        return found

    def _value(self, key: str, kind: int) -> Any:
        if kind == TEXT:
            return self.text(MAX_TEXT)
        if kind != ARRAY:
            if kind not in SCALARS:
                raise ModelError(f"{self.file}: the key {key!r} has a value of the unknown type {kind}")
            return self.many(SCALARS[kind], 1)[0]
        (inner,) = self.many("I", 1)
        (num,) = self.many("Q", 1)
        if inner not in SCALARS and inner != TEXT:
            raise ModelError(f"{self.file}: the key {key!r} has an array of type {inner}; possible: numbers and texts")
        self._expect(num, 8 if inner == TEXT else struct.calcsize("<" + SCALARS[inner]), f"values of {key}", MAX_ITEMS)
        array = LazyArray(self, inner, num, self._at)
        if inner == TEXT:
            self._skip_texts(num)
        else:
            self._at += num * struct.calcsize("<" + SCALARS[inner])
        return array

    def _skip_texts(self, num: int) -> None:
        read, at, size = struct.Struct("<Q").unpack_from, self._at, self._size
        data = self._map or b""
        for _ in range(num):
            if at + 8 > size:
                break
            at += 8 + read(data, at)[0]
        if at > size:
            raise self._short("an array of texts")
        self._at = at

    def _tensors(self, num: int, metadata: Mapping[str, Any]) -> Iterator[TensorPlace]:
        entries = [self._entry() for _ in range(num)]
        step = metadata.get("general.alignment", 32)
        if not isinstance(step, int) or not 0 < step <= MAX_ALIGNMENT or step % 8:
            raise ModelError(f"{self.file}: general.alignment is {step!r}; a multiple of 8 is possible")
        start = -(-self._at // step) * step
        left = self._size - start
        for name, shape, number, offset in entries:
            kind = TYPES.get(number)
            if kind is None:
                raise ModelError(f"{self.file}: the tensor {name} is of the unknown type {number}")
            if shape[-1] % kind.numbers:
                raise ModelError(
                    f"{self.file}: rows of {name} have {shape[-1]} numbers, and blocks of {kind.name} {kind.numbers}"
                )
            place = TensorPlace(
                name, kind.name, shape, shape[-1] // kind.numbers * kind.size, self.file, start + offset
            )
            if offset % step:
                raise ModelError(f"{self.file}: the tensor {name} begins at {offset}, no multiple of {step}")
            if place.offset + place.num_bytes > self._size:
                raise ModelError(
                    f"{self.file}: cut short: {name} ends at byte {place.offset + place.num_bytes:,} of "
                    f"{self._size:,}; download it again"
                )
            if (left := left - place.num_bytes) < 0:
                raise ModelError(f"{self.file}: its tensors take more bytes than it has: {name} lies on another one")
            yield place

    def _entry(self) -> tuple[str, tuple[int, ...], int, int]:
        name = self.text(MAX_NAME)
        (axes,) = self.many("I", 1)
        if not 0 < axes <= MAX_AXES:
            raise ModelError(f"{self.file}: the tensor {name} has {axes} axes; 1 to {MAX_AXES} are possible")
        shape = tuple(reversed(self.many("Q", axes)))
        (kind,), (offset,) = self.many("I", 1), self.many("Q", 1)
        if 0 in shape:
            raise ModelError(f"{self.file}: the tensor {name} is empty: {list(shape)}")
        return name, shape, kind, offset

    def text(self, most: int) -> str:
        """Read a text of at most `most` bytes.

        Raises:
            ModelError: It is longer than that or than what is left, or no UTF-8.
        """
        (num,) = self.many("Q", 1)
        if num > most:
            raise ModelError(f"{self.file}: a text of {num:,} bytes at byte {self._at:,}; at most {most:,} are read")
        data = self._bytes(num, "a text")
        try:
            return data.decode()
        except UnicodeDecodeError as error:
            raise ModelError(f"{self.file}: a text before byte {self._at:,} is no UTF-8: {error}") from None

    def many(self, kind: str, num: int) -> tuple[Any, ...]:
        """Read numbers."""
        return struct.unpack(f"<{num}{kind}", self._bytes(num * struct.calcsize("<" + kind), "a number"))

    def _bytes(self, num: int, what: str) -> bytes:
        if self._map is None or self._at + num > self._size:
            raise self._short(what)
        self._at += num
        return self._map[self._at - num : self._at]

    def _expect(self, num: int, least: int, what: str, most: int) -> None:
        """Check that `num` entries fit into the rest of the file and the limit."""
        if num * least > self._size - self._at:
            raise ModelError(
                f"{self.file}: says {num:,} {what}, which {self._size - self._at:,} bytes cannot hold; it is cut short "
                "or broken: download it again"
            )
        if num > most:
            raise ModelError(f"{self.file}: says {num:,} {what}; at most {most:,} are read")

    def _short(self, what: str) -> ModelError:
        return ModelError(f"{self.file}: cut short: {what} goes beyond its {self._size:,} bytes; download it again")
