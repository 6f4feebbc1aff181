"""Seeds on the host: keys of a draw, and seeds derived from one another. Does not import torch."""

from __future__ import annotations

MASK32 = 0xFFFFFFFF
MASK64 = 0xFFFFFFFFFFFFFFFF
SEED_FACTOR, POSITION_FACTOR, OFFSET = 0x9E3779B97F4A7C15, 0xD1B54A32D192ED03, 0x8CB92BA72F3D8DD7
MIX_A, MIX_B = 0xBF58476D1CE4E5B9, 0x94D049BB133111EB


def row_key(seed: int, position: int) -> tuple[int, int]:
    """Mix a 64-bit seed and a position into two signed 32-bit keys, on the host (SplitMix64, Steele et al. 2014)."""
    z = (seed * SEED_FACTOR + position * POSITION_FACTOR + OFFSET) & MASK64
    z = ((z ^ (z >> 30)) * MIX_A) & MASK64
    z = ((z ^ (z >> 27)) * MIX_B) & MASK64
    z ^= z >> 31
    return _signed(z & MASK32), _signed(z >> 32)


def derive_seed(seed: int, index: int) -> int:
    """Seed of the `index`-th of several choices of one request; index 0 keeps the request's own."""
    if index == 0:
        return seed
    low, high = row_key(seed, -index)
    return ((high & 0x7FFFFFFF) << 32) | (low & MASK32)


def signed64(x: int) -> int:
    """The lowest 64 bits of an integer, as a signed number."""
    x &= MASK64
    return x - (1 << 64) if x >= 1 << 63 else x


def _signed(x: int) -> int:
    return x - (1 << 32) if x >= 1 << 31 else x
