"""The products over packed matrices that torch has on CPU, behind one call each. T tokens, N outputs, K inputs.

A row's result does not depend on T. Sums are float32; scales are rounded to the model's dtype, as written-out weights
would be.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache

import torch
import torch.nn.functional as F
from torch import Tensor

from dovetail.sdk.quantization.words import exchange, nibbles_of, slices

Product = Callable[[Tensor], Tensor]
"""Maps `[T, K]` to `[T, N]`."""
GROUPS = (256, 128, 64, 32)
"""Inputs for which torch's int4 product has a scale."""
ROWS = 16
"""Its rows come in such blocks."""
BLOCK = 64
"""Rows that its layout mixes with each other, at most."""
VECTOR = 16
"""Inputs that torch's int8 product takes at a time in bfloat16: it reads beyond a row that is no multiple of them, and
computes with what stands there, or crashes. In float32 it has an end for such rows."""
PAD = 16
"""Words between rows that will be columns: apart by a power of two, they would have the same few places of a cache."""


def int8(weight: Tensor, scale: Tensor, dtype: torch.dtype) -> Product | None:
    """Return the product of `weight` `[N, K]` int8 and `scale` `[N, 1]`; None where torch has none.

    It keeps `weight` itself, no copy.
    """
    if weight.device.type != "cpu" or scale.shape[-1] != 1:
        return None
    scales = scale[:, 0].to(dtype)
    if dtype == torch.bfloat16 and weight.shape[1] % VECTOR:
        wide = scales.float()
        return lambda x: torch._weight_int8pack_mm(x.float().contiguous(), weight, wide).to(dtype)

    def product(x: Tensor) -> Tensor:
        return torch._weight_int8pack_mm(x.contiguous(), weight, scales)

    return product


def int4(words: Tensor, scale: Tensor, zero: Tensor | None, dtype: torch.dtype) -> Product | None:
    """Return the product of `(nibbles - zero) * scale`; None where torch has none. It keeps a packed copy.

    Args:
        words: `[N, K / 8]` int32, as `Int4` has them.
        scale: `[N, K / group]`.
        zero: `[N, K / group]` uint8; None: 8 everywhere.
        dtype: The model's.
    """
    num_out, num_in = words.shape[0], 8 * words.shape[1]
    width = num_in // scale.shape[-1]
    group = next((size for size in GROUPS if width % size == 0), None)
    if words.device.type != "cpu" or group is None:
        return None
    scales = scale.to(dtype).repeat_interleave(width // group, dim=-1)
    offsets = torch.zeros_like(scales)
    if zero is not None:
        offset = (8 - zero.float()) * scale.float()  # torch adds an offset where formats take off a zero point
        offsets = offset.to(dtype).repeat_interleave(width // group, dim=-1)
    both = F.pad(torch.stack((scales.T, offsets.T), -1), (0, 0, 0, -num_out % ROWS)).contiguous()
    packed = int4_blocks(words)

    def product(x: Tensor) -> Tensor:
        return torch._weight_int4pack_mm_for_cpu(x.contiguous(), packed, group, both)[:, :num_out]

    return product


@lru_cache(maxsize=1)
def pairs_of_rows() -> bool:
    """Whether torch's layout, which depends on the processor, puts rows `i` and `i + 32` of 64 into a byte.

    Then we make it, in a fifth of the time: torch wants 32 bits for each nibble, and packs them one by one.
    """
    rows = torch.randint(0, 16, (BLOCK, BLOCK), generator=torch.Generator().manual_seed(0), dtype=torch.int32)
    pairs = (rows[: BLOCK // 2] | (rows[BLOCK // 2 :] << 4)).to(torch.uint8)
    return torch.equal(torch._convert_weight_to_int4pack_for_cpu(rows, 1).flatten(), pairs.T.flatten())


def int4_blocks(words: Tensor) -> Tensor:
    """Return torch's layout of nibbles, of some blocks of rows at a time."""
    num_out, width = words.shape
    out = words.new_empty(num_out + -num_out % ROWS, 4 * width, dtype=torch.uint8)
    whole = num_out - num_out % BLOCK if pairs_of_rows() else 0
    for rows in slices(whole, width, words.device, BLOCK):
        _in_pairs(words[rows], out[rows])
    for part in slices(num_out - whole, 8 * width, words.device, BLOCK):
        rows = slice(whole + part.start, whole + part.stop)
        nibbles = nibbles_of(words[rows]).to(torch.int32)  # torch wants 32 bits for each
        padded = F.pad(nibbles, (0, 0, 0, -nibbles.shape[0] % ROWS)) if nibbles.shape[0] % ROWS else nibbles
        out[rows.start : rows.start + len(padded)] = torch._convert_weight_to_int4pack_for_cpu(padded, 1)
    return out


def _in_pairs(words: Tensor, out: Tensor) -> None:
    """Write blocks of 64 rows, of which each byte has rows `i` and `i + 32` of one input, input after input.

    First nibbles change places in the two words of such rows: one of them has inputs 0, 4, 1, 5 in its bytes then, the
    other one 2, 6, 3, 7. Then bytes do in the words of four neighbouring rows: each has four rows of one input.
    """
    blocks, width = words.shape[0] // BLOCK, words.shape[1]
    rows = words.view(blocks, 2, 8, 2, 2, width).permute(0, 4, 1, 3, 2, 5)  # lower bit, half, upper bit, fours
    turned = words.new_empty(blocks * BLOCK, width + PAD)[:, :width]
    each = turned.view(rows.shape).copy_(rows)
    exchange(each, 2, 4)
    exchange(each, 3, 16)
    exchange(each, 1, 8)
    out.view(torch.int32).view(blocks, width, BLOCK).copy_(turned.view(blocks, BLOCK, width).transpose(1, 2))
