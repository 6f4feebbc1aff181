"""A packed matrix as the kernels here take it, or one for each expert: made once, when a matrix is loaded.

N outputs, K inputs, E experts, G groups of inputs that share a scale.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Any, Literal

import torch
from torch import Tensor

from dovetail.sdk.quantization.forms import Form, Int4, Mxfp4, Scaled
from dovetail.sdk.quantization.words import nibbles_of
from dovetail_backends.kernels.triton.nibbles import BLOCK, exponents_of, in_planes

PackedKind = Literal["scaled", "int4", "mxfp4"]
LEAST_NEAR = 116
"""Of e2m1's exponents, see `exponents_of`, the least with which each number is one of float8 beside the greatest."""
BLOCK_SCALES = 128
"""Rows and columns of a block of which the library's float8 product takes scales."""


@dataclass(frozen=True, slots=True)
class PackedWeight:
    """Numbers and their scales, `[…]` of one matrix or `[E, …]` of experts.

    Attributes:
        kind: `scaled`: numbers of 8 bits; `int4` and `mxfp4`: words, see `nibbles`.
        numbers: `[N, K]` float8 or int8, or `[N, 8 ceil(K / 64)]` int32.
        scale: For each group of inputs: `[N, G]` float32 of numbers of 8 bits, of the model's dtype for int4, and pairs
            of exponents int16 for mxfp4; None: there are none but `row_scale`.
        offset: 128 + zero point of int4, as `scale`; None: 136 everywhere.
        row_scale: `[N]` float32, of a whole row, or None.
        group: Inputs that share a scale; 0 without `scale`.
        num_out: N.
        num_in: K.
        rounds: A product may round rows to the dtype of `numbers`.
        block_scale: `[N / 128, K / 128]` float32, where `scale` is the same for 128 outputs and a product may round.
        is_near: Of mxfp4: no group of a row with a number in it has a scale below `LEAST_NEAR`.
    """

    kind: PackedKind
    numbers: Tensor
    scale: Tensor | None
    offset: Tensor | None
    row_scale: Tensor | None
    group: int
    num_out: int
    num_in: int
    rounds: bool = False
    block_scale: Tensor | None = None
    is_near: bool = False

    @property
    def groups(self) -> int:
        """Scales of a row."""
        return 0 if self.scale is None else self.scale.shape[-1]

    @property
    def num_bytes(self) -> int:
        """Of all that is read for a product."""
        parts = (self.numbers, self.scale, self.offset, self.row_scale)
        return sum(part.numel() * part.element_size() for part in parts if part is not None)


def weight_of(form: Form | None, tensors: Mapping[str, Tensor], dtype: torch.dtype) -> PackedWeight:
    """Return a matrix `[N, …]`, or those of experts `[E, N, …]`: 8-bit numbers as they are, others packed anew.

    Args:
        form: How the matrix is stored.
        tensors: Its tensors, by name.
        dtype: The model's.

    Raises:
        TypeError: There is no kernel for the form.
    """
    if isinstance(form, Scaled):
        found = scaled(tensors["weight"], tensors["weight_scale"], form.group)
        rounds = form.activations is not None and form.activations == found.numbers.dtype
        return replace(found, rounds=True, block_scale=_of_blocks(found)) if rounds else found
    if not isinstance(form, Int4 | Mxfp4):
        raise TypeError(f"no kernel multiplies by {form}")
    if tensors["weight_packed"].dim() == 3:
        experts = range(len(tensors["weight_packed"]))
        return stacked(weight_of(form, {name: one[at] for name, one in tensors.items()}, dtype) for at in experts)
    numbers, scale = tensors["weight_packed"], tensors["weight_scale"]
    if isinstance(form, Int4):
        return int4(nibbles_of(numbers), scale, tensors.get("weight_zero"), form.group, dtype)
    return mxfp4(torch.stack((numbers & 15, numbers >> 4), -1).flatten(-2), scale)


def scaled(numbers: Tensor, scale: Tensor, group: int | None) -> PackedWeight:
    """Return numbers of 8 bits `[…, N, K]` with float32 scales `[…, N, G]`; they are not copied."""
    is_row = scale.shape[-1] == 1
    return PackedWeight(
        "scaled", numbers, None if is_row else scale, None, scale[..., 0].contiguous() if is_row else None,
        0 if is_row else group or 0, *numbers.shape[-2:],
    )  # fmt: skip


def _of_blocks(weight: PackedWeight) -> Tensor | None:
    """Return the scales of blocks of 128 outputs and inputs where there are such; of one matrix, on a GPU."""
    numbers, scale = weight.numbers, weight.scale
    if scale is None or weight.group != BLOCK_SCALES or numbers.device.type != "cuda" or numbers.dim() != 2:
        return None
    if weight.num_out % BLOCK_SCALES or weight.num_in % (4 * BLOCK_SCALES):  # it takes scales by fours
        return None
    blocks = scale.view(-1, BLOCK_SCALES, scale.shape[-1])
    return blocks[:, 0].contiguous() if bool((blocks == blocks[:, :1]).all()) else None


def int4(nibbles: Tensor, scale: Tensor, zero: Tensor | None, group: int | None, dtype: torch.dtype) -> PackedWeight:
    """Return 4-bit integers: nibbles uint8 `[N, K]`, scales and zero points `[N, G]`.

    Scales are rounded to the model's dtype.

    Raises:
        ValueError: Groups are no multiples of the half of a block, which is all that kernels have scales for.
    """
    if group and group % (BLOCK // 2):
        raise ValueError(f"groups of {group} inputs; kernels multiply by int4 in multiples of {BLOCK // 2}")
    num_out, num_in = nibbles.shape
    offset = None if zero is None else zero.to(dtype) + 128  # exact: at most 144, in 8 bits
    width = group or -(-num_in // BLOCK) * BLOCK
    return PackedWeight("int4", in_planes(nibbles), scale.to(dtype).contiguous(), offset, None, width, num_out, num_in)


def mxfp4(nibbles: Tensor, scale: Tensor) -> PackedWeight:
    """Return e2m1: nibbles uint8 `[N, K]`, scales uint8 `[N, K / 32]`."""
    exponents, rows = exponents_of(scale)
    bytes_of_row = torch.stack((exponents & 255, (exponents >> 8) & 255), -1).flatten(-2)[:, : scale.shape[-1]]
    is_used = (nibbles & 7).view(*scale.shape, -1).amax(-1) > 0
    is_near = not bool((is_used & (bytes_of_row < LEAST_NEAR)).any())
    num_out, num_in = nibbles.shape
    return PackedWeight(
        "mxfp4", in_planes(nibbles), exponents, None, rows, 32, num_out, num_in, is_near=is_near
    )  # fmt: skip


def stacked(weights: Iterable[PackedWeight]) -> PackedWeight:
    """Return the matrices of experts as one."""
    made = list(weights)
    parts: dict[str, Any] = {}
    for name in ("numbers", "scale", "offset", "row_scale"):
        of_each = [getattr(one, name) for one in made]
        parts[name] = None if of_each[0] is None else torch.stack(of_each)
    return replace(made[0], **parts, is_near=all(one.is_near for one in made))


def as_one(weight: PackedWeight) -> PackedWeight:
    """Return the matrices of experts as one matrix of all their outputs; nothing is copied."""
    flat: dict[str, Any] = {"num_out": len(weight.numbers) * weight.num_out}
    for name in ("numbers", "scale", "offset", "row_scale"):
        part = getattr(weight, name)
        flat[name] = None if part is None else part.flatten(0, 1)
    return replace(weight, **flat)
