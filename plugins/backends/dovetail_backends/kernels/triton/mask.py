"""The operation `mask_logits` as a kernel.

R rows of logits, K masked rows, V tokens, W = ceil(V / 32) words of int32.
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

BLOCK = 4096


@triton.jit
def _apply_mask(logits, mask, rows, num_tokens, logits_stride, mask_stride, BLOCK: tl.constexpr):
    """Add -inf where a token's bit is 0. Allowed logits are left alone."""
    k = tl.program_id(0).to(tl.int64)
    tokens = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = tokens < num_tokens
    words = tl.load(mask + k * mask_stride + tokens // 32, mask=inside, other=0)
    banned = ((words >> (tokens % 32)) & 1) == 0
    row = tl.load(rows + k)
    at = logits + row * logits_stride + tokens
    values = tl.load(at, mask=inside & banned, other=0.0)
    tl.store(at, values + float("-inf"), mask=inside & banned)


def mask_logits(logits: Tensor, mask: Tensor, rows: Tensor) -> None:
    """See `dovetail.sdk.step.mask_logits`."""
    num_tokens = logits.shape[1]
    grid = (rows.shape[0], triton.cdiv(num_tokens, BLOCK))
    _apply_mask[grid](logits, mask, rows, num_tokens, logits.stride(0), mask.stride(0), BLOCK=BLOCK, num_warps=8)
