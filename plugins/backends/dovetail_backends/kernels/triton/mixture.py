"""Routers and experts: which kernels serve how many tokens.

T tokens, H hidden size, E experts, I width between of an expert, C experts chosen for each token.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any, cast

import torch
from torch import Tensor

from dovetail.contracts.layers import Act, RMSScale
from dovetail.sdk.layers.ops import mixture
from dovetail.sdk.layers.ops.mixture import Weigh
from dovetail.sdk.layers.routing import Routing
from dovetail.sdk.quantization.forms import Form
from dovetail_backends.kernels.triton.experts import ExpertWeights, SortedTiles, gated_experts, many
from dovetail_backends.kernels.triton.norms import act_and_mul, rms_norm
from dovetail_backends.kernels.triton.packed_experts import packed_gated_experts
from dovetail_backends.kernels.triton.packed_slots import PackedExpertWeights, of_slots, slot_tiles, wanted_words
from dovetail_backends.kernels.triton.packed_weight import PackedWeight, weight_of
from dovetail_backends.kernels.triton.products import linear, wide_linear
from dovetail_backends.kernels.triton.route import route
from dovetail_backends.kernels.triton.router import Routed, routed

FEW_TOKENS = 8
"""Up to so many go through the router in one kernel, which reads its weights for each; as many as experts of words take
one by one, of which four are chosen for each."""
MAX_SORTED = 8192
"""Choices of tokens up to which our own kernels are faster than torch's grouped product, on an H200."""


def norm_route(
    x: Tensor, norm: Tensor | None, eps: float, weight: Tensor, bias: Tensor | None, correction: Tensor | None,
    scale: float, *, routing: Routing, dtype: torch.dtype,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """See the operation: one kernel for a few tokens."""
    if _is_for_one_kernel(x):
        rms = None if norm is None else RMSScale(norm, eps)
        ids, shares, made = routed(x, rms, weight, bias, correction, routing, scale=scale)
        return ids, shares, cast("Tensor", made)  # without words, no integers are made
    rows = x if norm is None else rms_norm(x, norm, eps)
    logits = (wide_linear if routing.is_wide else linear)(rows, weight, bias)
    return *route(logits, correction, scale, routing=routing, dtype=dtype), rows


def _is_for_one_kernel(x: Tensor) -> bool:
    return 0 < len(x) <= FEW_TOKENS and x.stride(-1) == 1


def experts(
    x: Tensor, ids: Tensor, shares: Tensor, gate_up: Tensor, gate_up_bias: Tensor | None, down: Tensor,
    down_bias: Tensor | None, residual: Tensor | None, *, act: Act, weigh: Weigh, first: int, total: int,
    tiles: SortedTiles | None = None,
) -> Tensor:  # fmt: skip
    """See the operation: our kernels, but for many choices of which torch has a grouped product.

    With `tiles`, choices are sorted and multiplied with these, however many there are.
    """
    if not len(x):
        return torch.zeros_like(x)
    if tiles is None and ids.numel() > MAX_SORTED and mixture.are_groupable(x, gate_up, down, total):
        gate = partial(act_and_mul, act=act)
        return mixture.grouped(
            x, ids, shares, gate_up, gate_up_bias, down, down_bias, residual, gate=gate, weigh=weigh
        )  # fmt: skip
    residual = None if residual is None else residual.contiguous()
    of = ExpertWeights(gate_up, down, gate_up_bias, down_bias, first, act, weigh == "input")
    given = _contiguous(x, ids, shares)
    return gated_experts(*given, of, residual) if tiles is None else many(*given, of, residual, tiles)


def _contiguous(x: Tensor, ids: Tensor, shares: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    return x.contiguous(), ids.contiguous(), shares.contiguous()


class TritonPackedExperts:
    """The operation `packed_experts`."""

    product: Callable[..., Tensor] = staticmethod(packed_gated_experts)

    def __init__(self, dtype: torch.dtype, *, forms: tuple[Form, Form], act: Act, weigh: Weigh, first: int) -> None:
        self._dtype, self._act, self._is_input, self._first = dtype, act, weigh == "input", first
        self._forms = {"gate_up": forms[0], "down": forms[1]}

    def keeps(self, half: str = "") -> bool:
        """See `PackedKernel.keeps`."""
        return False

    def pack(self, tensors: Mapping[str, Tensor], half: str = "") -> PackedWeight:
        """See `PackedKernel.pack`."""
        return weight_of(self._forms[half], tensors, self._dtype)

    def __call__(self, x: Tensor, ids: Tensor, shares: Tensor, *matrices: Any) -> Tensor:
        """See the operation."""
        weights, residual = self.weights(*matrices)
        return self.product(*_contiguous(x, ids, shares), weights, residual)

    def weights(
        self, up: PackedWeight, up_bias: Tensor | None, down: PackedWeight, down_bias: Tensor | None,
        residual: Tensor | None,
    ) -> tuple[PackedExpertWeights, Tensor | None]:  # fmt: skip
        """Return what kernels take."""
        of = PackedExpertWeights(up, down, up_bias, down_bias, self._first, self._act, self._is_input)
        return of, None if residual is None else residual.contiguous()


class TritonRoutedExperts(TritonPackedExperts):
    """The operation `routed_experts`: for a few tokens the router's kernel makes integers of them, if so multiplied."""

    def __init__(self, dtype: torch.dtype, *, routing: Routing, **options: Any) -> None:
        super().__init__(dtype, **options)
        self._routing = routing

    def __call__(  # type: ignore[override]  # another operation
        self, x: Tensor, norm: Tensor | None, eps: float, weight: Tensor, bias: Tensor | None,
        correction: Tensor | None, scale: float, *matrices: Any,
    ) -> Tensor:  # fmt: skip
        """See the operation."""
        weights, residual = self.weights(*matrices)
        words = wanted_words(weights, len(x) * self._routing.top_k, x.dtype) if _is_for_one_kernel(x) else None
        if words is None:
            ids, shares, rows = norm_route(
                x, norm, eps, weight, bias, correction, scale, routing=self._routing, dtype=self._dtype
            )
            return packed_gated_experts(rows.contiguous(), ids, shares, weights, residual)
        rms = None if norm is None else RMSScale(norm, eps)
        found: Routed = routed(x, rms, weight, bias, correction, self._routing, scale=scale, words=words)
        given = None if isinstance(found.rows, Tensor) else found.rows
        tiles = slot_tiles(weights, found.ids.numel())
        return of_slots(x, found.ids, found.shares, weights, residual, tiles, given=given)
