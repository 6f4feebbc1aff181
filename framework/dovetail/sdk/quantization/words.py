"""Words of eight numbers in 4 bits: made, taken apart, put in order, and turned, all eight at a time.

Nibbles change places by exchanges: in two words, or in two halves of one, fields of some bits swap. Three rounds turn
eight words of eight nibbles, and each round is six operations over whole words; to take nibbles apart and put them
together again would be one for each nibble. N outputs, K inputs.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from dovetail.contracts.device import is_on_host
from dovetail.sdk.quantization.scratch import SCRATCH

ORDER = (0, 2, 4, 6, 1, 3, 5, 7)
"""Which of eight inputs each nibble of an `Int4` word holds, from the lowest."""
NUM, LONE_NUM = 30_000, 131_072
"""Words at a time: below what torch has threads wait for each other for, or, where a thread computes alone, as many as
stay in a core's cache together with a copy."""
FIELDS = {4: 0x0F0F0F0F, 8: 0x00FF00FF, 16: 0x0000FFFF, 32: 0xFFFFFFFF}
"""The lower one of each two fields of so many bits."""


def words_of(nibbles: Tensor) -> Tensor:
    """Pack nibbles int8 or uint8 `[…, K]` into words int32 `[…, K / 8]`, in `ORDER`; eight at a time, as one number."""
    eight = nibbles.contiguous()
    eight = (eight if eight.storage_offset() % 8 == 0 else eight.clone()).view(torch.int64)
    pairs = eight | (eight >> 12)  # bytes 0, 1, 4, 5: inputs 0 and 2, 1 and 3, 4 and 6, 5 and 7
    low = (pairs & 0xFF) | ((pairs >> 24) & 0xFF00)
    return (low | ((pairs & 0xFF00) << 8) | ((pairs >> 16) & 0xFF000000)).to(torch.int32)


def nibbles_of(words: Tensor) -> Tensor:
    """Return the nibbles uint8 `[…, K]` of words int32 `[…, K / 8]` in `ORDER`."""
    wide = words.to(torch.int64)
    low = (wide & 0xFF) | ((wide & 0xFF00) << 24)
    pairs = low | ((wide >> 8) & 0xFF00) | ((wide & 0xFF000000) << 16)
    return ((pairs | (pairs << 12)) & 0x0F0F0F0F0F0F0F0F).view(torch.uint8)


def reordered(words: Tensor) -> Tensor:
    """Return words `[N, K / 8]` in `ORDER` of words that hold the first of eight in the lowest bits.

    Either axis may lie along the memory; of the result rows do.
    """
    out = SCRATCH.empty(words.shape, words.dtype, words.device)
    for rows in slices(len(words), words.shape[1], words.device):
        some = words[rows].clone()  # along the same axis
        swap(some, 4, 0x00F000F0)  # the middle two of each four nibbles
        swap(some, 8, 0x0000FF00)  # the middle two of four bytes
        out[rows] = some
    return out


def swap(words: Tensor, distance: int, lower: int) -> None:
    """Swap bits of each word with those some places above them, in place.

    Args:
        words: Integers of any width.
        distance: By how many bits the two are apart.
        lower: The lower ones.
    """
    spare = words >> distance
    spare.bitwise_xor_(words).bitwise_and_(lower)
    words.bitwise_xor_(spare).bitwise_xor_(spare.bitwise_left_shift_(distance))


def exchange(words: Tensor, axis: int, bits: int) -> None:
    """Swap fields of some bits in place: in pairs of words, the upper ones of the first with the lower of the second.

    Args:
        words: Of any shape.
        axis: Of two, along which the pairs are.
        bits: Of a field, a key of `FIELDS`.
    """
    first, second = words.unbind(axis)
    spare = first >> bits
    spare.bitwise_xor_(second).bitwise_and_(FIELDS[bits])
    second.bitwise_xor_(spare)
    first.bitwise_xor_(spare.bitwise_left_shift_(bits))


def slices(num: int, width: int, device: torch.device, unit: int = 1) -> Iterator[slice]:
    """Yield slices of `num` rows of `width` words each; on CPU each slice has the rows that are computed at a time.

    Args:
        num: Of all rows.
        width: Of a row.
        device: Of the words; elsewhere all rows are computed at once.
        unit: Rows that stay together. If each can be alone, they are an odd number, for where they are columns, too,
            what lies apart by a power of two has the same few places of a cache.
    """
    most = LONE_NUM if torch.get_num_threads() == 1 else NUM
    step = max(1, most // max(1, width * unit)) if is_on_host(device) else max(1, num)
    step = step | 1 if unit == 1 else step * unit
    for start in range(0, num, step):
        yield slice(start, min(start + step, num))
