"""Sorted-draw: a kernel set for Dovetail that draws from rows sorted as a whole, without reading anything on the host.

T rows, V vocabulary size.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from dovetail.contracts import Ask, Claim, KernelSet
from dovetail.contracts.kernels import Kernel

if TYPE_CHECKING:
    import torch
    from torch import Tensor

MAX_VOCAB = 262_144
TOP_P, TOP_K = 0.9, 50
"""Filters of the requests that `auto` times draws by."""


class SortedDraw(KernelSet):
    """Serves `draw`."""

    devices = frozenset({"cpu", "cuda"})

    def serves(self, ask: Ask) -> Claim | str:
        """Draws from vocabularies up to a size, of which a row is sorted."""
        if ask.op != "draw":
            return f"no kernel for {ask.op}"
        if ask.dim("V") > MAX_VOCAB:
            return f"rows of {ask.dim('V')} logits, {MAX_VOCAB} at most"
        return Claim(ask.rows, capturable=True)

    def make(self, ask: Ask) -> Kernel:
        """Return the function."""
        return draw

    def trial(self, ask: Ask, rows: int, device: torch.device) -> Sequence[Any] | None:
        """Return operands of requests with usual filters; those of other operations as the base class makes them."""
        if ask.op != "draw":
            return super().trial(ask, rows, device)
        import torch

        logits, numbers = torch.randn(rows, ask.dim("V"), device=device), torch.arange(rows, device=device)
        ones = torch.ones(rows, device=device)
        filters = ones, TOP_P * ones, 0.0 * ones, torch.full_like(numbers, TOP_K)
        return [logits, logits.argmax(dim=-1), *filters, numbers, numbers]


def draw(
    logits: Tensor, greedy: Tensor, temperature: Tensor, top_p: Tensor, min_p: Tensor, top_k: Tensor, seeds: Tensor,
    positions: Tensor,
) -> Tensor:  # fmt: skip
    """Draw one token per row `[T, V]`, `[T]` int64: the race among the tokens that the filters keep of it."""
    import torch

    from dovetail.sdk.draws import draw_filtered, scaled
    from dovetail.sdk.rows import DrawParams

    if not len(logits):
        return greedy.clone()
    params = DrawParams(temperature, top_p, min_p, top_k, seeds, positions)
    tokens, _ = draw_filtered(scaled(logits.float(), temperature), params, logits.shape[-1])
    return torch.where(temperature > 0, tokens, greedy)
