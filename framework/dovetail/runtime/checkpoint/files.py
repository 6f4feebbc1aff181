"""A checkpoint as the loader sees it: its files' tensors, or what a quantisation makes of them while it is read."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from dovetail.contracts.quantization import Conversion, FileTensor
from dovetail.errors import ModelError, PluginError
from dovetail.gguf.reader import gguf_of
from dovetail.runtime.checkpoint.gguf import GgufTensors
from dovetail.runtime.checkpoint.weight_size import TensorHeader, checkpoint_headers
from dovetail.runtime.hf_config import some

NAMES = {
    **{torch.bfloat16: "BF16", torch.float16: "F16", torch.float32: "F32", torch.int8: "I8", torch.uint8: "U8"},
    **{torch.int32: "I32", torch.float8_e4m3fn: "F8_E4M3"},
}
"""How safetensors calls dtypes."""
MAX_OPEN = 2
"""Files: a conversion's sources may stand on both sides of a shard's end."""


class Checkpoint:
    """Tensors by name, read one by one; a context, so that its files are closed.

    Attributes:
        folder: The model's.
        headers: Of its tensors, converted ones in place of their sources.
        notes: What is converted, in words, each once.
    """

    def __init__(self, folder: Path, headers: Iterable[TensorHeader], conversions: Iterable[Conversion] = ()) -> None:
        """Say what there is; nothing is read.

        Raises:
            PluginError: Conversions name what is not there, or one tensor twice.
        """
        self.folder = folder
        self._files = {header.name: header.file for header in headers}
        self._made: dict[str, Conversion] = {}
        self._left: dict[str, Tensor] = {}
        self._opened: dict[Path, Any] = {}
        gguf = gguf_of(folder)
        self._gguf = None if gguf is None else GgufTensors(gguf)
        by_source: dict[str, Conversion] = {}
        conversions = tuple(conversions)
        for conversion in conversions:
            lost = [name for name in conversion.sources if name not in self._files or name in by_source]
            if lost or not conversion.sources:
                raise PluginError(f"a conversion takes {some(lost) or 'nothing'}: not there, or taken twice")
            by_source |= dict.fromkeys(conversion.sources, conversion)
            self._made |= {result.name: conversion for result in conversion.results}
        self.notes = tuple(dict.fromkeys(conversion.note for conversion in conversions if conversion.note))
        self.headers = list(self._headers(headers, by_source))

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
        self._close(0)
        if self._gguf is not None:
            self._gguf.close()

    def read(self, name: str, device: torch.device | None = None) -> Tensor:
        """Return a tensor; a view of the file where it is not converted. Results of a conversion are given once.

        Args:
            name: Of a header.
            device: Where conversions compute; None: on the host.

        Raises:
            ModelError: The file is broken.
            PluginError: A conversion makes something else than it said.
        """
        conversion = self._made.get(name)
        if conversion is None:
            return self._stored(name)
        if name not in self._left:
            stored = {source: self._stored(source) for source in conversion.sources}
            if device is not None and device.type != "cpu":
                stored = {source: tensor.to(device) for source, tensor in stored.items()}
            self._left |= _checked(conversion, conversion.convert(stored))
        return self._left.pop(name)

    def _stored(self, name: str) -> Tensor:
        if self._gguf is not None:
            return self._gguf.read(name)
        file = self._files[name]
        try:
            if file not in self._opened:
                self._close(MAX_OPEN - 1)
                self._opened[file] = safe_open(file, framework="pt").__enter__()  # type: ignore[no-untyped-call]
            tensor: Tensor = self._opened[file].get_tensor(name)
        except SafetensorError as error:
            raise ModelError(f"{file}: broken safetensors file ({error}); download it again") from None
        return tensor

    def _close(self, keep: int) -> None:
        """Close the files that were opened first: what is read of them counts as this process's memory."""
        while len(self._opened) > keep:
            self._opened.pop(next(iter(self._opened))).__exit__(None, None, None)


def open_checkpoint(folder: Path) -> Checkpoint:
    """Return a folder's checkpoint as it stands.

    Raises:
        ModelError: It cannot be read.
    """
    return Checkpoint(folder, checkpoint_headers(folder))


def _checked(conversion: Conversion, made: Mapping[str, Tensor]) -> Mapping[str, Tensor]:
    got = {name: FileTensor(name, NAMES.get(tensor.dtype, "?"), tuple(tensor.shape)) for name, tensor in made.items()}
    want = {result.name: result._replace(path="", inputs=0) for result in conversion.results}
    if got != want:
        raise PluginError(
            f"a conversion of {some(conversion.sources)} made {some([str(each) for each in got.values()])} "
            f"instead of {some([str(each) for each in want.values()])}"
        )
    return made
