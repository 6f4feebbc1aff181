"""Applying token masks to logits: one call for all rows of a step.

R rows of logits, K masked rows, V tokens, W = ceil(V / 32) words of int32. The reference is plain torch and works on
any device; the CPU takes a table of NumPy's, CUDA a Triton kernel.
"""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor


def apply_mask_reference(logits: Tensor, mask: Tensor, rows: Tensor) -> None:
    """Add -inf to the logits of tokens that are not allowed, in place.

    So NaN stays NaN and infinity becomes NaN, for the sampler to find: a model whose output is not finite is at fault
    also where nobody wants the token.

    Args:
        logits: `[R, V]` float32.
        mask: `[K, W]` int32; bit `t % 32` of word `t // 32` is 1 where token `t` is allowed.
        rows: `[K]` int64; row `rows[k]` of the logits gets `mask[k]`.
    """
    shifts = torch.arange(32, dtype=torch.int32, device=mask.device)
    allowed = (mask[:, :, None] >> shifts & 1).flatten(1)[:, : logits.shape[1]].bool()
    logits[rows] = torch.where(allowed, logits[rows], logits[rows] + float("-inf"))


_BYTES = np.where(np.unpackbits(np.arange(256, dtype=np.uint8)[:, None], axis=1, bitorder="little"), 0.0, -np.inf)
_ADDENDS = _BYTES.astype(np.float32)
"""`[256, 8]`: what each byte of a mask adds to the logits of its eight tokens."""


def apply_mask_cpu(logits: Tensor, mask: Tensor, rows: Tensor) -> None:
    """As the reference, on the CPU: adds 0 or -inf by table, as branches on single bits are often mispredicted."""
    lines = logits.numpy()
    added = np.empty((4 * mask.shape[1], 8), dtype=np.float32)
    with np.errstate(invalid="ignore"):  # infinity that is not allowed becomes NaN
        for row, words in zip(rows.tolist(), mask.numpy(), strict=True):
            np.take(_ADDENDS, words.view(np.uint8), axis=0, out=added, mode="clip")  # without a mode it is buffered
            np.add(lines[row], added.reshape(-1)[: lines.shape[1]], out=lines[row])


def apply_mask(logits: Tensor, mask: Tensor, rows: Tensor) -> None:
    """As the reference, by the fastest way there is for the device. `rows` is ascending without repeats."""
    if logits.device.type == "cpu":
        apply_mask_cpu(logits, mask, rows)
    elif logits.device.type == "cuda":
        from dovetail.runtime.sampling.mask_triton import (
            apply_mask_triton,  # needs Triton, which a CPU install may lack
        )

        apply_mask_triton(logits, mask, rows)
    else:
        apply_mask_reference(logits, mask, rows)
