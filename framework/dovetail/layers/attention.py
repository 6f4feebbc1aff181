"""The attention layer: hands one layer's queries, keys and values to the batch's backend."""

from __future__ import annotations

import torch
from torch import Tensor

from dovetail.contracts.attention import AttentionLayer, ForwardBatch


def attend(layer: AttentionLayer, q: Tensor, k: Tensor, v: Tensor, batch: ForwardBatch) -> Tensor:
    """Write this step's keys and values to the pool and attend.

    Args:
        layer: The layer's facts.
        q: `[T, Hq, D]`.
        k: `[T, Hk, D]`.
        v: `[T, Hk, D]`.
        batch: The step's batch.

    Returns:
        `[T, Hq, D]`, in the dtype of `q`.
    """
    backend = batch.attention
    out = torch.empty(q.shape, dtype=q.dtype, device=q.device)
    backend.write_kv(layer, k, v, batch)
    if batch.num_decode == 0:
        backend.forward_extend(q, k, v, layer, batch, out)
    elif batch.num_decode == batch.num_requests:
        backend.forward_decode(q, k, v, layer, batch, out)
    else:
        backend.forward_mixed(q, k, v, layer, batch, out)
    return out
