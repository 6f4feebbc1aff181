"""A GGUF file's tensors as a checkpoint's: rows in transformers' order, norms without their offset.

Blocks stay blocks: a matrix of theirs is uint8 `[N, bytes of a row]`, and its dtype is called as llama.cpp calls it.
Rows can be put in order all the same, since no block reaches over one's end.
"""

from __future__ import annotations

import torch
from torch import Tensor

from dovetail_backends.gguf.names import GgufTensorName

DTYPES = {
    **{"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16, "F64": torch.float64},
    **{"I8": torch.int8, "I16": torch.int16, "I32": torch.int32, "I64": torch.int64},
}


def undone(named: GgufTensorName, data: Tensor) -> Tensor:
    """Return a tensor of its bytes; a view of them where nothing has to be undone."""
    kind = named.place.kind
    if kind in DTYPES:
        data = data.view(DTYPES[kind]).view(named.shape)
    else:
        data = data.view(*named.shape[:-1], named.place.row_bytes)
    data = in_halves(data, named.heads) if named.heads else data
    return data - named.offset if named.offset else data


def in_halves(rows: Tensor, heads: int) -> Tensor:
    """Return rows `[heads x D, …]` that stand as pairs of neighbours with all first ones before all second ones."""
    num = rows.shape[0]
    return rows.view(heads, num // heads // 2, 2, *rows.shape[1:]).transpose(1, 2).reshape(rows.shape)
