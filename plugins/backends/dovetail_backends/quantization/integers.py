"""Integers of 4 or 8 bits with scale and zero point, as GPTQ, AWQ and compressed-tensors store them, in one form.

N outputs, K inputs, G groups of inputs.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import NamedTuple

import torch
from torch import Tensor

from dovetail.contracts.errors import ModelError
from dovetail.contracts.quantization import Conversion, FileTensor, Target
from dovetail.sdk.layers.packed import FLOATS
from dovetail.sdk.quantization.forms import Form, Int4, Scaled, affine, by_rows, in_chunks, looked_up, pairs_of
from dovetail.sdk.quantization.words import nibbles_of, reordered, words_of
from dovetail_backends.quantization.modules import Module, written_out

NUMBERS = 16
"""That 4 bits can be."""


class IntegerMatrix(NamedTuple):
    """A matrix in integers: the number is `(values - zeros) * scale`, with the scale and zero of an input's group.

    Attributes:
        values: `[N, K]` uint8, or their words int32, four or eight inputs of a row each.
        scale: `[N, G]`.
        zeros: `[N, G]` uint8.
        group: Inputs of a group; the last one may have fewer.
        groups: `[K]` the group of each input; None: they lie one after the other.
        bits: Of a number in a word.
        is_shuffled: Words are in the order of `Int4`, else they hold the first of eight in the lowest bits.
    """

    values: Tensor
    scale: Tensor
    zeros: Tensor
    group: int
    groups: Tensor | None = None
    bits: int = 4
    is_shuffled: bool = False

    def written_out(self, dtype: torch.dtype) -> Tensor:
        """Return the matrix, computed in float32."""
        scale, zeros = self.scale.float().contiguous(), self.zeros.float().contiguous()
        if self.groups is not None:
            return self._in_an_order(self.groups.to(torch.int32), scale, zeros, dtype)

        def make(rows: slice) -> Tensor:
            return affine(self._numbers(rows, torch.float32), scale[rows], zeros[rows], self.group)

        return by_rows(make, self.values, self._width, dtype)

    def _in_an_order(self, groups: Tensor, scale: Tensor, zeros: Tensor, dtype: torch.dtype) -> Tensor:
        """Look up what each number of each group stands for, where these are no more than there are inputs."""
        num = scale.shape[1]
        if self.values.dtype == torch.uint8 or self.bits == 8 or NUMBERS * num > self._width:

            def make(rows: slice) -> Tensor:
                zero, factor = (each[rows].index_select(1, groups) for each in (zeros, scale))
                return self._numbers(rows, torch.float32).sub_(zero).mul_(factor)

            return by_rows(make, self.values, self._width, dtype)
        numbers = torch.arange(NUMBERS, dtype=torch.float32, device=scale.device)
        first = NUMBERS * groups

        def look_up(rows: slice) -> Tensor:
            table = ((numbers - zeros[rows][..., None]) * scale[rows][..., None]).to(dtype)
            index = self._numbers(rows, torch.int32).add_(first)
            index += torch.arange(len(table), dtype=torch.int32, device=index.device)[:, None] * (NUMBERS * num)
            return table.flatten().index_select(0, index.flatten()).view(index.shape)

        return by_rows(look_up, self.values, self._width, dtype)

    @property
    def _width(self) -> int:
        return self.values.shape[1] * (1 if self.values.dtype == torch.uint8 else 32 // self.bits)

    def _numbers(self, rows: slice, dtype: torch.dtype) -> Tensor:
        """Return rows of the values in a type of 32 bits."""
        values = self.values[rows]
        if self.is_shuffled:
            return nibbles_of(values).to(dtype)
        if values.dtype == torch.uint8 or self.bits == 8:
            return bytes_of(values).to(dtype)
        pairs = pairs_of(torch.arange(NUMBERS, dtype=dtype, device=values.device))
        return looked_up(bytes_of(values), pairs).view(dtype)


class IntegerLayout(NamedTuple):
    """What a module's integers are, as far as headers tell.

    Attributes:
        shape: N and K.
        group: Inputs that share a scale; the last ones may be fewer.
        bits: 4 or 8.
        scale: The tensor of scales.
        is_symmetric: The zero is the middle, 8 or 128, everywhere.
        is_ordered: Groups lie one after the other.
    """

    shape: tuple[int, int]
    group: int
    bits: int
    scale: FileTensor
    is_symmetric: bool
    is_ordered: bool


def integers(
    module: Module, layout: IntegerLayout, target: Target, read: Callable[[Mapping[str, Tensor]], IntegerMatrix]
) -> Conversion:
    """Return what a module becomes: packed in one of the shared forms, or written out.

    Args:
        module: Whose tensors are read.
        layout: What they are.
        target: What they are read for.
        read: Makes the integers of tensors by suffix.
    """
    kind, num_in = f"int{layout.bits}", layout.shape[1]
    fits = layout.is_ordered and num_in % layout.group == 0 and (layout.bits == 4 or layout.is_symmetric)
    inputs = None if layout.group >= num_in else layout.group
    form: Form = Scaled(group=inputs)
    if layout.bits == 4:
        form = Int4(inputs, FLOATS[layout.scale.dtype], not layout.is_symmetric)
    if not module.path or not fits or num_in % 8 or not target.keeps(form, layout.shape):
        what = kind if layout.is_ordered else f"{kind} in an order of its own (desc_act)"
        return written_out(module, layout.shape, target, lambda tensors, dtype: read(tensors).written_out(dtype), what)
    suffix_of = {tensor.name: suffix for suffix, tensor in module.tensors.items()}

    def convert(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
        made = read({suffix_of[name]: tensor for name, tensor in tensors.items()})
        middle = 1 << (layout.bits - 1)
        if layout.is_symmetric and not bool((made.zeros == middle).all()):
            raise ModelError(
                f"{module.weight}: the checkpoint says that it is symmetric, and has zeros beside {middle}"
            )
        return dict(zip((result.name for result in results), _tensors(made, layout), strict=True))

    results = tuple(_results(module, layout))
    return Conversion(tuple(suffix_of), results, convert)


def _results(module: Module, layout: IntegerLayout) -> Iterator[FileTensor]:
    num_out, num_in = layout.shape
    scales = (num_out, num_in // layout.group)
    if layout.bits == 8:
        yield FileTensor(module.weight, "I8", layout.shape, module.path)
        yield FileTensor(module.weight + "_scale", "F32", scales, module.path)
        return
    yield FileTensor(module.weight + "_packed", "I32", (num_out, num_in // 8), module.path)
    yield FileTensor(module.weight + "_scale", layout.scale.dtype, scales, module.path)
    if not layout.is_symmetric:
        yield FileTensor(module.weight + "_zero", "U8", scales, module.path)


def _tensors(made: IntegerMatrix, layout: IntegerLayout) -> Iterator[Tensor]:
    if layout.bits == 8:
        yield (bytes_of(made.values) ^ 128).view(torch.int8)
        yield made.scale.float().contiguous()
        return
    values = made.values
    if values.dtype == torch.uint8:
        yield in_chunks(lambda rows: (words_of(values[rows]),), values, values.shape[1])[0]
    else:
        yield values if made.is_shuffled else reordered(values)
    yield made.scale.contiguous()
    if not layout.is_symmetric:
        yield made.zeros.contiguous()


def bytes_of(values: Tensor) -> Tensor:
    """Return the bytes uint8 of rows of words, or of bytes; where rows do not lie along the memory, of a copy of them.

    Those of a part of a large matrix are copied twice: to turn them where they are close together is much faster.
    """
    return (values if values.is_contiguous() else values.clone().contiguous()).view(torch.uint8)


def unpacked(words: Tensor, bits: int, dim: int, order: tuple[int, ...] | None = None) -> Tensor:
    """Return the uint8 numbers of words int32, the lowest bits first or in `order`, side by side along `dim`."""
    if bits == 8 and dim == words.dim() - 1 and order is None:
        return words.contiguous().view(torch.uint8)
    num, mask = 32 // bits, (1 << bits) - 1
    shifts = torch.tensor([bits * place for place in order or range(num)], dtype=torch.int32, device=words.device)
    shifted = words.unsqueeze(dim + 1) >> (shifts if dim == words.dim() - 1 else shifts[:, None])
    return (shifted & mask).to(torch.uint8).flatten(dim, dim + 1)


def in_order(groups: Tensor, size: int) -> bool:
    """Whether the inputs' groups lie one after the other, `size` inputs each."""
    return bool((groups == torch.arange(len(groups), device=groups.device) // size).all())
