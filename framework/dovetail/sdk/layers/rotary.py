"""Rotary position embedding: cosine and sine of a batch's positions for each layer. The kinds are in `rope.py`."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from dovetail.contracts.config import LayerSpec, ModelConfig, RopeConfig
from dovetail.contracts.layers import BuildContext
from dovetail.sdk.layers.rope import frequencies, rotated_dims

CosSin = tuple[Tensor, Tensor]


class Rotary(nn.Module):
    """Cosine and sine by position for one embedding."""

    def __init__(
        self, rope: RopeConfig, dim: int, max_position: int, ctx: BuildContext, context_len: int | None = None
    ) -> None:
        super().__init__()
        freqs, factor = frequencies(rope, dim, max_position, context_len)
        still = torch.zeros(dim // 2 - len(freqs))  # dimensions that are not rotated stand in order: see `head_order`
        self._freqs = torch.cat((freqs, still)).to(ctx.device)
        self._factor: float | Tensor = factor
        if factor != 1.0 and rotated_dims(rope, dim) < dim:
            self._factor = torch.cat((torch.full_like(freqs, factor), torch.ones_like(still))).to(ctx.device)
        num = self._factor.numel() if isinstance(self._factor, Tensor) else 1
        self._rotations = ctx.operation("rotations", D=dim, F=num, dtype=ctx.dtype)

    def forward(self, positions: Tensor) -> CosSin:
        """Return cosine and sine `[T, 1, D]` in the model's dtype for positions `[T]`, for `norm_rotate`."""
        found: CosSin = self._rotations(positions, self._freqs, self._factor)
        return found


def rotated_width(spec: LayerSpec) -> int:
    """Return the width of what is rotated: a head, or of a latent row what is not its value."""
    return spec.qk_dim - spec.v_dim if spec.mixer == "latent" else spec.qk_dim


class Rotaries(nn.Module):
    """Cosine and sine for each layer of a model, computed once a step for those that share an embedding and a width."""

    def __init__(self, config: ModelConfig, ctx: BuildContext) -> None:
        super().__init__()
        # A layer that folds tokens into a state has no heads: it is handed what the first that attends is, and no more.
        ropes = [None if spec.state else (config.rope_of(spec.index), rotated_width(spec)) for spec in config.layers]
        distinct: list[tuple[RopeConfig, int]] = []
        for rope in ropes:
            if rope is not None and rope not in distinct:
                distinct.append(rope)
        self._kinds = [0 if rope is None else distinct.index(rope) for rope in ropes]
        self.kinds = nn.ModuleList(
            Rotary(rope, dim, config.max_position_embeddings, ctx, config.context_len) for rope, dim in distinct
        )

    def forward(self, positions: Tensor) -> list[CosSin]:
        """Return cosine and sine for positions `[T]`, of each layer in `config.layers`."""
        made: list[CosSin] = [kind(positions) for kind in self.kinds]
        if not made:  # no layer attends, and none looks at it
            made = [(positions, positions)]
        return [made[kind] for kind in self._kinds]
