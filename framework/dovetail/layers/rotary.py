"""Rotary position embedding: the frequencies of each kind of scaling, and the cosine and sine of a batch."""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn

from dovetail.contracts.layers import BuildContext
from dovetail.contracts.model import RopeConfig
from dovetail.errors import ModelError
from dovetail.layers import ops


def inverse_frequencies(rope: RopeConfig, dim: int, max_position: int) -> tuple[Tensor, float]:
    """Frequencies of the `dim / 2` rotations, and the factor by which cosine and sine are multiplied.

    Raises:
        ModelError: Unknown kind, or a parameter of it is missing.
    """
    base = 1.0 / (rope.theta ** (torch.arange(0, dim, 2, dtype=torch.int64).float() / dim))
    params = rope.params
    try:
        if rope.kind == "default":
            return base, 1.0
        if rope.kind == "linear":
            return base / params["factor"], 1.0
        if rope.kind == "llama3":
            return _llama3(base, rope), 1.0
        if rope.kind == "yarn":
            return _yarn(base, rope, dim, max_position)
    except KeyError as missing:
        raise ModelError(f"config.json: rope kind {rope.kind!r} needs the parameter {missing}") from None
    raise ModelError(f"config.json: rope kind {rope.kind!r} is not supported; possible: default, linear, llama3, yarn")


def _llama3(base: Tensor, rope: RopeConfig) -> Tensor:
    """Llama 3.1: slow waves divided by `factor`, fast ones kept, a linear blend between. Source: its config.json."""
    p = rope.params
    factor, low, high = p["factor"], p["low_freq_factor"], p["high_freq_factor"]
    waves_in_context = p["original_max_position_embeddings"] * base / (2 * math.pi)
    keep = ((waves_in_context - low) / (high - low)).clamp(0, 1)
    return (1 - keep) * base / factor + keep * base


def _yarn(base: Tensor, rope: RopeConfig, dim: int, max_position: int) -> tuple[Tensor, float]:
    """YaRN, arXiv:2309.00071: blend interpolated and original frequencies between `beta_fast` and `beta_slow` turns."""
    p = rope.params
    original = p.get("original_max_position_embeddings", max_position)
    factor = p["factor"] if p.get("factor") is not None else max_position / original
    turns = torch.tensor([p.get("beta_fast", 32.0), p.get("beta_slow", 1.0)], dtype=torch.float64)
    edges = dim * torch.log(original / (turns * 2 * math.pi)) / (2 * math.log(rope.theta))
    low, high = edges[0].item(), edges[1].item()
    if p.get("truncate", 1.0):
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, dim - 1)
    ramp = ((torch.arange(dim // 2).float() - low) / max(high - low, 0.001)).clamp(0, 1)
    return base / factor * ramp + base * (1 - ramp), _yarn_attention(p, factor)


def _yarn_attention(p: object, factor: float) -> float:
    """YaRN's attention temperature, with DeepSeek's `mscale` variant."""
    params = dict(p)  # type: ignore[call-overload]

    def scale(m: float) -> float:
        return 1.0 if factor <= 1 else 0.1 * m * math.log(factor) + 1.0

    if params.get("attention_factor") is not None:
        return float(params["attention_factor"])
    if params.get("mscale") and params.get("mscale_all_dim"):
        return float(scale(params["mscale"]) / scale(params["mscale_all_dim"]))
    return scale(1.0)


class Rotary(nn.Module):
    """Cosine and sine by position, computed once per step and shared by all layers."""

    def __init__(self, rope: RopeConfig, dim: int, max_position: int, ctx: BuildContext) -> None:
        super().__init__()
        freqs, self._scale = inverse_frequencies(rope, dim, max_position)
        self._freqs = freqs.to(ctx.device)
        self._dtype = ctx.dtype

    def forward(self, positions: Tensor) -> tuple[Tensor, Tensor]:
        """Return cosine and sine `[T, 1, dim]` in the model's dtype for positions `[T]`, for `ops.norm_rotate`."""
        return ops.rotations(positions, self._freqs, self._scale, self._dtype)
