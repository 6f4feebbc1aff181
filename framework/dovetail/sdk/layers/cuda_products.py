"""Packed matrices as the kernels on CUDA take them. N outputs, K inputs, E experts."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from dovetail.sdk.quantization.forms import Form, Int4, Mxfp4, Scaled, stays_packed
from dovetail.sdk.quantization.words import nibbles_of

if TYPE_CHECKING:
    from dovetail.sdk.layers.ops.packed_weight import PackedWeight as PackedWeight


def packed(form: Form, tensors: Mapping[str, Tensor], dtype: torch.dtype) -> PackedWeight | None:
    """Return a matrix `[N, …]`, or those of experts `[E, N, …]`, for the kernels; None where there are none for it.

    Numbers of 8 bits stay unchanged; others are repacked, expert by expert.

    Args:
        form: How the matrix is stored.
        tensors: Its tensors, by name.
        dtype: The model's.
    """
    first = next(iter(tensors.values()))
    if first.device.type != "cuda" or not isinstance(form, Scaled | Int4 | Mxfp4):
        return None
    if isinstance(form, Int4) and not stays_packed("int4", "cuda", form.group):
        return None
    from dovetail.sdk.layers.ops.packed import supported  # imports Triton

    return weight_of(form, tensors, dtype) if supported(first.device) else None


def weight_of(form: Scaled | Int4 | Mxfp4, tensors: Mapping[str, Tensor], dtype: torch.dtype) -> PackedWeight:
    """As `packed`, on any device."""
    from dovetail.sdk.layers.ops import packed_weight  # imports Triton

    if isinstance(form, Scaled):
        return packed_weight.scaled(tensors["weight"].detach(), tensors["weight_scale"].detach(), form.group)
    if tensors["weight_packed"].dim() == 3:
        experts = range(len(tensors["weight_packed"]))
        return packed_weight.stacked(
            weight_of(form, {name: tensor[expert] for name, tensor in tensors.items()}, dtype) for expert in experts
        )
    numbers, scale = tensors["weight_packed"], tensors["weight_scale"].detach()
    if isinstance(form, Int4):
        zero = tensors.get("weight_zero")
        return packed_weight.int4(nibbles_of(numbers), scale, zero, form.group, dtype)
    both = torch.stack((numbers & 15, numbers >> 4), -1).flatten(-2)
    return packed_weight.mxfp4(both, scale)
