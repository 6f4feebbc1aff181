"""Applying token masks to logits: one call for all rows of a step.

R rows of logits, K masked rows, V tokens, W = ceil(V / 32) words of int32. The reference is plain torch and works on
any device; the CPU takes a path over NumPy's unpackbits, CUDA a Triton kernel.
"""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor


def apply_mask_reference(logits: Tensor, mask: Tensor, rows: Tensor) -> None:
    """Set the logits of tokens that are not allowed to -inf, in place.

    Args:
        logits: `[R, V]` float32.
        mask: `[K, W]` int32; bit `t % 32` of word `t // 32` is 1 where token `t` is allowed.
        rows: `[K]` int64; row `rows[k]` of the logits gets `mask[k]`.
    """
    shifts = torch.arange(32, dtype=torch.int32, device=mask.device)
    allowed = (mask[:, :, None] >> shifts & 1).flatten(1)[:, : logits.shape[1]].bool()
    logits[rows] = logits[rows].masked_fill(~allowed, float("-inf"))


def apply_mask_cpu(logits: Tensor, mask: Tensor, rows: Tensor) -> None:
    """As the reference, on the CPU: row by row, so that the bytes that bits become stay in the cache."""
    lines = logits.numpy()
    for row, words in zip(rows.tolist(), mask.numpy(), strict=True):
        banned = np.unpackbits(~words.view(np.uint8), count=logits.shape[1], bitorder="little")
        np.copyto(lines[row], -np.inf, where=banned.view(np.bool_))


def apply_mask(logits: Tensor, mask: Tensor, rows: Tensor) -> None:
    """As the reference, by the fastest way there is for the device. `rows` is ascending without repeats."""
    if logits.device.type == "cpu":
        apply_mask_cpu(logits, mask, rows)
    elif logits.device.type == "cuda":
        from dovetail.grammar.mask_triton import apply_mask_triton  # needs Triton, which a CPU install may lack

        apply_mask_triton(logits, mask, rows)
    else:
        apply_mask_reference(logits, mask, rows)
