"""Frequencies of each kind of rotary embedding, and the order in which a head's dimensions stand for it.

D head dim, R dimensions that are rotated. Kernels rotate dimension i with i + D/2. Other layouts (pairs of neighbours,
or only the first R dimensions) are brought into that one by reordering the rows of the query and key projections when
they are loaded: scores do not depend on the order of dimensions, as long as queries and keys have the same.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from dovetail.contracts.config import RopeConfig
from dovetail.contracts.errors import ModelError


def frequencies(rope: RopeConfig, dim: int, max_position: int, context_len: int | None = None) -> tuple[Tensor, float]:
    """Frequencies of the rotations, and the factor by which their cosine and sine are multiplied.

    Args:
        rope: The kind and its numbers.
        dim: D.
        max_position: `max_position_embeddings`.
        context_len: Longest request that is served, which chooses between `longrope`'s factors and stretches
            `dynamic`; None: `max_position`. Transformers chooses by each request's length and recomputes it when
            it grows past the limit; with a cache of keys one choice holds for all.

    Returns:
        `[R / 2]` in float32, `[D / 2]` for `proportional`, whose last ones are zero, and `none`, whose all are.

    Raises:
        ModelError: Numbers that do not fit.
    """
    if dim % 2:  # kernels pair dimensions, also of heads that nothing turns
        raise ModelError(f"config.json: a head dim of {dim} is odd; possible: even ones")
    if rope.kind == "none":
        return torch.zeros(dim // 2), 1.0
    rotated = rotated_dims(rope, dim)
    base = _base(rope.theta, rotated)
    length = context_len or max_position
    if rope.kind == "default":
        return base, 1.0
    if rope.kind == "linear":
        return base / rope.params["factor"], 1.0
    if rope.kind == "dynamic":
        return _dynamic(rope, rotated, max_position, length), 1.0
    if rope.kind == "llama3":
        return _llama3(base, rope), 1.0
    if rope.kind == "yarn":
        return _yarn(base, rope, rotated, max_position)
    if rope.kind == "longrope":
        return _longrope(base, rope, max_position, length)
    if rope.kind == "proportional":
        return _proportional(rope, dim), 1.0
    raise ModelError(f"rope kind {rope.kind!r} is not known")


def rotated_dims(rope: RopeConfig, dim: int) -> int:
    """Return R.

    Raises:
        ModelError: It is no even number up to D.
    """
    if rope.kind in ("proportional", "none"):
        return dim
    rotated = int(dim * rope.partial)
    if not 0 < rotated <= dim or rotated % 2 or dim % 2:
        raise ModelError(f"config.json: partial_rotary_factor {rope.partial} of a head dim of {dim} is not even pairs")
    return rotated


def head_order(rope: RopeConfig, dim: int) -> tuple[int, ...] | None:
    """Return which dimension of the checkpoint stands at each place of a head, None if they stand as they are."""
    rotated = rotated_dims(rope, dim)
    if rope.interleaved and rope.kind != "none":
        first, second = range(0, rotated, 2), range(1, rotated, 2)
    else:
        first, second = range(rotated // 2), range(rotated // 2, rotated)
    middle = (rotated + dim) // 2
    order = (*first, *range(rotated, middle), *second, *range(middle, dim))
    return None if order == tuple(range(dim)) else order


def _base(theta: float, rotated: int) -> Tensor:
    return 1.0 / (theta ** (torch.arange(0, rotated, 2, dtype=torch.int64).float() / rotated))


def _dynamic(rope: RopeConfig, rotated: int, max_position: int, length: int) -> Tensor:
    """NTK-aware scaling: a larger base the further requests go beyond the positions of the training."""
    factor = rope.params["factor"]
    scale = factor * max(length, max_position) / max_position - (factor - 1)
    return _base(rope.theta * scale ** (rotated / (rotated - 2)), rotated)


def _llama3(base: Tensor, rope: RopeConfig) -> Tensor:
    """Llama 3.1: slow waves divided by `factor`, fast ones kept, a linear blend between. Source: its config.json.

    Llama 4 Scout has one bound, with nothing between.
    """
    p = rope.params
    factor, low, high = p["factor"], p["low_freq_factor"], p["high_freq_factor"]
    waves_in_context = p["original_max_position_embeddings"] * base / (2 * math.pi)
    is_fast = (waves_in_context >= low).float()
    keep = ((waves_in_context - low) / (high - low)).clamp(0, 1) if high > low else is_fast
    return (1 - keep) * base / factor + keep * base


def _yarn(base: Tensor, rope: RopeConfig, rotated: int, max_position: int) -> tuple[Tensor, float]:
    """YaRN, arXiv:2309.00071: blend interpolated and original frequencies between `beta_fast` and `beta_slow` turns."""
    p = rope.params
    original = p.get("original_max_position_embeddings", max_position)
    factor = p.get("factor", max_position / original)
    turns = torch.tensor([p.get("beta_fast") or 32.0, p.get("beta_slow") or 1.0], dtype=torch.float64)
    edges = rotated * torch.log(original / (turns * 2 * math.pi)) / (2 * math.log(rope.theta))
    low, high = edges[0].item(), edges[1].item()
    if p.get("truncate", 1.0):
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, rotated - 1)
    width = high - low if high != low else 0.001
    ramp = ((torch.arange(rotated // 2).float() - low) / width).clamp(0, 1)
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


def _longrope(base: Tensor, rope: RopeConfig, max_position: int, length: int) -> tuple[Tensor, float]:
    """LongRoPE, arXiv:2402.13753: each frequency divided by a factor of its own."""
    p = rope.params
    original = p.get("original_max_position_embeddings", max_position)
    name, factors = ("long", rope.long_factor) if length > original else ("short", rope.short_factor)
    if len(factors) != len(base):
        raise ModelError(f"config.json: {name}_factor has {len(factors)} numbers for {len(base)} frequencies")
    factor = p.get("factor", max_position / original)
    attention = p.get("attention_factor")
    if attention is None:
        attention = 1.0 if factor <= 1 else math.sqrt(1 + math.log(factor) / math.log(original))
    return base / torch.tensor(factors, dtype=torch.float32), attention


def _proportional(rope: RopeConfig, dim: int) -> Tensor:
    """Gemma 4: the first frequencies of the whole head, and zeros for what is not rotated."""
    num = int(rope.partial * dim // 2)
    freqs = 1.0 / (rope.theta ** (torch.arange(0, 2 * num, 2, dtype=torch.int64).float() / dim))
    return torch.cat((freqs, torch.zeros(dim // 2 - num))) / rope.params.get("factor", 1.0)
