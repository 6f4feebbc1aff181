"""The attention layer: hands one layer's queries, keys and values to the batch's backend."""

from __future__ import annotations

import torch
from torch import Tensor

from dovetail.contracts.attention import AttentionLayer, ForwardBatch
from dovetail.contracts.layers import BuildContext, Part
from dovetail.sdk.layers.matrix import Matrix
from dovetail.sdk.layers.ops.reference import NormRotate


class Sinks(Matrix):
    """One logit for each query head `[Hq]`, float32, as `AttentionLayer` takes them; ranks divide the heads."""

    suffixes = {"weight": ("", ".weight")}  # noqa: RUF012 - as the base declares it

    weight: Tensor

    def __init__(self, ctx: BuildContext, num_qo_heads: int) -> None:
        super().__init__(ctx, ctx.path, 1, (Part("", num_qo_heads),), "out")
        self.store("weight", torch.float32, granule=None)


def attend(layer: AttentionLayer, q: Tensor, k: Tensor | None, v: Tensor | None, batch: ForwardBatch) -> Tensor:
    """Write this step's keys and values to the pool and attend.

    Args:
        layer: The layer's facts.
        q: `[T, Hq, D]`.
        k: `[T, Hk, D]`; None where the layer reads another one's cache.
        v: `[T, Hk, Dv]`; None where that is so, or the layer is latent: its values are part of `k`.
        batch: The step's batch.

    Returns:
        `[T, Hq, Dv]`, in the dtype of `q`.
    """
    backend = batch.attention
    if not layer.causal:
        out = torch.empty(*q.shape[:-1], layer.v_dim, dtype=q.dtype, device=q.device)
        backend.forward_extend(q, k, v, layer, batch, out)
        return out
    if k is not None:
        v = k[..., : layer.v_dim] if v is None else v
        backend.write_kv(layer, k, v, batch)
    return attend_cached(layer, q, k, v, batch)


def attend_cached(layer: AttentionLayer, q: Tensor, k: Tensor | None, v: Tensor | None, batch: ForwardBatch) -> Tensor:
    """As `attend`, of a causal layer whose keys and values of this step are in the pool; `q` may be the decode rows."""
    backend = batch.attention
    out = torch.empty(*q.shape[:-1], layer.v_dim, dtype=q.dtype, device=q.device)
    if batch.num_decode == 0:
        backend.forward_extend(q, k, v, layer, batch, out)
    elif len(q) == batch.num_decode:
        backend.forward_decode(q, k, v, layer, batch, out)
    else:
        backend.forward_mixed(q, k, v, layer, batch, out)
    return out


def attend_qkv(
    layer: AttentionLayer,
    qkv: Tensor,
    norm: tuple[Tensor, float] | None,
    rope: tuple[Tensor, Tensor],
    batch: ForwardBatch,
    norm_rotate: NormRotate,
) -> Tensor:
    """Normalise and rotate queries and keys, then `attend`; in one go where the backend serves that.

    Args:
        layer: The layer's facts.
        qkv: `[T, Hq + 2 Hk, D]`: query, key and value heads of each token; `[T, Hq, D]` where the layer reads another
            one's cache.
        norm: Weight `[Hq + Hk, D]` and epsilon of the heads' RMS norm, or None; `[Hq, D]` where that is so.
        rope: The step's cosine and sine.
        batch: The step's batch.
        norm_rotate: Kernel of the operation of that name, for heads of D.

    Returns:
        `[T, Hq, D]`, in the dtype of `qkv`.
    """
    hq, hk = layer.num_qo_heads, layer.num_kv_heads
    weight, eps = (None, 0.0) if norm is None else norm
    if qkv.shape[1] == hq:
        return attend(layer, norm_rotate(qkv, weight, eps, *rope), None, None, batch)
    if batch.num_decode == batch.num_requests:
        out = torch.empty(qkv.shape[0], hq, layer.v_dim, dtype=qkv.dtype, device=qkv.device)
        if batch.attention.forward_decode_qkv(qkv, norm, rope, layer, batch, out):
            return out
    qk = norm_rotate(qkv[:, : hq + hk], weight, eps, *rope)
    return attend(layer, qk[:, :hq], qk[:, hq:], qkv[:, hq + hk :], batch)
