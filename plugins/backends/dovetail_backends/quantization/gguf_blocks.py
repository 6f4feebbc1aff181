"""What the blocks of GGUF tensors stand for, in plain torch. B blocks.

A block begins with its scale `d` in float16 but for the K types, whose super-blocks of 256 numbers have scales of their
own for 16 or 32 of them, in units of one float16. Nibbles stand in halves: the lower ones of 16 (32) bytes are numbers
0 to 15 (31), the upper ones those behind them.

| type | bytes of a block | the number |
|---|---|---|
| Q4_0 | d, 16 x two nibbles | `d (q - 8)` |
| Q4_1 | d, m, 16 x two nibbles | `d q + m` |
| Q5_0 | d, 32 fifth bits, 16 x two nibbles | `d (q - 16)` |
| Q5_1 | d, m, 32 fifth bits, 16 x two nibbles | `d q + m` |
| Q8_0 | d, 32 x int8 | `d q` |
| Q2_K | 16 x (scale, min in 4 bits), 64 x four of 2 bits, d, dmin | `d s q - dmin m` |
| Q3_K | 32 x eight third bits, 64 x four of 2 bits, 12 bytes of 6-bit scales, d | `d (s - 32) (q - 4)` |
| Q4_K | d, dmin, 12 bytes of 6-bit scales and mins, 128 x two nibbles | `d s q - dmin m` |
| Q5_K | d, dmin, 12 bytes as above, 32 x eight fifth bits, 128 x two nibbles | `d s q - dmin m` |
| Q6_K | 128 x two nibbles, 64 x four of 2 upper bits, 16 x int8 scale, d | `d s (q - 32)` |
| IQ4_NL | d, 16 x two nibbles | `d LEVELS[q]` |
| IQ4_XS | d, 8 x two upper bits, 4 x two nibbles of 6-bit scales, 128 x two nibbles | `d (s - 32) LEVELS[q]` |

Source: ggml's `ggml-common.h` and `ggml-quants.c`, read November 2026.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor

from dovetail.gguf.blocks import BY_NAME
from dovetail.layers.packed_forms import by_rows

LEVELS = (-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113)
"""What the nibbles of IQ4 stand for: closer to each other around zero, where most weights are."""


def numbers(kind: str, rows: Tensor, dtype: torch.dtype) -> Tensor:
    """Return the numbers `[…, K]` of rows of blocks uint8 `[…, bytes]`, computed in float32 and rounded once.

    Args:
        kind: A key of `READERS`.
        rows: Of whole blocks.
        dtype: Of the result.
    """
    block, read = BY_NAME[kind], READERS[kind]
    flat = rows.reshape(-1, rows.shape[-1])
    width = rows.shape[-1] // block.size * block.numbers

    def make(part: slice) -> Tensor:
        return read(flat[part].reshape(-1, block.size)).view(-1, width)

    return by_rows(make, flat, width, dtype).view(*rows.shape[:-1], width)


def halves(data: Tensor, at: int, size: int) -> Tensor:
    """Return a float16 number of each block as float32 `[B, 1]`; `size` of them as `[B, size]`."""
    return data[:, at : at + 2 * size].contiguous().view(torch.float16).float()


def shifted(data: Tensor, *shifts: int) -> Tensor:
    """Return bytes `[B, …, n]` shifted right by each number, one result after the other: `[B, …, shifts, n]`."""
    return data.unsqueeze(-2) >> torch.tensor(shifts, dtype=torch.uint8, device=data.device)[:, None]


def nibbles(data: Tensor, size: int) -> Tensor:
    """Return the nibbles of bytes `[B, n]`, `size` lower ones before their upper ones: `[B, 2 n]`."""
    return (shifted(data.reshape(data.shape[0], -1, size), 0, 4) & 15).flatten(1)


def bits(data: Tensor) -> Tensor:
    """Return bits of bytes `[B, n]`, those of a byte side by side, the lowest first: `[B, 8 n]`."""
    return ((data.unsqueeze(-1) >> torch.arange(8, dtype=torch.uint8, device=data.device)) & 1).flatten(1)


def _q4_0(data: Tensor) -> Tensor:
    return halves(data, 0, 1) * (nibbles(data[:, 2:], 16).float() - 8)


def _q4_1(data: Tensor) -> Tensor:
    return halves(data, 0, 1) * nibbles(data[:, 4:], 16).float() + halves(data, 2, 1)


def _q5_0(data: Tensor) -> Tensor:
    return halves(data, 0, 1) * ((nibbles(data[:, 6:], 16) | (bits(data[:, 2:6]) << 4)).float() - 16)


def _q5_1(data: Tensor) -> Tensor:
    number = nibbles(data[:, 8:], 16) | (bits(data[:, 4:8]) << 4)
    return halves(data, 0, 1) * number.float() + halves(data, 2, 1)


def _q8_0(data: Tensor) -> Tensor:
    return halves(data, 0, 1) * data[:, 2:].view(torch.int8).float()


def _q2_k(data: Tensor) -> Tensor:
    number = (shifted(data[:, 16:80].reshape(-1, 2, 32), 0, 2, 4, 6) & 3).flatten(1).view(-1, 16, 16)
    scale = halves(data, 80, 1) * (data[:, :16] & 15).float()
    least = halves(data, 82, 1) * (data[:, :16] >> 4).float()
    return (scale.unsqueeze(-1) * number.float() - least.unsqueeze(-1)).flatten(1)


def _q3_k(data: Tensor) -> Tensor:
    low = (shifted(data[:, 32:96].reshape(-1, 2, 32), 0, 2, 4, 6) & 3).flatten(1)
    high = (shifted(data[:, None, :32], *range(8)) & 1).flatten(1)
    packed = data[:, 96:108]
    scales = nibbles(packed[:, :8], 8) | ((shifted(packed[:, None, 8:], 0, 2, 4, 6) & 3).flatten(1) << 4)
    scale = halves(data, 108, 1) * (scales.float() - 32)
    number = low.float() + 4 * high.float() - 4
    return (scale.unsqueeze(-1) * number.view(-1, 16, 16)).flatten(1)


def _scales_and_mins(data: Tensor) -> tuple[Tensor, Tensor]:
    """Return scale and min of each 32 numbers of a Q4_K or Q5_K block, `[B, 8]`, in float32."""
    first, second, both = data[:, 4:8], data[:, 8:12], data[:, 12:16]
    scale = torch.cat((first & 63, (both & 15) | ((first >> 2) & 48)), 1)
    least = torch.cat((second & 63, (both >> 4) | ((second >> 2) & 48)), 1)
    return halves(data, 0, 1) * scale.float(), halves(data, 2, 1) * least.float()


def _q4_k(data: Tensor) -> Tensor:
    scale, least = _scales_and_mins(data)
    number = nibbles(data[:, 16:], 32).view(-1, 8, 32).float()
    return (scale.unsqueeze(-1) * number - least.unsqueeze(-1)).flatten(1)


def _q5_k(data: Tensor) -> Tensor:
    scale, least = _scales_and_mins(data)
    high = (shifted(data[:, None, 16:48], *range(8)) & 1).flatten(1)
    number = (nibbles(data[:, 48:], 32) | (high << 4)).view(-1, 8, 32).float()
    return (scale.unsqueeze(-1) * number - least.unsqueeze(-1)).flatten(1)


def _q6_k(data: Tensor) -> Tensor:
    low = (shifted(data[:, :128].reshape(-1, 2, 64), 0, 4) & 15).flatten(1)
    high = (shifted(data[:, 128:192].reshape(-1, 2, 32), 0, 2, 4, 6) & 3).flatten(1)
    scale = halves(data, 208, 1) * data[:, 192:208].contiguous().view(torch.int8).float()
    number = (low | (high << 4)).float() - 32
    return (scale.unsqueeze(-1) * number.view(-1, 16, 16)).flatten(1)


def _levels(data: Tensor) -> Tensor:
    """Return the numbers that the nibbles of bytes `[B, n]` stand for, 16 lower ones before their upper ones."""
    table = torch.tensor(LEVELS, dtype=torch.float32, device=data.device)
    return F.embedding(nibbles(data, 16).int(), table[:, None]).squeeze(-1)


def _iq4_nl(data: Tensor) -> Tensor:
    return halves(data, 0, 1) * _levels(data[:, 2:])


def _iq4_xs(data: Tensor) -> Tensor:
    low = (shifted(data[:, 4:8].unsqueeze(-1), 0, 4) & 15).flatten(1)
    high = (shifted(data[:, 2:4].unsqueeze(-1), 0, 2, 4, 6) & 3).flatten(1)
    scale = halves(data, 0, 1) * ((low | (high << 4)).float() - 32)
    return (scale.unsqueeze(-1) * _levels(data[:, 8:]).view(-1, 8, 32)).flatten(1)


READERS: dict[str, Callable[[Tensor], Tensor]] = {
    **{"Q4_0": _q4_0, "Q4_1": _q4_1, "Q5_0": _q5_0, "Q5_1": _q5_1, "Q8_0": _q8_0},
    **{"Q2_K": _q2_k, "Q3_K": _q3_k, "Q4_K": _q4_k, "Q5_K": _q5_k, "Q6_K": _q6_k},
    **{"IQ4_NL": _iq4_nl, "IQ4_XS": _iq4_xs},
}
"""Make float32 numbers `[B, numbers of a block]` of blocks uint8 `[B, bytes of one]`."""
