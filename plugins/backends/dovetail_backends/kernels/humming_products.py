"""Products with 4-bit integers by the library `humming-kernels`.

T rows, N outputs, K inputs, G groups of inputs that share a scale.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from dovetail.contracts.errors import PluginError
from dovetail.contracts.kernels import Ask
from dovetail.contracts.layers import RMSScale
from dovetail.sdk.quantization.words import nibbles_of
from dovetail_backends.kernels.triton.norms import act_and_mul, rms_norm
from dovetail_backends.kernels.triton.packed import linear
from dovetail_backends.kernels.triton.packed_weight import PackedWeight, weight_of

logger = logging.getLogger("dovetail.backends.humming")

WORD = 8
"""Nibbles of an int32."""


def words(nibbles: Tensor) -> Tensor:
    """Return int32 `[…, n / 8]` of nibbles `[…, n]` in their order, the first in the lowest bits."""
    parts = nibbles.to(torch.int32).reshape(*nibbles.shape[:-1], -1, WORD)
    found: Tensor = parts[..., 0].clone()
    for at in range(1, WORD):
        found |= parts[..., at] << (4 * at)
    return found


def as_library_has(tensors: Mapping[str, Tensor], dtype: torch.dtype) -> dict[str, Tensor]:
    """Return the tensors of `Int4` as `humming.schema.HummingWeightSchema` names and lays them out.

    Returns:
        `weight` int32 `[N, K / 8]` of nibbles in order, `weight_scale` `[N, G]` in the model's dtype, and
        `zero_point` int32 `[N / 8, G]`, packed along N, where there are zero points other than 8.
    """
    found = {
        "weight": words(nibbles_of(tensors["weight_packed"])),
        "weight_scale": tensors["weight_scale"].to(dtype).contiguous(),
    }
    if "weight_zero" in tensors:
        found["zero_point"] = words(tensors["weight_zero"].t()).t().contiguous()
    return found


@dataclass(frozen=True, slots=True)
class HummingWeight:
    """A matrix.

    Attributes:
        layer: The library's `HummingLayer`.
        few: The same as the set `triton` packs it, for few rows, or None.
    """

    layer: Any
    few: PackedWeight | None


class HummingProduct:
    """The operation `packed_linear`.

    Args:
        ask: The place.
        few_rows: Rows up to which the kernels of the set `triton` multiply; 0: none.
        in_float8: Whether more rows are rounded to float8.
    """

    def __init__(self, ask: Ask, *, few_rows: int, in_float8: bool) -> None:
        self._dtype, self._form = getattr(torch, ask.dtype), ask.option("form")
        self._act, self._few_rows, self._in_float8 = dict(ask.options).get("act"), few_rows, in_float8

    def keeps(self, half: str = "") -> bool:
        """See `PackedKernel.keeps`."""
        return False

    def pack(self, tensors: Mapping[str, Tensor], half: str = "") -> HummingWeight:
        """See `PackedKernel.pack`."""
        few = weight_of(self._form, tensors, self._dtype) if self._few_rows else None
        given = as_library_has(tensors, self._dtype)
        with torch.cuda.device(given["weight"].device):
            return HummingWeight(self._layer(given), few)

    def _layer(self, given: Mapping[str, Tensor]) -> Any:
        from humming.kernel.humming import HummingKernel
        from humming.layer import HummingLayer

        n, k = given["weight"].shape[0], given["weight"].shape[1] * WORD
        config = {"dtype": "uint4", "group_size": self._form.group, "has_zero_point": "zero_point" in given}
        rows = {"dtype": "float8e4m3"} if self._in_float8 else None
        began = time.perf_counter()
        try:
            layer = HummingLayer(n, k, config, rows, torch_dtype=self._dtype).to(given["weight"].device)
            layer.load_from_tensors(dict(given))
            layer.transform()
            HummingKernel.prepare_kernels(layer.humming_config.to_str())  # of all ranges of rows
        except (RuntimeError, OSError, AssertionError, ValueError) as error:
            raise PluginError(
                f"humming-kernels cannot multiply by {n} x {k} int4: {error}; "
                "it needs a CUDA compiler (pip install 'dovetail-llm[humming]'), or leave it out: --kernels triton"
            ) from error
        if (took := time.perf_counter() - began) > 1:
            logger.info("humming-kernels compiled products of %d outputs and %d inputs in %.1f s.", n, k, took)
        return layer

    def __call__(self, x: Tensor, weight: HummingWeight, bias: Tensor | None) -> Tensor:
        """`x Wᵀ + b`."""
        if weight.few is not None and len(x) <= self._few_rows:
            return linear(x, weight.few, bias)
        return self._product(x, weight, bias)

    def _product(self, x: Tensor, weight: HummingWeight, bias: Tensor | None) -> Tensor:
        if not len(x):
            return x.new_empty(0, weight.layer.shape_n)
        y: Tensor = weight.layer(x.contiguous())
        return y if bias is None else y + bias


class HummingNormedProduct(HummingProduct):
    """The operations `packed_norm_linear` and, with an activation, `packed_norm_gate`."""

    def __call__(  # type: ignore[override]  # another operation
        self,
        x: Tensor,
        norm: Tensor | None,
        eps: float,
        weight: HummingWeight,
        bias: Tensor | None,
        residual: Tensor | None = None,
    ) -> Tensor:
        """`act(norm(x) Wᵀ + b) + residual`."""
        if weight.few is not None and len(x) <= self._few_rows:
            rms = None if norm is None else RMSScale(norm, eps)
            return linear(x, weight.few, bias, norm=rms, act=self._act, residual=residual)
        rows = x if norm is None or not len(x) else rms_norm(x, norm, eps)
        y = self._product(rows, weight, bias)
        if self._act is not None:
            y = act_and_mul(y, act=self._act)
        return y if residual is None else residual + y
