"""Counter-based random numbers: a draw is a function of (seed, position, token), of nothing else.

So a seeded request draws the same tokens whatever else is in its batch, on CPU and GPU alike. 32-bit integer
arithmetic only, which every device does the same way; the finalizer is MurmurHash3's (Austin Appleby, public domain).
"""

from __future__ import annotations

import torch
from torch import Tensor


def exponentials(keys: Tensor, tokens: Tensor) -> Tensor:
    """Unit exponential numbers, one per row and token.

    Args:
        keys: `[R, 2]` int32 from `seeds.row_key`.
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
