"""A checkpoint as the loader sees it: its files' tensors, or what a quantisation makes of them while it is read."""

from __future__ import annotations

import mmap
import threading
from collections.abc import Iterable, Iterator, Mapping
from math import prod
from pathlib import Path
from types import TracebackType
from typing import Self

import torch
from torch import Tensor

from dovetail.checkpoint.formats import StoredFormat
from dovetail.contracts.checkpoint import TensorHeader
from dovetail.contracts.errors import ModelError, PluginError
from dovetail.contracts.quantization import Conversion, FileTensor
from dovetail.runtime.checkpoint.folder import ModelFolder
from dovetail.runtime.device.devices import device_of
from dovetail.sdk.checkpoint import NAMES, dtype_name
from dovetail.sdk.config import some
from dovetail.sdk.quantization.scratch import SCRATCH

# Files of tensors, mapped into memory: their pages are read when they are touched, and let go of when they were used.
#
# What is read of a mapped file counts as this process's memory until it is let go of.


class MappedFiles:
    """Files that are opened when something of them is asked for. Threads may share one."""

    def __init__(self) -> None:
        self._maps: dict[Path, mmap.mmap] = {}
        self._lock = threading.Lock()

    def numbers(self, file: Path, start: int, num: int, dtype: torch.dtype) -> Tensor:
        """Return `num` numbers from byte `start` on, one axis; a view that is not to be written.

        Raises:
            ModelError: The file cannot be read, or has no such bytes any more.
        """
        if num == 0:
            return torch.empty(0, dtype=dtype)
        mapped = self._mapped(file)
        if start + num * dtype.itemsize > len(mapped):
            raise ModelError(f"{file}: became shorter while it was read; download it again")
        return torch.frombuffer(mapped, dtype=dtype, count=num, offset=start)

    def release(self, file: Path, start: int, num_bytes: int) -> None:
        """Let go of pages that lie within a range; whoever reads them again gets them from the system's cache."""
        first, last = -(-start // mmap.PAGESIZE) * mmap.PAGESIZE, (start + num_bytes) // mmap.PAGESIZE * mmap.PAGESIZE
        if last > first and hasattr(mmap, "MADV_DONTNEED"):
            self._mapped(file).madvise(mmap.MADV_DONTNEED, first, last - first)

    def close(self) -> None:
        """Let go of all files; a view keeps its own."""
        with self._lock:
            self._maps.clear()

    def _mapped(self, file: Path) -> mmap.mmap:
        with self._lock:
            if file not in self._maps:
                try:
                    with file.open("rb") as opened:
                        # A private copy: torch takes buffers that could be written, and nobody does.
                        self._maps[file] = mmap.mmap(opened.fileno(), 0, access=mmap.ACCESS_COPY)
                except (OSError, ValueError) as error:  # ValueError: it is empty
                    raise ModelError(f"{file}: cannot be read: {error}") from None
            return self._maps[file]


DTYPES = {
    **{name: getattr(torch, dtype) for dtype, name in NAMES.items()},
    **{"F64": torch.float64, "I64": torch.int64, "I16": torch.int16, "BOOL": torch.bool, "C64": torch.complex64},
    **{"U16": torch.uint16, "U32": torch.uint32, "U64": torch.uint64},
    **{"F8_E5M2": torch.float8_e5m2, "F8_E8M0": torch.float8_e8m0fnu},
    **{"F8_E4M3FNUZ": torch.float8_e4m3fnuz, "F8_E5M2FNUZ": torch.float8_e5m2fnuz},
}
"""What is read of safetensors files."""
PART_BYTES = 32 << 20
"""Of the experts that stand in one tensor, which are read at a time; one expert at least."""


class Checkpoint:
    """Tensors by name; a context, so that its files are closed. Threads may read side by side.

    Attributes:
        folder: The model's.
        headers: Of its tensors, converted ones in place of their sources.
        notes: What is converted, in words, each once.
    """

    def __init__(
        self,
        folder: Path,
        headers: Iterable[TensorHeader],
        conversions: Iterable[Conversion] = (),
        stored: StoredFormat | None = None,
    ) -> None:
        """Say what there is; nothing is read.

        Args:
            folder: The model's.
            headers: Of its tensors, as they stand.
            conversions: What a quantisation makes of them.
            stored: What reads them; None: they stand as safetensors has them.

        Raises:
            PluginError: Conversions name what is not there, or one tensor twice, or divide what has no experts.
        """
        self.folder = folder
        self._by_name = {header.name: header for header in headers}
        self._made: dict[str, Conversion] = {}
        self._left: dict[str, Tensor] = {}
        self._files = MappedFiles()
        self.stored = stored
        by_source: dict[str, Conversion] = {}
        conversions = tuple(conversions)
        for conversion in conversions:
            lost = [name for name in conversion.sources if name not in self._by_name or name in by_source]
            if lost or not conversion.sources:
                raise PluginError(f"a conversion takes {some(lost) or 'nothing'}: not there, or taken twice")
            _check_experts(conversion, self._by_name)
            by_source |= dict.fromkeys(conversion.sources, conversion)
            self._made |= {result.name: conversion for result in conversion.results}
        self._locks = {id(conversion): threading.Lock() for conversion in conversions}
        self.notes = tuple(dict.fromkeys(conversion.note for conversion in conversions if conversion.note))
        self.headers = list(self._headers(headers, by_source))

    @classmethod
    def of_folder(cls, folder: ModelFolder) -> Checkpoint:
        """Return a folder's checkpoint as it stands.

        Raises:
            ModelError: It cannot be read.
            ValueError: The folder is one whose weights are not read.
        """
        if folder.headers is None:
            raise ValueError(f"{folder.path}: a folder that is read without weights has no checkpoint")
        return cls(folder.path, folder.headers, stored=folder.stored)

    def _headers(self, headers: Iterable[TensorHeader], by_source: Mapping[str, Conversion]) -> Iterator[TensorHeader]:
        """A conversion's results stand where its first source does."""
        for header in headers:
            conversion = by_source.get(header.name)
            if conversion is None:
                yield header
            elif header.name == conversion.sources[0]:
                for result in conversion.results:
                    yield TensorHeader(result.name, header.file, result.shape, result.dtype, is_made=True)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, cls: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._left.clear()
        self._files.close()

    def parts(self, header: TensorHeader) -> list[range | None]:
        """Return which experts of a tensor are read at a time; None: all of them, which are made at once.

        Args:
            header: Of a tensor whose first axis counts experts.
        """
        conversion = self._made.get(header.name)
        if conversion is not None and not conversion.by_expert:
            return [None]
        num = header.shape[0]
        step = max(1, PART_BYTES * num // max(1, header.num_bytes))
        return [range(start, min(start + step, num)) for start in range(0, num, step)]

    def read(
        self,
        name: str,
        device: torch.device | None = None,
        *,
        in_scratch: bool = False,
        experts: range | None = None,
    ) -> Tensor:
        """Return a tensor; a view of the file where it is not converted. Results of a conversion are given once.

        Args:
            name: Of a header.
            device: Where conversions compute; None: on the host.
            in_scratch: What a conversion makes of one matrix may lie in this thread's `SCRATCH`, which the caller has
                used again when it has copied what it read.
            experts: One of `parts`; None: the whole tensor.

        Raises:
            ModelError: The file is broken.
            PluginError: A conversion makes something else than it said.
        """
        conversion = self._made.get(name)
        if conversion is None:
            return self._stored(name, experts)
        with self._locks[id(conversion)]:
            if name not in self._left:
                stored = {
                    source: self._stored(source, experts if source in conversion.by_expert else None)
                    for source in conversion.sources
                }
                if device is not None and not device_of(device).is_host:
                    stored = {source: tensor.to(device) for source, tensor in stored.items()}
                is_open = in_scratch and is_alone(conversion)
                with SCRATCH.opened(is_open=is_open):
                    made = _checked(conversion, conversion.convert(stored), experts)
                self._left |= made
                if is_open:
                    SCRATCH.awaited |= made.keys()
            SCRATCH.awaited.discard(name)
            return self._left.pop(name)

    def release(self, names: Iterable[str], experts: range | None = None) -> None:
        """Let go of the pages of tensors, or of their conversions' sources; views of them stay right.

        Args:
            names: Of headers.
            experts: One of `parts`: what is read for each of these stays; None: of whole tensors.
        """
        for name in names:
            conversion = self._made.get(name)
            if conversion is None:
                sources: tuple[str, ...] = (name,)
            else:
                sources = conversion.sources if experts is None else conversion.by_expert
            for source in sources:
                header = self._by_name[source]
                start, num = header.start, header.stored_bytes
                if experts is not None:
                    num //= header.shape[0]
                    start, num = start + experts.start * num, len(experts) * num
                self._files.release(header.file, start, num)

    def _stored(self, name: str, experts: range | None = None) -> Tensor:
        header = self._by_name[name]
        if self.stored is not None:
            data = self._files.numbers(header.file, header.start, header.stored_bytes, torch.uint8)
            whole = self.stored.ask("tensor", header, data)
            wanted = DTYPES.get(header.dtype, torch.uint8)
            if not isinstance(whole, Tensor) or (whole.shape, whole.dtype) != (header.shape, wanted):
                raise PluginError(f"--load-format: {self.stored.name} makes {name} another tensor than its header says")
        else:
            if (dtype := DTYPES.get(header.dtype)) is None:
                raise ModelError(f"{header.file}: {name} is {header.dtype}; possible: {', '.join(sorted(DTYPES))}")
            whole = self._files.numbers(header.file, header.start, prod(header.shape), dtype).view(header.shape)
        return whole if experts is None else whole[experts.start : experts.stop]


def is_alone(conversion: Conversion) -> bool:
    """Whether a conversion makes one tensor, or tensors of one matrix: whoever asks for one will ask for all."""
    paths = {result.path for result in conversion.results}
    return len(conversion.results) == 1 or (len(paths) == 1 and "" not in paths)


def open_checkpoint(folder: Path) -> Checkpoint:
    """Return a folder's checkpoint as it stands.

    Raises:
        ModelError: It cannot be read.
    """
    return Checkpoint.of_folder(ModelFolder(folder))


def _check_experts(conversion: Conversion, headers: Mapping[str, TensorHeader]) -> None:
    """See that a conversion by expert can be divided.

    Raises:
        PluginError: It makes several tensors, or they and its sources are not of as many experts.
    """
    if not conversion.by_expert:
        return
    firsts = {headers[name].shape[:1] if name in conversion.sources else name for name in conversion.by_expert}
    firsts |= {result.shape[:1] for result in conversion.results}
    if len(conversion.results) != 1 or len(firsts) != 1 or firsts == {()}:
        raise PluginError(
            f"a conversion of {some(conversion.sources)} is by expert of {some(conversion.by_expert)}: possible are "
            "sources of its own whose first axis is as long as that of its one result"
        )


def _checked(conversion: Conversion, made: Mapping[str, Tensor], experts: range | None) -> Mapping[str, Tensor]:
    """Return what a conversion made of some experts, or of all that it takes.

    Raises:
        PluginError: It is something else than was said.
    """
    got = {name: FileTensor(name, dtype_name(tensor.dtype), tuple(tensor.shape)) for name, tensor in made.items()}
    want = {result.name: result._replace(path="", inputs=0) for result in conversion.results}
    if experts is not None:
        want = {name: each._replace(shape=(len(experts), *each.shape[1:])) for name, each in want.items()}
    if got != want:
        raise PluginError(
            f"a conversion of {some(conversion.sources)} made {some([str(each) for each in got.values()])} "
            f"instead of {some([str(each) for each in want.values()])}"
        )
    return made
