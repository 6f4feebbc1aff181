"""Quantises a checkpoint in 16 or 32 bits while it is read: every matrix that the model asks for, one at a time."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Literal

from torch import Tensor

from dovetail.contracts.errors import ModelError
from dovetail.contracts.quantization import Conversion, FileTensor
from dovetail.sdk.checkpoint import dtype_name
from dovetail.sdk.quantization.forms import Form, Int4, Scaled
from dovetail_backends.quantization.modules import PLAIN

GROUPS = (128, 64, 32)
"""Inputs of a row that share a scale in 4 bits: the most that divide a row."""


@dataclass
class HeadOptions:
    """What users choose."""

    head: Literal["model", "int8"] = field(
        default="model",
        metadata={
            "help": "The output head: in the model's dtype, which is more exact, or int8 with a scale for each token, "
            "which is faster where one or a few requests decode and the vocabulary is large."
        },
    )

    @property
    def head_form(self) -> Form | None:
        """The head's form."""
        return Scaled() if self.head == "int8" else None


def rows_of(form: Scaled) -> Callable[[int], Form | None]:
    """Return the form for every number of inputs."""
    return lambda num_in: form


def int4_of(num_in: int) -> Form | None:
    """Return the form of a matrix in 4 bits with so many inputs; None: no group divides them."""
    group = next((size for size in GROUPS if num_in % size == 0), None)
    return None if group is None else Int4(group)


def quantised(tensors: Mapping[str, FileTensor], form_of: Callable[[int], Form | None]) -> Iterator[Conversion]:
    """Yield what makes packed tensors of each plain matrix.

    Norms, embeddings, routers and the output head are no such matrices, and keep their dtype; so do experts that stand
    in one tensor, and matrices for which there is no form. `HeadOptions` may have the head packed behind that.

    Raises:
        ModelError: There is no matrix to quantise.
    """
    num = 0
    for name, tensor in tensors.items():
        if tensor.path and tensor.dtype in PLAIN and name.endswith(".weight") and len(tensor.shape) == 2:
            form = form_of(tensor.inputs)
            if form is not None and tensor.shape[1] == tensor.inputs:
                num += 1
                yield packed(name, tensor, form)
    if not num:
        raise ModelError(
            "--quantization: the checkpoint has no matrix that can be quantised while it loads; leave it out"
        )


def packed(name: str, tensor: FileTensor, form: Form) -> Conversion:
    """Return what makes a form's tensors of a plain matrix."""
    wanted = form.tensors(tensor.inputs)
    suffixes = {part: name + part.removeprefix("weight") for part in wanted}

    def convert(sources: Mapping[str, Tensor]) -> dict[str, Tensor]:
        return {suffixes[part]: made.contiguous() for part, made in form.quantise(sources[name]).items()}

    results = tuple(
        FileTensor(suffixes[part], dtype_name(dtype), (tensor.shape[0], tensor.inputs // granule), tensor.path)
        for part, (dtype, granule) in wanted.items()
    )
    return Conversion((name,), results, convert, "matrices quantised while they are read")
