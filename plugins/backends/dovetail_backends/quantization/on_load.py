"""Quantises a checkpoint in 16 or 32 bits while it is read: every matrix that the model asks for, one at a time."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

import torch
from torch import Tensor

from dovetail.contracts.quantization import Conversion, FileTensor
from dovetail.layers.packed_forms import Form
from dovetail.runtime.checkpoint import NAMES
from dovetail_backends.quantization.modules import PLAIN


def quantised(tensors: Mapping[str, FileTensor], form: Form) -> Iterator[Conversion]:
    """Yield what makes a form's tensors of each plain matrix; those whose inputs a group does not divide stay plain.

    Norms, embeddings, routers and the output head are no such matrices, and keep their dtype.
    """
    for name, tensor in tensors.items():
        if tensor.path and tensor.dtype in PLAIN and name.endswith(".weight") and len(tensor.shape) == 2:
            yield from _packed(name, tensor, form)


def _packed(name: str, tensor: FileTensor, form: Form) -> Iterator[Conversion]:
    num_out, num_in = tensor.shape
    wanted = form.tensors(num_in)
    if any(num_in % granule for _, granule in wanted.values()):
        return
    suffixes = {part: name + part.removeprefix("weight") for part in wanted}

    def convert(sources: Mapping[str, Tensor]) -> dict[str, Tensor]:
        made = form.quantise(sources[name])
        return {suffixes[part]: tensor.contiguous() for part, tensor in made.items()}

    results = tuple(
        FileTensor(suffixes[part], dtype_name(dtype), (num_out, num_in // granule), tensor.path)
        for part, (dtype, granule) in wanted.items()
    )
    yield Conversion((name,), results, convert, f"{form} made while they load")


def dtype_name(dtype: torch.dtype) -> str:
    """Return what safetensors calls a dtype."""
    return NAMES[dtype]
