"""A GGUF file's tensors as a checkpoint's: under transformers' names, rows in its order, norms without their offset.

Blocks stay blocks: a matrix of theirs is uint8 `[N, bytes of a row]`, and its dtype is called as llama.cpp calls it.
Rows can be put in order all the same, since no block reaches over one's end.
"""

from __future__ import annotations

from pathlib import Path

import torch
from torch import Tensor

from dovetail.gguf.names import Named, named_tensors
from dovetail.gguf.reader import Gguf
from dovetail.runtime.checkpoint.mapped import MappedFiles

DTYPES = {"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}


class GgufTensors:
    """The tensors of a model's files, by transformers' names."""

    def __init__(self, gguf: Gguf, files: MappedFiles) -> None:
        self._named = {named.name: named for named in named_tensors(gguf)}
        self._files = files

    def read(self, name: str) -> Tensor:
        """Return a tensor; a view of its file where nothing has to be undone.

        Raises:
            ModelError: The file cannot be read.
        """
        named = self._named[name]
        data = _numbers(named, self._files.numbers(*self.range(name), torch.uint8))
        data = in_halves(data, named.heads) if named.heads else data
        return data - named.offset if named.offset else data

    def range(self, name: str) -> tuple[Path, int, int]:
        """Return where a tensor's bytes lie: file, first one, and how many."""
        named = self._named[name]
        start, num = named.place.offset, named.place.num_bytes
        if named.expert is not None:
            num //= named.place.shape[0]
            start += named.expert * num
        return named.place.file, start, num


def _numbers(named: Named, data: Tensor) -> Tensor:
    kind = named.place.kind
    if kind in DTYPES:
        return data.view(DTYPES[kind]).view(named.shape)
    return data.view(*named.shape[:-1], named.place.row_bytes)


def in_halves(rows: Tensor, heads: int) -> Tensor:
    """Return rows `[heads x D, …]` that stand as pairs of neighbours with all first ones before all second ones."""
    num = rows.shape[0]
    return rows.view(heads, num // heads // 2, 2, *rows.shape[1:]).transpose(1, 2).reshape(rows.shape)
