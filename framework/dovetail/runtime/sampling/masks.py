"""`MaskBuffer`: memory for the masks of one step, filled by the engine while the device computes, applied in one call.

K constrained rows of the R that are sampled, V tokens, W = ceil(V / 32) words of int32.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from dovetail.runtime.device.upload import to_device
from dovetail.runtime.sampling.mask_ops import apply_mask


@dataclass(frozen=True, slots=True)
class TokenMask:
    """What `sample` needs.

    Attributes:
        words: `[K, W]` int32 on the device of the logits.
        rows: `[K]` int64, ascending.
    """

    words: Tensor
    rows: Tensor

    def apply(self, logits: Tensor) -> None:
        """Mask `logits` `[R, V]` float32 in place."""
        apply_mask(logits, self.words, self.rows)


class MaskBuffer:
    """Host memory for masks, pinned where the device is a GPU; it grows to the most rows seen.

    Attributes:
        sent: `[max_rows, W]` int32 on the device, where graphs read masks.
    """

    def __init__(self, num_words: int, device: torch.device, max_rows: int = 0) -> None:
        """`max_rows`: of a captured step."""
        self._device = device
        self._num_words = num_words
        self._words = self._allocate(8)
        self.sent = torch.zeros(max_rows, num_words, dtype=torch.int32, device=device)

    def lend(self, num: int) -> npt.NDArray[np.int32]:
        """Return memory for so many masks, `[num, W]`, to be filled before `masks_of` is called."""
        if num > self._words.shape[0]:
            self._words = self._allocate(2 * num)
        return self._words.numpy()[:num]

    def send(self, num: int) -> None:
        """Send the first masks of what was lent to where graphs read them."""
        self.sent[:num].copy_(self._words[:num], non_blocking=True)

    def mask_of(self, lines: npt.NDArray[np.int32]) -> TokenMask | None:
        """Send masks of a step, which stand in what was lent; None where nothing is masked.

        Args:
            lines: `[R]` the mask of each row, each the next one; below 0: the row may say anything.
        """
        rows = np.flatnonzero(lines >= 0)
        if not rows.size:
            return None
        first = int(lines[rows[0]])
        words = self._words[first : first + rows.size]
        if self._device.type != "cpu":
            words = words.to(self._device, non_blocking=True)
        return TokenMask(words, to_device(torch.from_numpy(rows), self._device))

    def warm_up(self, vocab_size: int) -> None:
        """Mask a made-up row of logits: where that is a kernel, it is compiled now."""
        mask = self.mask_of(np.zeros(1, dtype=np.int32))
        if mask is not None:
            mask.apply(torch.zeros(1, vocab_size, device=self._device))

    def _allocate(self, num_rows: int) -> Tensor:
        return torch.zeros(num_rows, self._num_words, dtype=torch.int32, pin_memory=self._device.type == "cuda")
