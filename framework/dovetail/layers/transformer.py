"""The two halves of a dense decoder layer, as most architectures have them: grouped-head attention and a gated MLP."""

from __future__ import annotations

from torch import Tensor, nn

from dovetail.contracts.attention import AttentionLayer, ForwardBatch
from dovetail.contracts.model import BuildContext, ModelConfig
from dovetail.errors import ModelError
from dovetail.layers import ops
from dovetail.layers.attention import attend_qkv
from dovetail.layers.linear import Linear
from dovetail.layers.norm import QKNorm, RMSNorm


class SelfAttention(nn.Module):
    """Self-attention with grouped key/value heads and rotary positions.

    Args:
        config: The model's.
        index: Layer number.
        ctx: Device and dtype.
        qkv_bias: Bias on the query, key and value projections.
        out_bias: Bias on the output projection.
        qk_norm: RMS norm on each query and key head before rotation.
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
    ) -> None:
        super().__init__()
        hq, hk, d = config.num_qo_heads, config.num_kv_heads, config.head_dim
        self.hq, self.hk, self.d = hq, hk, d
        self.qkv = Linear(config.hidden_size, {"q": hq * d, "k": hk * d, "v": hk * d}, ctx, bias=qkv_bias)
        self.out = Linear(hq * d, config.hidden_size, ctx, bias=out_bias)
        self.qk_norm = QKNorm(hq, hk, d, config.norm_eps, ctx) if qk_norm else None
        self.layer = AttentionLayer(
            index=index,
            num_qo_heads=hq,
            num_kv_heads=hk,
            head_dim=d,
            scale=d**-0.5,
            sliding_window=config.layer_windows[index] if config.layer_windows else None,
        )

    def forward(self, x: Tensor, rope: tuple[Tensor, Tensor], batch: ForwardBatch) -> Tensor:
        """Map `[T, H]` to `[T, H]`; `rope` is the step's cosine and sine."""
        out: Tensor = self.out(self._attend(self.qkv(x), rope, batch))
        return out

    def onto(self, stream: Tensor, norm: RMSNorm, rope: tuple[Tensor, Tensor], batch: ForwardBatch) -> Tensor:
        """Add `self(norm(stream))` to the stream `[T, H]`, which may be overwritten."""
        if type(self).forward is not SelfAttention.forward:
            return stream + self(norm(stream)[0], rope, batch)  # type: ignore[no-any-return]
        return self.out.onto(stream, self._attend(self.qkv.after(norm, stream), rope, batch))

    def _attend(self, qkv: Tensor, rope: tuple[Tensor, Tensor], batch: ForwardBatch) -> Tensor:
        heads = qkv.view(-1, self.hq + 2 * self.hk, self.d)
        norm = None if self.qk_norm is None else (self.qk_norm.weight, self.qk_norm.eps)
        return attend_qkv(self.layer, heads, norm, rope, batch).view(-1, self.hq * self.d)


class GatedMLP(nn.Module):
    """`down(act(gate(x)) * up(x))`, gate and up fused."""

    def __init__(self, config: ModelConfig, ctx: BuildContext, *, bias: bool = False) -> None:
        super().__init__()
        if config.hidden_act not in ("silu", "swish"):
            raise ModelError(f"config.json: hidden_act {config.hidden_act!r} is not supported; possible: silu")
        inner = config.intermediate_size
        self.gate_up = Linear(config.hidden_size, {"gate": inner, "up": inner}, ctx, bias=bias)
        self.down = Linear(inner, config.hidden_size, ctx, bias=bias)

    def forward(self, x: Tensor) -> Tensor:
        """Map `[T, H]` to `[T, H]`."""
        out: Tensor = self.down(ops.silu_and_mul(self.gate_up(x)))
        return out

    def onto(self, stream: Tensor, norm: RMSNorm) -> Tensor:
        """Add `self(norm(stream))` to the stream `[T, H]`, which may be overwritten."""
        if type(self).forward is not GatedMLP.forward:
            return stream + self(norm(stream)[0])  # type: ignore[no-any-return]
        return self.down.onto(stream, self.gate_up.gate_after(norm, stream))


class DecoderLayer(nn.Module):
    """Pre-norm decoder layer: attention and MLP each add to the residual stream what they make of its norm.

    Built from parts, so that an architecture chooses its own attention and MLP. The built-in parts take the norm into
    their first kernel and the addition into their last (`onto`); any other part is called with the norm's output.
    """

    def __init__(self, config: ModelConfig, ctx: BuildContext, attention: nn.Module, mlp: nn.Module) -> None:
        super().__init__()
        self.attention_norm = RMSNorm(config.hidden_size, config.norm_eps, ctx)
        self.attention = attention
        self.mlp_norm = RMSNorm(config.hidden_size, config.norm_eps, ctx)
        self.mlp = mlp

    def forward(self, stream: Tensor, rope: tuple[Tensor, Tensor], batch: ForwardBatch) -> Tensor:
        """Return the residual stream `[T, H]` with this layer's part added; what was given may be overwritten."""
        if isinstance(self.attention, SelfAttention):
            stream = self.attention.onto(stream, self.attention_norm, rope, batch)
        else:
            stream = stream + self.attention(self.attention_norm(stream)[0], rope, batch)
        if isinstance(self.mlp, GatedMLP):
            return self.mlp.onto(stream, self.mlp_norm)
        return stream + self.mlp(self.mlp_norm(stream)[0])  # type: ignore[no-any-return]
