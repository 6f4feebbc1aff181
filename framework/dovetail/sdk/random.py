"""Counter-based random numbers: a draw is a function of (seed, position, token), of nothing else.

So a seeded request draws the same tokens whatever else is in its batch, on CPU and GPU alike. 32-bit integer
arithmetic only, which every device does the same way; the finalizer is MurmurHash3's (Austin Appleby, public domain).
"""

from __future__ import annotations

import torch
from torch import Tensor

from dovetail.contracts.seeds import MIX_A, MIX_B, OFFSET, POSITION_FACTOR, SEED_FACTOR, signed64


def exponentials(keys: Tensor, tokens: Tensor) -> Tensor:
    """Unit exponential numbers, one per row and token.

    Args:
        keys: `[R, 2]` int32 from `row_keys`.
        tokens: `[V]` or `[R, K]` int32 token ids.

    Returns:
        `[R, V]` or `[R, K]` float32, each above zero. `argmax(p / e)` draws from `p` (the exponential race).
    """
    h = _mix(tokens ^ keys[:, :1])
    h = _mix(h ^ keys[:, 1:])
    uniform = ((h >> 9 & 0x7FFFFF).to(torch.float32) + 0.5) * 2.0**-23
    return -torch.log(uniform)


def row_keys(seeds: Tensor, positions: Tensor) -> Tensor:
    """As `seeds.row_key`, of rows: `[R]` and `[R]` int64 to `[R, 2]` int32. 64-bit integers wrap around."""
    z = seeds * signed64(SEED_FACTOR) + positions * signed64(POSITION_FACTOR) + signed64(OFFSET)
    z = (z ^ (z >> 30 & (1 << 34) - 1)) * signed64(MIX_A)
    z = (z ^ (z >> 27 & (1 << 37) - 1)) * signed64(MIX_B)
    z = z ^ (z >> 31 & (1 << 33) - 1)
    return z.view(torch.int32).view(-1, 2)


def _mix(h: Tensor) -> Tensor:
    h = (h ^ (h >> 16 & 0xFFFF)) * -2048144789  # 0x85EBCA6B
    h = (h ^ (h >> 13 & 0x7FFFF)) * -1028477387  # 0xC2B2AE35
    return h ^ (h >> 16 & 0xFFFF)
