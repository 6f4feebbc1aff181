"""Rotary position embedding: cosine and sine of a batch's positions for each layer. The kinds are in `rope.py`."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from dovetail.contracts.config import LayerSpec, ModelConfig, RopeConfig
from dovetail.contracts.errors import ModelError
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
        self._axes = section_axes(rope, len(freqs), dim).to(ctx.device) if rope.sections else None
        num = self._factor.numel() if isinstance(self._factor, Tensor) else 1
        self._rotations = ctx.operation("rotations", D=dim, F=num, dtype=ctx.dtype)

    def forward(self, positions: Tensor) -> CosSin:
        """Return cosine and sine `[T, 1, D]` in the model's dtype for positions `[T]` or `[3, T]`, for `norm_rotate`.

        Of three positions, `RopeConfig.sections` say which one each frequency turns by.
        """
        if positions.dim() == 1:
            found: CosSin = self._rotations(positions, self._freqs, self._factor)
            return found
        if self._axes is None:
            raise ValueError("three positions for a rotary embedding without sections")
        three = self._rotations(positions.reshape(-1), self._freqs, self._factor)
        axes = self._axes.expand(1, positions.shape[1], 1, -1)
        cos, sin = (each.view(3, -1, 1, each.shape[-1]).gather(0, axes)[0] for each in three)
        return cos, sin


def section_axes(rope: RopeConfig, num: int, dim: int) -> Tensor:
    """Return which of three positions each dimension of a head turns by, `[D]` int64: see `RopeConfig.sections`.

    Args:
        rope: With sections.
        num: Frequencies.
        dim: D.

    Raises:
        ModelError: The sections are not as many frequencies.
    """
    if len(rope.sections) != 3 or min(rope.sections) < 0 or sum(rope.sections) != num:
        raise ModelError(f"config.json: mrope_section {list(rope.sections)}: give three numbers whose sum is {num}")
    axes = torch.repeat_interleave(torch.arange(3), torch.tensor(rope.sections))
    if rope.mixes_sections:
        axes = torch.zeros(num, dtype=torch.int64)
        for axis in (1, 2):
            axes[axis : 3 * rope.sections[axis] : 3] = axis
    still = torch.zeros(dim // 2 - num, dtype=torch.int64)
    return torch.cat((axes, still)).repeat(2)


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
        """Return cosine and sine for positions `[T]` or `[3, T]`, of each layer in `config.layers`."""
        made: list[CosSin] = [kind(positions) for kind in self.kinds]
        if not made:  # no layer attends, and none looks at it
            made = [(positions, positions)]
        return [made[kind] for kind in self._kinds]
