"""Weights of 4 bits: a byte holds two, the lower one first, and 32 inputs of a row share a scale.

For a matrix `[N, K]` the checkpoint holds `weight_packed` uint8 `[N, K / 2]` and `weight_scale` `[N, K / 32]`; the
number is `(nibble - 8) * scale`. `config.json` says `"quantization_config": {"quant_method": "nibble"}`.
"""

from collections.abc import Mapping
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from dovetail.contracts import (
    BuildContext,
    Experts,
    ExpertsSpec,
    LayerFactory,
    Linear,
    MatrixSpec,
    Norm,
    Quantization,
    Stored,
    Stream,
)
from dovetail.contracts.errors import ModelError
from dovetail.sdk.layers.matrix import Matrix
from dovetail.sdk.layers.shards import gated

GROUP = 32
PACKED, PLAIN_DTYPE = ".weight_packed", ".weight"


class Nibble(Quantization):
    """Which checkpoints are read."""

    @classmethod
    def why_not(cls, config: Mapping[str, Any]) -> str | None:
        """Say why a checkpoint cannot be served, or None."""
        found = config.get("quant_method")
        return None if found == "nibble" else f"it reads quant_method 'nibble', not {found!r}"

    def factory(self, plain: LayerFactory) -> LayerFactory:
        """Return what makes the model's matrices."""
        return NibbleFactory(self.stored, plain)


class NibbleFactory:
    """Packed where the checkpoint has packed tensors, plain elsewhere."""

    def __init__(self, stored: Stored, plain: LayerFactory) -> None:
        self.stored, self.plain = stored, plain

    def linear(self, ctx: BuildContext, spec: MatrixSpec) -> Linear:
        """See `LayerFactory.linear`."""
        if self.stored.is_known and not self.stored.dtypes(spec.path, PACKED):
            return self.plain.linear(ctx, spec)
        if self.stored.dtypes(spec.path, PLAIN_DTYPE):
            raise ModelError(f"{spec.path}: some of its projections are packed and others are not")
        return NibbleLinear(ctx, spec)

    def experts(self, ctx: BuildContext, spec: ExpertsSpec) -> Experts:
        """See `LayerFactory.experts`."""
        if self.stored.dtypes(f"{spec.path}.down", PACKED):
            raise ModelError(f"{spec.path}: packed experts are not read")
        return self.plain.experts(ctx, spec)


class NibbleLinear(Matrix):
    """`act(norm(x) Wᵀ + b) * scale` over packed weights."""

    weight_packed: nn.Parameter
    weight_scale: nn.Parameter

    def __init__(self, ctx: BuildContext, spec: MatrixSpec) -> None:
        super().__init__(ctx, spec.path, spec.in_features, spec.parts, spec.shard)
        is_gated = gated(spec.path, spec.act, spec.parts) is not None
        self.gate = ctx.operation("act_and_mul", F=self.local_out // 2, act=spec.act) if is_gated else None
        self.store("weight_packed", torch.uint8, granule=2)
        self.store("weight_scale", torch.float32, granule=GROUP)
        self.bias: nn.Parameter | None = None
        if spec.bias:
            self.store("bias", ctx.dtype, granule=None)

    def finalize(self) -> None:
        """Where ranks add up shares, the first one adds the bias."""
        if self.is_share and self.parallel.rank > 0:
            self.bias = None

    def forward(
        self, x: Tensor | Stream, *, norm: Norm | None = None, add: Stream | None = None, scale: float = 1.0
    ) -> Tensor | Stream:
        """Write the weight out and multiply."""
        x = x.total() if isinstance(x, Stream) else x
        x = x if norm is None else norm(x)
        weight = unpack(self.weight_packed, self.weight_scale)
        y = F.linear(x, weight[:, : x.shape[-1]].to(x.dtype), self.bias)
        return self.finish(y if self.gate is None else self.gate(y), add, scale)


def unpack(packed: Tensor, scale: Tensor) -> Tensor:
    """Return `[N, K]` float32."""
    nibbles = torch.stack((packed & 15, packed >> 4), -1).flatten(1).float() - 8
    return nibbles * scale.float().repeat_interleave(GROUP, dim=1)[:, : nibbles.shape[1]]


def pack(weight: Tensor) -> dict[str, Tensor]:
    """Return the tensors of a checkpoint for a matrix `[N, K]`, K even."""
    padded = F.pad(weight, (0, -weight.shape[1] % GROUP))
    groups = padded.view(weight.shape[0], -1, GROUP)
    scale = (groups.abs().amax(-1) / 7).clamp_min(1e-8)
    nibbles = ((groups / scale[..., None]).round() + 8).clamp(0, 15).to(torch.uint8).flatten(1)[:, : weight.shape[1]]
    return {PACKED: nibbles[:, ::2] | (nibbles[:, 1::2] << 4), ".weight_scale": scale}
