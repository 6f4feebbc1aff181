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

from dovetail.layers.packed_forms import chunk, nibbles_of

Product = Callable[[Tensor], Tensor]
"""Maps `[T, K]` to `[T, N]`."""
GROUPS = (256, 128, 64, 32)
"""Inputs for which torch's int4 product has a scale."""
ROWS = 16
"""Its rows come in such blocks."""
BLOCK = 64
"""Rows that its layout mixes with each other, at most."""


def int8(weight: Tensor, scale: Tensor, dtype: torch.dtype) -> Product | None:
    """Return the product of `weight` `[N, K]` int8 and `scale` `[N, 1]`; None where torch has none.

    It keeps `weight` itself, no copy.
    """
    if weight.device.type != "cpu" or scale.shape[-1] != 1:
        return None
    scales = scale[:, 0].to(dtype)

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

    Then we make it in half of the time: torch wants 32 bits for each nibble, and packs them one by one.
    """
    rows = torch.randint(0, 16, (BLOCK, BLOCK), generator=torch.Generator().manual_seed(0), dtype=torch.int32)
    pairs = (rows[: BLOCK // 2] | (rows[BLOCK // 2 :] << 4)).to(torch.uint8)
    return torch.equal(torch._convert_weight_to_int4pack_for_cpu(rows, 1).flatten(), pairs.T.flatten())


def int4_blocks(words: Tensor) -> Tensor:
    """Return torch's layout of nibbles, of some blocks of rows at a time: it wants 32 bits for each."""
    num_out, num_in = words.shape[0], 8 * words.shape[1]
    out = words.new_empty(num_out + -num_out % ROWS, num_in // 2, dtype=torch.uint8)
    step = BLOCK * max(1, chunk() // (BLOCK * num_in))
    whole = num_out - num_out % BLOCK if pairs_of_rows() else 0
    for start in range(0, whole, step):
        nibbles = nibbles_of(words[start : min(start + step, whole)]).view(-1, 2, BLOCK // 2, num_in)
        pairs = nibbles[:, 0] | (nibbles[:, 1] << 4)
        out[start : min(start + step, whole)] = pairs.transpose(1, 2).reshape(-1, num_in // 2)
    for start in range(whole, num_out, step):
        nibbles = nibbles_of(words[start : start + step]).to(torch.int32)
        padded = F.pad(nibbles, (0, 0, 0, -nibbles.shape[0] % ROWS)) if nibbles.shape[0] % ROWS else nibbles
        out[start : start + step] = torch._convert_weight_to_int4pack_for_cpu(padded, 1)
    return out
