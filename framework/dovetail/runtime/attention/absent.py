"""What stands for attention where no layer of a model attends: its layers keep states alone."""

from __future__ import annotations

import torch
from torch import Tensor

from dovetail.contracts.attention import AttentionBackend, AttentionLayer, ForwardBatch, KVPool
from dovetail.contracts.config import ModelConfig
from dovetail.contracts.errors import ModelError
from dovetail.contracts.needs import AttentionCaps


class AbsentAttention(AttentionBackend):
    """Plans nothing and attends to nothing; tokens have pages all the same, which take no memory."""

    caps = AttentionCaps(
        devices=frozenset({"*"}),
        dtypes=frozenset({"float32", "bfloat16", "float16"}),
        graph="mixed",
        batch_invariant=True,
    )

    def __init__(self, config: ModelConfig, kv_pool: KVPool, device: torch.device) -> None:
        self.kv_pool, self._name = kv_pool, config.architecture

    def forward_extend(
        self, q: Tensor, k: Tensor | None, v: Tensor | None, layer: AttentionLayer, batch: ForwardBatch, out: Tensor
    ) -> None:
        raise self._refused(layer)

    def forward_decode(
        self, q: Tensor, k: Tensor | None, v: Tensor | None, layer: AttentionLayer, batch: ForwardBatch, out: Tensor
    ) -> None:
        raise self._refused(layer)

    def _refused(self, layer: AttentionLayer) -> ModelError:
        return ModelError(f"{self._name}: layer {layer.index} attends, and the specs declare no layer that does")
