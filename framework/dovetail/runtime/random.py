"""Counter-based random numbers: a draw is a function of (seed, position, token), of nothing else.

So a seeded request draws the same tokens whatever else is in its batch, on CPU and GPU alike. 32-bit integer
arithmetic only, which every device does the same way; the finalizer is MurmurHash3's (Austin Appleby, public domain).
"""

from __future__ import annotations

import torch
from torch import Tensor

MASK32 = 0xFFFFFFFF
MASK64 = 0xFFFFFFFFFFFFFFFF


def row_key(seed: int, position: int) -> tuple[int, int]:
    """Mix a 64-bit seed and a position into two signed 32-bit keys, on the host (SplitMix64, Steele et al. 2014)."""
    z = (seed * 0x9E3779B97F4A7C15 + position * 0xD1B54A32D192ED03 + 0x8CB92BA72F3D8DD7) & MASK64
    z = ((z ^ (z >> 30)) * 0xBF58476D1CE4E5B9) & MASK64
    z = ((z ^ (z >> 27)) * 0x94D049BB133111EB) & MASK64
    z ^= z >> 31
    return _signed(z & MASK32), _signed(z >> 32)


def derive_seed(seed: int, index: int) -> int:
    """Seed of the `index`-th of several choices of one request; index 0 keeps the request's own."""
    if index == 0:
        return seed
    low, high = row_key(seed, -index)
    return ((high & 0x7FFFFFFF) << 32) | (low & MASK32)


def exponentials(keys: Tensor, tokens: Tensor) -> Tensor:
    """Unit exponential numbers, one per row and token.

    Args:
        keys: `[R, 2]` int32 from `row_key`.
        tokens: `[V]` or `[R, K]` int32 token ids.

    Returns:
        `[R, V]` or `[R, K]` float32, each above zero. `argmax(p / e)` draws from `p` (the exponential race).
    """
    h = _mix(tokens ^ keys[:, :1])
    h = _mix(h ^ keys[:, 1:])
    uniform = ((h >> 9 & 0x7FFFFF).to(torch.float32) + 0.5) * 2.0**-23
    return -torch.log(uniform)


def _mix(h: Tensor) -> Tensor:
    h = (h ^ (h >> 16 & 0xFFFF)) * -2048144789  # 0x85EBCA6B
    h = (h ^ (h >> 13 & 0x7FFFF)) * -1028477387  # 0xC2B2AE35
    return h ^ (h >> 16 & 0xFFFF)


def _signed(x: int) -> int:
    return x - (1 << 32) if x >= 1 << 31 else x
