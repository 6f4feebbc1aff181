"""Integers of 4 or 8 bits with scale and zero point, as GPTQ, AWQ and compressed-tensors store them, in one form.

N outputs, K inputs, G groups of inputs.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import NamedTuple

import torch
from torch import Tensor

from dovetail.contracts.quantization import Conversion, FileTensor, Target
from dovetail.errors import ModelError
from dovetail.layers.packed_forms import affine, by_rows, chunk, in_chunks, reordered, stays_packed, words_of
from dovetail_backends.quantization.modules import Module, written_out


class Integers(NamedTuple):
    """A matrix in integers: the number is `(values - zeros) * scale`, with the scale and zero of an input's group.

    Attributes:
        values: `[N, K]` uint8, or their words int32 `[N, K / 8]`, the first of eight in the lowest bits.
        scale: `[N, G]`.
        zeros: `[N, G]` uint8.
        group: Inputs of a group; the last one may have fewer.
        groups: `[K]` the group of each input; None: they lie one after the other.
    """

    values: Tensor
    scale: Tensor
    zeros: Tensor
    group: int
    groups: Tensor | None = None

    def written_out(self, dtype: torch.dtype) -> Tensor:
        """Return the matrix, computed in float32."""
        width = self.values.shape[1] * (1 if self.values.dtype == torch.uint8 else 8)
        index = None if self.groups is None else self.groups.long()

        def make(rows: slice) -> Tensor:
            numbers, scale, zeros = self.numbers(rows), self.scale[rows], self.zeros[rows]
            if index is None:
                return affine(numbers, scale, zeros, self.group)
            return (numbers - zeros.float()[:, index]) * scale.float()[:, index]

        return by_rows(make, self.values, width, dtype)

    def numbers(self, rows: slice) -> Tensor:
        """Return rows of the values in float32."""
        values = self.values[rows]
        return (values if values.dtype == torch.uint8 else unpacked(values, 4, 1)).float()


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
    module: Module, layout: IntegerLayout, target: Target, read: Callable[[Mapping[str, Tensor]], Integers]
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
    if not module.path or not fits or num_in % 8 or not stays_packed(kind, target.device):
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


def _tensors(made: Integers, layout: IntegerLayout) -> Iterator[Tensor]:
    if layout.bits == 8:
        yield (made.values ^ 128).view(torch.int8)
        yield made.scale.float().contiguous()
        return
    values = made.values
    if values.dtype == torch.uint8:
        yield in_chunks(lambda rows: (words_of(values[rows]),), values, values.shape[1])[0]
    else:
        yield reordered(values)
    yield made.scale.contiguous()
    if not layout.is_symmetric:
        yield made.zeros.contiguous()


def unpacked(words: Tensor, bits: int, dim: int, order: tuple[int, ...] | None = None) -> Tensor:
    """Return the uint8 numbers of words int32, the lowest bits first or in `order`, side by side along `dim`."""
    if bits == 8 and dim == words.dim() - 1 and order is None:
        return words.contiguous().view(torch.uint8)
    num, mask = 32 // bits, (1 << bits) - 1
    shifts = torch.tensor([bits * place for place in order or range(num)], dtype=torch.int32, device=words.device)
    apart = words.unsqueeze(dim + 1) >> (shifts if dim == words.dim() - 1 else shifts[:, None])
    return (apart & mask).to(torch.uint8).flatten(dim, dim + 1)


def turned(words: Tensor, order: tuple[int, ...]) -> Tensor:
    """Return the uint8 numbers `[N, K]` of words int32 `[K, N / 8]`, some columns at a time."""
    num_in, num_words = words.shape
    out = words.new_empty(num_words, 8, num_in, dtype=torch.uint8)
    step = max(1, chunk() // (8 * num_in)) if words.device.type == "cpu" else num_words
    for start in range(0, num_words, step):
        some = words[:, start : start + step].T.contiguous()
        for index, place in enumerate(order):
            out[start : start + step, index] = (some >> (4 * place)) & 15
    return out.flatten(0, 1)


def in_order(groups: Tensor, size: int) -> bool:
    """Whether the inputs' groups lie one after the other, `size` inputs each."""
    return bool((groups == torch.arange(len(groups), device=groups.device) // size).all())
