"""`MaskBuffer`: memory for the masks of one step, filled by the engine while the device computes, applied in one call.

K constrained rows of the R that are sampled, V tokens, W = ceil(V / 32) words of int32.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from dovetail.contracts.device import is_on_host
from dovetail.contracts.kernels import Kernel
from dovetail.runtime.device.upload import pinned, to_device
from dovetail.runtime.step_kernels import PLAIN_STEP


@dataclass(frozen=True, slots=True)
class TokenMask:
    """What `sample` needs.

    Attributes:
        words: `[K, W]` int32 on the device of the logits.
        rows: `[K]` int64, ascending.
        kernel: Of the operation `mask_logits`.
    """

    words: Tensor
    rows: Tensor
    kernel: Kernel = PLAIN_STEP.mask_logits

    def apply(self, logits: Tensor) -> None:
        """Mask `logits` `[R, V]` float32 in place."""
        self.kernel(logits, self.words, self.rows)


MAX_KEPT_BYTES = 16 << 20
"""Of masks that stay on the device: 883 of a vocabulary of 152,000 tokens."""


def num_kept(num_words: int) -> int:
    """Return how many masks a device keeps."""
    return MAX_KEPT_BYTES // (4 * max(1, num_words))


class MaskBuffer:
    """Host memory for masks, pinned where the device is a GPU; it grows to the most rows seen. And those kept there.

    Attributes:
        sent: `[max_rows + num_kept, W]` int32 on the device, where graphs read masks: a step's, then those kept.
        num_kept: Slots of masks that stay.
    """

    def __init__(
        self,
        num_words: int,
        device: torch.device,
        max_rows: int = 0,
        num_kept: int = 0,
        kernel: Kernel = PLAIN_STEP.mask_logits,
    ) -> None:
        """`max_rows`: of a captured step; `kernel` applies masks."""
        self._kernel = kernel
        self.num_kept, self._max_rows = num_kept, max_rows
        self._device = device
        self._num_words = num_words
        self._words = self._allocate(8)
        self.sent = torch.zeros(max_rows + num_kept, num_words, dtype=torch.int32, device=device)

    def lend(self, num: int) -> npt.NDArray[np.int32]:
        """Return memory for so many masks, `[num, W]`, to be filled before `masks_of` is called."""
        if num > self._words.shape[0]:
            self._words = self._allocate(2 * num)
        return self._words.numpy()[:num]

    def send(self, num: int) -> None:
        """Send the first masks of what was lent to where graphs read them."""
        self.sent[:num].copy_(self._words[:num], non_blocking=True)

    def keep(self, pairs: npt.NDArray[np.int32]) -> None:
        """Copy masks of what was lent to slots, `[N, 2]`, for what is sent to the device from now on."""
        for line, slot in pairs.tolist():
            self.sent[self._max_rows + slot].copy_(self._words[line], non_blocking=True)

    def lines_of(self, mask_of: npt.NDArray[np.int32]) -> npt.NDArray[np.int32]:
        """Return where in `sent` the masks of rows stand, as `StepLate` names them; -1 stays."""
        return np.where(mask_of < -1, self._max_rows - 2 - mask_of, mask_of)

    def mask_of(self, lines: npt.NDArray[np.int32]) -> TokenMask | None:
        """Send masks of a step, which stand in what was lent; None where nothing is masked.

        Args:
            lines: `[R]` the mask of each row, as `StepLate` has it: of those that were lent, each is the next one.
        """
        rows = np.flatnonzero(lines != -1)
        if not rows.size:
            return None
        lent = lines[lines >= 0]
        first = int(lent[0]) if lent.size else 0
        words = self._words[first : first + lent.size]
        if not is_on_host(self._device):
            words = words.to(self._device, non_blocking=True)
        if lent.size < rows.size:
            words = self._among_kept(words, lines[rows])
        return TokenMask(words, to_device(torch.from_numpy(rows), self._device), self._kernel)

    def _among_kept(self, lent: Tensor, lines: npt.NDArray[np.int32]) -> Tensor:
        """Return the masks `[K, W]` of rows of which some are lent, in their order, and others kept."""
        is_kept, device = lines < 0, self._device
        slots = to_device(torch.from_numpy(self.lines_of(lines[is_kept]).astype(np.int64)), device)
        order = np.argsort(np.concatenate((np.flatnonzero(~is_kept), np.flatnonzero(is_kept))))
        return torch.cat((lent, self.sent[slots]))[to_device(torch.from_numpy(order), device)]

    def warm_up(self, vocab_size: int) -> None:
        """Mask a made-up row of logits: where that is a kernel, it is compiled now."""
        mask = self.mask_of(np.zeros(1, dtype=np.int32))
        if mask is not None:
            mask.apply(torch.zeros(1, vocab_size, device=self._device))

    def _allocate(self, num_rows: int) -> Tensor:
        return pinned(torch.zeros(num_rows, self._num_words, dtype=torch.int32), self._device)
