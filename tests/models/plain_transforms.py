"""What packed tensors stand for, bit by bit and number by number: what the transforms of the loader must equal.

B blocks of GGUF; the layouts are those that `gguf_blocks` and the quantisations name.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

LEVELS = (-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113)


def unpacked(words: Tensor, bits: int, dim: int, places: Sequence[int] | None = None) -> Tensor:
    """Return the integers of words along an axis; place i of a word holds the one of index `places[i]`."""
    num = 32 // bits
    apart = [(words.long() >> (bits * place)) & ((1 << bits) - 1) for place in range(num)]
    order = places or range(num)
    return torch.stack([apart[list(order).index(index)] for index in range(num)], dim + 1).flatten(dim, dim + 1)


def numbers(values: Tensor, zeros: Tensor, scale: Tensor, groups: Tensor, dtype: torch.dtype) -> Tensor:
    """Return `(values - zeros) * scale` `[N, K]`, in float32 and rounded once, by the group of each input."""
    return ((values.float() - zeros.float()[:, groups]) * scale.float()[:, groups]).to(dtype)


def of_table(packed: Tensor, table: Tensor, scale: Tensor, group: int, dtype: torch.dtype, *, high: bool) -> Tensor:
    """Return the numbers of nibbles `[N, K / 2]`, the higher or the lower ones first, times their group's scale."""
    low, upper = packed & 15, packed >> 4
    nibbles = torch.stack((upper, low) if high else (low, upper), -1).flatten(-2).long()
    return (table[nibbles] * scale.repeat_interleave(group, -1)[..., : nibbles.shape[-1]]).to(dtype)


def halves(data: Tensor, at: int) -> Tensor:
    """Return a float16 number of each block as float32 `[B, 1]`."""
    return data[:, at : at + 2].contiguous().view(torch.float16).float()


def shifted(data: Tensor, *shifts: int) -> Tensor:
    """Return bytes `[B, …, n]` shifted right by each number, one result after the other."""
    return data.unsqueeze(-2) >> torch.tensor(shifts, dtype=torch.uint8)[:, None]


def nibbles_of(data: Tensor, size: int) -> Tensor:
    """Return nibbles of bytes `[B, n]`, `size` lower ones before their upper ones."""
    return (shifted(data.reshape(data.shape[0], -1, size), 0, 4) & 15).flatten(1)


def bits_of(data: Tensor) -> Tensor:
    """Return bits of bytes `[B, n]`, those of a byte side by side, the lowest first."""
    return ((data.unsqueeze(-1) >> torch.arange(8, dtype=torch.uint8)) & 1).flatten(1)


def fours(data: Tensor) -> Tensor:
    """Return the numbers of two bits of bytes `[B, n]`, 32 lowest ones before the next."""
    return (shifted(data.reshape(len(data), -1, 32), 0, 2, 4, 6) & 3).flatten(1)


def _q3_k(data: Tensor) -> Tensor:
    high = (shifted(data[:, None, :32], *range(8)) & 1).flatten(1)
    packed = data[:, 96:108]
    scales = nibbles_of(packed[:, :8], 8) | ((shifted(packed[:, None, 8:], 0, 2, 4, 6) & 3).flatten(1) << 4)
    scale = halves(data, 108) * (scales.float() - 32)
    number = fours(data[:, 32:96]).float() + 4 * high.float() - 4
    return (scale.unsqueeze(-1) * number.view(-1, 16, 16)).flatten(1)


def _scales_and_mins(data: Tensor) -> tuple[Tensor, Tensor]:
    first, second, both = data[:, 4:8], data[:, 8:12], data[:, 12:16]
    scale = torch.cat((first & 63, (both & 15) | ((first >> 2) & 48)), 1)
    least = torch.cat((second & 63, (both >> 4) | ((second >> 2) & 48)), 1)
    return halves(data, 0) * scale.float(), halves(data, 2) * least.float()


def _q4_k(data: Tensor) -> Tensor:
    scale, least = _scales_and_mins(data)
    number = nibbles_of(data[:, 16:], 32).view(-1, 8, 32).float()
    return (scale.unsqueeze(-1) * number - least.unsqueeze(-1)).flatten(1)


def _q5_k(data: Tensor) -> Tensor:
    scale, least = _scales_and_mins(data)
    high = (shifted(data[:, None, 16:48], *range(8)) & 1).flatten(1)
    number = (nibbles_of(data[:, 48:], 32) | (high << 4)).view(-1, 8, 32).float()
    return (scale.unsqueeze(-1) * number - least.unsqueeze(-1)).flatten(1)


def _q6_k(data: Tensor) -> Tensor:
    low, high = nibbles_of(data[:, :128], 64), fours(data[:, 128:192])
    scale = halves(data, 208) * data[:, 192:208].contiguous().view(torch.int8).float()
    return (scale.unsqueeze(-1) * ((low | (high << 4)).float() - 32).view(-1, 16, 16)).flatten(1)


def _q2_k(data: Tensor) -> Tensor:
    scale = halves(data, 80) * (data[:, :16] & 15).float()
    least = halves(data, 82) * (data[:, :16] >> 4).float()
    return (scale.unsqueeze(-1) * fours(data[:, 16:80]).view(-1, 16, 16).float() - least.unsqueeze(-1)).flatten(1)


def _iq4_xs(data: Tensor) -> Tensor:
    low = (shifted(data[:, 4:8].unsqueeze(-1), 0, 4) & 15).flatten(1)
    high = (shifted(data[:, 2:4].unsqueeze(-1), 0, 2, 4, 6) & 3).flatten(1)
    scale = halves(data, 0) * ((low | (high << 4)).float() - 32)
    return (scale.unsqueeze(-1) * levels(data[:, 8:]).view(-1, 8, 32)).flatten(1)


def levels(data: Tensor) -> Tensor:
    """Return what nibbles of IQ4 stand for."""
    return torch.tensor(LEVELS, dtype=torch.float32)[nibbles_of(data, 16).long()]


BLOCKS: dict[str, Callable[[Tensor], Tensor]] = {
    "Q4_0": lambda data: halves(data, 0) * (nibbles_of(data[:, 2:], 16).float() - 8),
    "Q4_1": lambda data: halves(data, 0) * nibbles_of(data[:, 4:], 16).float() + halves(data, 2),
    "Q5_0": lambda data: halves(data, 0) * ((nibbles_of(data[:, 6:], 16) | (bits_of(data[:, 2:6]) << 4)).float() - 16),
    "Q5_1": lambda data: (
        halves(data, 0) * (nibbles_of(data[:, 8:], 16) | (bits_of(data[:, 4:8]) << 4)).float() + halves(data, 2)
    ),
    "Q8_0": lambda data: halves(data, 0) * data[:, 2:].view(torch.int8).float(),
    "Q2_K": _q2_k,
    "Q3_K": _q3_k,
    "Q4_K": _q4_k,
    "Q5_K": _q5_k,
    "Q6_K": _q6_k,
    "IQ4_NL": lambda data: halves(data, 0) * levels(data[:, 2:]),
    "IQ4_XS": _iq4_xs,
}
"""Make float32 numbers of blocks uint8 `[B, bytes of one]`."""
