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
from typing import NamedTuple

import torch
from torch import Tensor

from dovetail.sdk.quantization.forms import by_rows
from dovetail_backends.gguf.blocks import BY_NAME

LEVELS = (-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113)
"""What the nibbles of IQ4 stand for: closer to each other around zero, where most weights are."""


class BlockReader(NamedTuple):
    """How a type's numbers are read: `code * scale - least`.

    Attributes:
        codes: Makes `[B, numbers of a block]`, int8 or uint8, of blocks uint8 `[B, bytes of one]`.
        scale: Makes float32 `[B, groups of a block]` of them.
        least: Likewise; None: there is nothing to take off.
    """

    codes: Callable[[Tensor], Tensor]
    scale: Callable[[Tensor], Tensor]
    least: Callable[[Tensor], Tensor] | None = None


def numbers(kind: str, rows: Tensor, dtype: torch.dtype) -> Tensor:
    """Return the numbers `[…, K]` of rows of blocks uint8 `[…, bytes]`, computed in float32 and rounded once.

    Scales are few and made at once, codes some rows at a time.

    Args:
        kind: A key of `READERS`.
        rows: Of whole blocks.
        dtype: Of the result.
    """
    block, read = BY_NAME[kind], READERS[kind]
    flat = rows.reshape(-1, rows.shape[-1])
    blocks = flat.view(len(flat), -1, block.size)
    width = blocks.shape[1] * block.numbers

    def of_groups(make: Callable[[Tensor], Tensor]) -> Tensor:
        return make(blocks.view(-1, block.size)).reshape(len(flat), -1, 1)

    scale, least = of_groups(read.scale), None if read.least is None else of_groups(read.least)

    def make(part: slice) -> Tensor:
        codes = read.codes(blocks[part].view(-1, block.size))
        made = codes.float().view(-1, scale.shape[1], width // scale.shape[1]).mul_(scale[part])
        return (made if least is None else made.sub_(least[part])).view(-1, width)

    return by_rows(make, flat, width, dtype).view(*rows.shape[:-1], width)


def halves(data: Tensor, at: int, size: int) -> Tensor:
    """Return a float16 number of each block as float32 `[B, 1]`; `size` of them as `[B, size]`."""
    return data[:, at : at + 2 * size].contiguous().view(torch.float16).float()


def field(data: Tensor, at: int, num: int, to: int = 0) -> Tensor:
    """Return `num` bits of bytes, which begin at bit `at`, as bits from `to` on."""
    moved = data >> (at - to) if at > to else data << (to - at) if to > at else data
    return moved & (((1 << num) - 1) << to)


def nibbles(data: Tensor, size: int) -> Tensor:
    """Return the nibbles of bytes `[B, n]`, `size` lower ones before their upper ones: `[B, 2 n]`."""
    parts = data.view(len(data), -1, size)
    out = data.new_empty(len(data), parts.shape[1], 2, size)
    torch.bitwise_and(parts, 15, out=out[:, :, 0])
    torch.bitwise_right_shift(parts, 4, out=out[:, :, 1])
    return out.view(len(data), -1)


def pairs_of_bits(data: Tensor) -> Tensor:
    """Return the four numbers of 2 bits of each of bytes `[B, n]`, 32 lowest ones before the next: `[B, 4 n]`."""
    parts = data.view(len(data), -1, 32)
    out = data.new_empty(len(data), parts.shape[1], 4, 32)
    for index in range(4):
        out[:, :, index] = field(parts, 2 * index, 2)
    return out.view(len(data), -1)


def less(codes: Tensor, zero: int) -> Tensor:
    """Return uint8 codes, which are overwritten, less their zero point, as int8."""
    return codes.sub_(zero).view(torch.int8)


def with_fifth(codes: Tensor, data: Tensor) -> Tensor:
    """Return nibbles `[B, 32]` with the bits of four bytes above them, one after the other."""
    bits = torch.arange(256, dtype=torch.int32, device=data.device)[:, None] >> torch.arange(8, device=data.device)
    table = ((bits & 1) << 4).to(torch.uint8).view(torch.int64).flatten()  # eight bytes for eight bits
    found = table.index_select(0, data.flatten().to(torch.int32))
    return codes.bitwise_or_(found.view(torch.uint8).view(codes.shape))


def with_bits(codes: Tensor, data: Tensor, to: int) -> Tensor:
    """Return codes `[B, 256]` with a bit above them: bit `i` of 32 bytes for numbers `32 i` to `32 i + 31`."""
    parts = codes.view(-1, 8, 32)
    for index in range(8):
        parts[:, index].bitwise_or_(field(data, index, 1, to))
    return codes


def _q6_k(data: Tensor) -> Tensor:
    codes, high = nibbles(data[:, :128], 64), data[:, 128:192].view(-1, 2, 32)
    parts = codes.view(-1, 2, 4, 32)
    for index in range(4):
        parts[:, :, index].bitwise_or_(field(high, 2 * index, 2, 4))
    return less(codes, 32)


def _levels(data: Tensor) -> Tensor:
    """Return the numbers that the nibbles of bytes `[B, n]` stand for, 16 lower ones before their upper ones."""
    table, found = torch.tensor(LEVELS, dtype=torch.int8, device=data.device), nibbles(data, 16)
    return table.index_select(0, found.flatten().to(torch.int32)).view(found.shape)


def _scale(at: int) -> Callable[[Tensor], Tensor]:
    return lambda data: halves(data, at, 1)


def _scale_q3_k(data: Tensor) -> Tensor:
    packed = data[:, 96:108]
    high = torch.stack([field(packed[:, 8:], 2 * index, 2, 4) for index in range(4)], 1).flatten(1)
    return halves(data, 108, 1) * ((nibbles(packed[:, :8], 8) | high).float() - 32)


def _scale_k(data: Tensor) -> Tensor:
    """Return the scale of each 32 numbers of a Q4_K or Q5_K block, `[B, 8]`."""
    scale = torch.cat((data[:, 4:8] & 63, (data[:, 12:16] & 15) | field(data[:, 4:8], 6, 2, 4)), 1)
    return halves(data, 0, 1) * scale.float()


def _least_k(data: Tensor) -> Tensor:
    """Return what is taken off each 32 of them, `[B, 8]`."""
    least = torch.cat((data[:, 8:12] & 63, (data[:, 12:16] >> 4) | field(data[:, 8:12], 6, 2, 4)), 1)
    return halves(data, 2, 1) * least.float()


def _scale_iq4_xs(data: Tensor) -> Tensor:
    low = torch.stack((data[:, 4:8] & 15, data[:, 4:8] >> 4), -1).flatten(1)
    high = torch.stack([field(data[:, 2:4], 2 * index, 2, 4) for index in range(4)], -1).flatten(1)
    return halves(data, 0, 1) * ((low | high).float() - 32)


READERS = {
    "Q4_0": BlockReader(lambda data: less(nibbles(data[:, 2:], 16), 8), _scale(0)),
    "Q4_1": BlockReader(lambda data: nibbles(data[:, 4:], 16), _scale(0), lambda data: -halves(data, 2, 1)),
    "Q5_0": BlockReader(lambda data: less(with_fifth(nibbles(data[:, 6:], 16), data[:, 2:6]), 16), _scale(0)),
    "Q5_1": BlockReader(
        lambda data: with_fifth(nibbles(data[:, 8:], 16), data[:, 4:8]), _scale(0), lambda data: -halves(data, 2, 1)
    ),
    "Q8_0": BlockReader(lambda data: data[:, 2:].view(torch.int8), _scale(0)),
    "Q2_K": BlockReader(
        lambda data: pairs_of_bits(data[:, 16:80]),
        lambda data: halves(data, 80, 1) * (data[:, :16] & 15).float(),
        lambda data: halves(data, 82, 1) * (data[:, :16] >> 4).float(),
    ),
    "Q3_K": BlockReader(lambda data: less(with_bits(pairs_of_bits(data[:, 32:96]), data[:, :32], 2), 4), _scale_q3_k),
    "Q4_K": BlockReader(lambda data: nibbles(data[:, 16:], 32), _scale_k, _least_k),
    "Q5_K": BlockReader(lambda data: with_bits(nibbles(data[:, 48:], 32), data[:, 16:48], 4), _scale_k, _least_k),
    "Q6_K": BlockReader(
        _q6_k, lambda data: halves(data, 208, 1) * data[:, 192:208].contiguous().view(torch.int8).float()
    ),
    "IQ4_NL": BlockReader(lambda data: _levels(data[:, 2:]), _scale(0)),
    "IQ4_XS": BlockReader(lambda data: _levels(data[:, 8:]), _scale_iq4_xs),
}
