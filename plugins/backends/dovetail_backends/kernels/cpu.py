"""Kernel set `cpu`: what a processor computes faster by other means than torch's."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from dovetail.contracts.kernels import Ask, Claim, Kernel, KernelSet, meaning, parts_of

if TYPE_CHECKING:
    from torch import Tensor


class CpuKernels(KernelSet):
    """Masks by a table of NumPy's, oneDNN's products in bfloat16, and torch's over int8 and int4."""

    devices = frozenset({"cpu"})

    def serves(self, ask: Ask) -> Claim | str:
        """See `KernelSet.serves`."""
        if ask.device.kind != "cpu":
            return f"it runs on cpu, not on {ask.device.kind}"
        if ask.op == "packed_linear" and ask.option("form") is None:
            is_wide = ask.dtype != "bfloat16"
            return f"torch computes {ask.dtype} as well" if is_wide else Claim(ask.rows, row_independent=ask.invariant)
        if ask.op == "packed_linear":
            return self._packed(ask, [(ask.option("form"), ask.dim("K"))])
        if ask.op == "packed_experts":
            return self._packed(ask, list(zip(ask.option("forms"), (ask.dim("H"), ask.dim("I")), strict=True)))
        return Claim(ask.rows, row_independent=True) if ask.op == "mask_logits" else f"torch computes {ask.op} as well"

    @staticmethod
    def _packed(ask: Ask, matrices: Sequence[tuple[Any, int]]) -> Claim | str:
        from dovetail_backends.kernels.cpu_products import fits  # imports torch, as who has a form did

        if any(found := [fits(form, num_in) for form, num_in in matrices]):
            return Claim(ask.rows, row_independent=ask.invariant or all(found))  # others are multiplied in blocks then
        return f"torch has no product for {', '.join(str(form) for form, _ in matrices)}"

    def keeps_packed(self, ask: Ask) -> bool:
        """See `KernelSet.keeps_packed`: integers, also those in groups that torch has no product for."""
        import torch

        from dovetail.sdk.quantization.forms import Int4, Scaled

        form = ask.option("form")
        return isinstance(form, Int4) or (isinstance(form, Scaled) and form.dtype == torch.int8)

    def make(self, ask: Ask) -> Kernel:
        """See `KernelSet.make`."""
        if ask.op == "mask_logits":
            return mask_logits_by_table()
        import torch

        from dovetail_backends.kernels import cpu_linear, cpu_products

        if dict(ask.options).get("form", "") is None:
            made: Kernel = cpu_linear.make(ask)
            return made

        dtype = getattr(torch, ask.dtype)
        if ask.op == "packed_linear":
            return cpu_products.CpuPacked(ask.option("form"), dtype)
        widths = {"gate_up": ask.dim("H"), "down": ask.dim("I")}
        return cpu_products.CpuPackedExperts(meaning(*parts_of(ask)), widths, dtype, ask.invariant, **dict(ask.options))


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
