"""Weights of 4-bit floating point (e2m1): nvfp4 and mxfp4, in whatever files. N outputs, K inputs."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

import torch
from torch import Tensor

from dovetail.contracts.quantization import Conversion, FileTensor, Target
from dovetail.sdk.quantization.forms import MX_GROUP, Mxfp4, by_rows, e2m1, scaled, wide
from dovetail_backends.quantization.modules import PLAIN, Module, as_scale, by_expert, written_out

NV_GROUP = 16


def nvfp4(module: Module, packed: str, scale: str, whole: str, target: Target, *, divides: bool) -> Conversion:
    """Return what becomes of numbers with a scale for 16 inputs, and one for the whole matrix.

    Args:
        module: Whose tensors are read.
        packed: Suffix of `[…, N, K / 2]` uint8, the lower nibble first.
        scale: Of `[…, N, K / 16]` e4m3.
        whole: Of the matrix's.
        target: What it is read for.
        divides: Numbers are divided by the matrix's scale; else they are multiplied by it.

    Raises:
        ModelError: Shapes do not fit each other.
    """
    if len(module.need(packed, "U8").shape) < 2:
        module.matrix(packed)
    *rows, half = module.need(packed).shape
    module.need(scale, "F8_E4M3")
    module.need(whole, *PLAIN)
    module.check(scale, (*rows, 2 * half // NV_GROUP), why=f"{2 * half} inputs in groups of {NV_GROUP}")
    experts = tuple(rows[:-1])
    module.check(whole, (), (1,), experts, (*experts, 1))

    def numbers(tensors: Mapping[str, Tensor], dtype: torch.dtype) -> Tensor:
        factor = tensors[whole].float()
        scales = wide(tensors[scale])
        factor = factor.reshape(*scales.shape[:-2], 1, 1) if factor.numel() > 1 else factor.reshape(())
        scales = scales / factor if divides else scales * factor
        return _written(tensors[packed], scales, NV_GROUP, dtype)

    return written_out(module, (*rows, 2 * half), target, numbers, "nvfp4")


def _written(packed: Tensor, scale: Tensor, group: int, dtype: torch.dtype) -> Tensor:
    """Return numbers `[…, K]` of `[…, K / 2]` uint8 times the scale of their group."""
    flat, scales, width = packed.flatten(0, -2), scale.flatten(0, -2), 2 * packed.shape[-1]
    made = by_rows(lambda some: scaled(e2m1(flat[some]), scales[some], group), flat, width, dtype)
    return made.view(*packed.shape[:-1], width)


def mxfp4(module: Module, packed: str, scale: str, target: Target, *, turned: bool = False) -> Iterator[Conversion]:
    """Yield what becomes of numbers with a power of two for 32 inputs.

    Args:
        module: Whose tensors are read.
        packed: Suffix of `[…, N, K / 2]` or `[…, N, K / 32, 16]` uint8, the lower nibble first.
        scale: Of `[…, N, K / 32]` bytes.
        target: What it is read for.
        turned: The model's rules want the last two axes swapped.

    Raises:
        ModelError: Shapes do not fit each other.
    """
    bytes_, scales = module.need(packed, "U8"), module.need(scale, "U8", "F8_E8M0")
    if len(scales.shape) < 2:
        module.matrix(scale)
    rows = scales.shape[:-1]
    num_in = MX_GROUP * scales.shape[-1]
    module.check(
        packed, (*rows, num_in // 2), (*rows, scales.shape[-1], MX_GROUP // 2), why=f"{scale} {list(scales.shape)}"
    )

    def numbers(tensors: Mapping[str, Tensor], dtype: torch.dtype) -> Tensor:
        factors = as_scale(tensors[scale])
        return _written(tensors[packed].reshape(*factors.shape[:-1], num_in // 2), factors, MX_GROUP, dtype)

    if not module.path or not target.keeps(Mxfp4(), (*rows, num_in)):
        yield written_out(module, (*rows, num_in), target, numbers, "mxfp4", turned=turned)
        return

    def in_rows(source: FileTensor, suffix: str, width: int) -> Conversion:
        shape = (*rows[:-1], width, rows[-1]) if turned else (*rows, width)
        made = FileTensor(module.weight + suffix, "U8", shape, module.path)

        def convert(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
            flat = tensors[source.name].view(torch.uint8).flatten(len(rows))
            return {made.name: flat.transpose(-1, -2) if turned else flat}

        return Conversion((source.name,), (made,), convert, by_expert=by_expert((source,), shape))

    yield in_rows(bytes_, "_packed", num_in // 2)
    yield in_rows(scales, "_scale", scales.shape[-1])
