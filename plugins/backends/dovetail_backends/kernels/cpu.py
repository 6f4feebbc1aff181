"""Kernel set `cpu`: what a processor computes faster by other means than torch's."""

from __future__ import annotations

from typing import TYPE_CHECKING

from dovetail.contracts.kernels import Ask, Claim, Kernel, KernelSet

if TYPE_CHECKING:
    from torch import Tensor


class CpuKernels(KernelSet):
    """Masks by a table of NumPy's."""

    devices = frozenset({"cpu"})

    def serves(self, ask: Ask) -> Claim | str:
        """See `KernelSet.serves`."""
        if ask.device.kind != "cpu":
            return f"it runs on cpu, not on {ask.device.kind}"
        return Claim(ask.rows, row_independent=True) if ask.op == "mask_logits" else f"torch computes {ask.op} as well"

    def make(self, ask: Ask) -> Kernel:
        """See `KernelSet.make`."""
        return mask_logits_by_table()


def mask_logits_by_table() -> Kernel:
    """Return the operation `mask_logits`: it adds 0 or -inf by table, as branches on bits are often mispredicted."""
    import numpy as np

    by_byte = np.where(np.unpackbits(np.arange(256, dtype=np.uint8)[:, None], axis=1, bitorder="little"), 0.0, -np.inf)
    addends = by_byte.astype(np.float32)  # [256, 8]: what a byte of a mask adds to the logits of its eight tokens

    def mask_logits(logits: Tensor, mask: Tensor, rows: Tensor) -> None:
        lines = logits.numpy()
        added = np.empty((4 * mask.shape[1], 8), dtype=np.float32)
        with np.errstate(invalid="ignore"):  # infinity that is not allowed becomes NaN
            for row, words in zip(rows.tolist(), mask.numpy(), strict=True):
                np.take(addends, words.view(np.uint8), axis=0, out=added, mode="clip")  # without a mode it is buffered
                np.add(lines[row], added.reshape(-1)[: lines.shape[1]], out=lines[row])

    return mask_logits
