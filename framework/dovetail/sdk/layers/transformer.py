"""The two halves of a dense decoder layer, as most architectures have them: grouped-head attention and an MLP."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from dovetail.contracts.attention import AttentionLayer, ForwardBatch
from dovetail.contracts.config import ModelConfig
from dovetail.contracts.errors import ModelError
from dovetail.contracts.layers import Act, BuildContext, Norm, Part, Stream
from dovetail.sdk.layers.attention import Sinks, attend, attend_qkv
from dovetail.sdk.layers.norm import QKNorm
from dovetail.sdk.layers.ops.reference import Binary
from dovetail.sdk.layers.rope import head_order

GATES: dict[str, Act] = {
    "silu": "silu_and_mul",
    "swish": "silu_and_mul",
    "gelu": "gelu_and_mul",
    "gelu_pytorch_tanh": "gelu_tanh_and_mul",
}
"""Activation of a gated MLP by `hidden_act`."""

ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "silu": F.silu,
    "gelu": F.gelu,
    **dict.fromkeys(("gelu_pytorch_tanh", "gelu_new", "gelu_fast"), partial(F.gelu, approximate="tanh")),
    "quick_gelu": lambda x: x * torch.sigmoid(1.702 * x),
    "relu": F.relu,
    "relu2": lambda x: F.relu(x).square(),
}
"""That of an MLP without a gate."""


class SelfAttention(nn.Module):
    """Self-attention with grouped key/value heads and rotary positions.

    A layer that reads another one's cache (`LayerSpec.cache_layer`) projects queries only.

    Args:
        config: The model's.
        index: Layer number.
        ctx: Device, dtype, rank and path.
        qkv_bias: Bias on the query, key and value projections.
        out_bias: Bias on the output projection.
        qk_norm: RMS norm on each query and key head before rotation.
        qk_norm_offset: Added to that norm's weights.
        key_is_value: There is no value projection: the key's is the value's, too. A subclass attends with that.
        gate: Behind each query head, its projection has a gate: what the head finds is multiplied by its sigmoid.
    """

    def __init__(
        self,
        config: ModelConfig,
        index: int,
        ctx: BuildContext,
        *,
        qkv_bias: bool = False,
        out_bias: bool = False,
        qk_norm: bool = False,
        qk_norm_offset: float = 0.0,
        key_is_value: bool = False,
        gate: bool = False,
    ) -> None:
        super().__init__()
        spec, ranks = config.layer(index), ctx.parallel.size
        hq, hk, d = spec.num_qo_heads, spec.num_kv_heads, spec.qk_dim
        copies = max(1, ranks // hk)  # fewer KV heads than ranks: several ranks keep the same one
        order = head_order(config.rope_of(index), d)
        self.has_cache, self.key_is_value = spec.cache_layer is None, key_is_value
        kv = (Part("k", hk * d, d, copies, order), Part("v", hk * d, d, copies))
        queries = Part("q", 2 * hq * d, 2 * d, order=order and (*order, *range(d, 2 * d)))
        queries = queries if gate else Part("q", hq * d, d, order=order)
        parts = (queries, *(kv[: 1 if key_is_value else 2] if self.has_cache else ()))
        self.qkv = ctx.linear("qkv", config.hidden_size, parts, bias=qkv_bias, shard="out")
        self.out = ctx.linear("out", hq * d, config.hidden_size, bias=out_bias, shard="in")
        self.hq, self.hk, self.d = hq // ranks, hk * copies // ranks, d
        num_keys = self.hk if self.has_cache else 0
        self.qk_norm = (
            QKNorm(self.hq, num_keys, d, config.norm_eps, ctx, order, offset=qk_norm_offset) if qk_norm else None
        )
        self.sinks = Sinks(ctx.at("sinks"), hq) if spec.sinks else None
        self.layer = AttentionLayer.of(spec, ranks, None if self.sinks is None else self.sinks.weight)
        self._norm_rotate = ctx.operation("norm_rotate", D=d)
        self._gate: Binary | None = ctx.operation("sigmoid_gate", N=self.hq, D=d) if gate else None

    def forward(
        self,
        x: Tensor | Stream,
        rope: tuple[Tensor, Tensor],
        batch: ForwardBatch,
        *,
        norm: Norm | None = None,
        add: Stream | None = None,
        scale: float = 1.0,
    ) -> Tensor | Stream:
        """Map `[T, H]` to `[T, H]`; `rope` is the step's cosine and sine, the rest is as for a `Linear`."""
        return self.out(self.attend(self.qkv(x, norm=norm), rope, batch), add=add, scale=scale)

    def attend(self, qkv: Tensor, rope: tuple[Tensor, Tensor], batch: ForwardBatch) -> Tensor:
        """Map the projection `[T, (Hq + 2 Hk) D]` to `[T, Hq D]`; what an architecture does otherwise it overrides."""
        gate = None
        if self._gate is not None:
            queries, others = torch.split(qkv, [2 * self.hq * self.d, qkv.shape[1] - 2 * self.hq * self.d], 1)
            queries, gate = queries.reshape(-1, self.hq, 2, self.d).unbind(2)
            qkv = torch.cat((queries.flatten(1), others), 1)
        heads = qkv.view(-1, self.hq + (2 * self.hk if self.has_cache else 0), self.d)
        norm = None if self.qk_norm is None else (self.qk_norm.weight, self.qk_norm.eps)
        found = attend_qkv(self.layer, heads, norm, rope, batch, self._norm_rotate)
        return found.view(-1, self.hq * self.d) if self._gate is None or gate is None else self._gate(found, gate)


class LateAttention(SelfAttention):
    """Self-attention that changes queries and keys behind the rotation: an architecture says how in `late`."""

    def attend(self, qkv: Tensor, rope: tuple[Tensor, Tensor], batch: ForwardBatch) -> Tensor:
        """See `SelfAttention.attend`."""
        hq, hk = self.hq, self.hk
        heads = qkv.view(-1, hq + 2 * hk, self.d)
        q, k = self.late(self._norm_rotate(heads[:, : hq + hk], None, 0.0, *rope), batch).split_with_sizes([hq, hk], 1)
        return attend(self.layer, q, k, heads[:, hq + hk :], batch).view(-1, hq * self.d)

    def late(self, turned: Tensor, batch: ForwardBatch) -> Tensor:
        """Return rotated queries and keys `[T, Hq + Hk, D]`, the queries first, as the layer attends with them."""
        return turned


class GatedMLP(nn.Module):
    """`down(act(gate(x)) * up(x))`, gate and up fused; `inner` is `config.intermediate_size` unless given."""

    def __init__(self, config: ModelConfig, ctx: BuildContext, *, bias: bool = False, inner: int | None = None) -> None:
        super().__init__()
        if config.hidden_act not in GATES:
            raise ModelError(
                f"config.json: hidden_act {config.hidden_act!r} is not supported; possible: {', '.join(GATES)}"
            )
        inner = config.intermediate_size if inner is None else inner
        parts, act = (Part("gate", inner), Part("up", inner)), GATES[config.hidden_act]
        self.gate_up = ctx.linear("gate_up", config.hidden_size, parts, bias=bias, shard="out", act=act)
        self.down = ctx.linear("down", inner, config.hidden_size, bias=bias, shard="in")

    def forward(
        self, x: Tensor | Stream, *, norm: Norm | None = None, add: Stream | None = None, scale: float = 1.0
    ) -> Tensor | Stream:
        """Map `[T, H]` to `[T, H]`; `norm`, `add` and `scale` as for a `Linear`."""
        return self.down(self.gate_up(x, norm=norm), add=add, scale=scale)


class MLP(nn.Module):
    """`down(act(up(x)))`, without a gate; `inner` is `config.intermediate_size` unless given."""

    def __init__(self, config: ModelConfig, ctx: BuildContext, *, bias: bool = False, inner: int | None = None) -> None:
        super().__init__()
        if config.hidden_act not in ACTIVATIONS:
            known = ", ".join(ACTIVATIONS)
            raise ModelError(f"config.json: hidden_act {config.hidden_act!r} is not supported; possible: {known}")
        self._act, inner = ACTIVATIONS[config.hidden_act], config.intermediate_size if inner is None else inner
        self.up = ctx.linear("up", config.hidden_size, inner, bias=bias, shard="out")
        self.down = ctx.linear("down", inner, config.hidden_size, bias=bias, shard="in")

    def forward(
        self, x: Tensor | Stream, *, norm: Norm | None = None, add: Stream | None = None, scale: float = 1.0
    ) -> Tensor | Stream:
        """Map `[T, H]` to `[T, H]`; `norm`, `add` and `scale` as for a `Linear`."""
        return self.down(self._act(self.up(x, norm=norm)), add=add, scale=scale)
