"""Root-mean-square norms."""

from __future__ import annotations

from torch import Tensor

from dovetail.contracts.model import BuildContext
from dovetail.layers import ops
from dovetail.layers.base import Layer


class RMSNorm(Layer):
    """RMS norm over `[T, size]`, with the residual addition before it when a residual is given."""

    def __init__(self, size: int, eps: float, ctx: BuildContext) -> None:
        super().__init__()
        self.weight = self.empty(size, device=ctx.device, dtype=ctx.dtype)
        self.eps = eps

    def forward(self, x: Tensor, residual: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """Return the normalised `x + residual` and the sum itself, the new residual."""
        return ops.add_rms_norm(x, residual, self.weight, self.eps)


class QKNorm(Layer):
    """RMS norm of each query and key head, one weight `[D]` for all queries and one for all keys."""

    def __init__(self, num_qo_heads: int, num_kv_heads: int, head_dim: int, eps: float, ctx: BuildContext) -> None:
        super().__init__()
        self._slots = {"q": (0, num_qo_heads), "k": (num_qo_heads, num_kv_heads)}
        self.weight = self.empty(num_qo_heads + num_kv_heads, head_dim, device=ctx.device, dtype=ctx.dtype)
        self.eps = eps

    def expected(self) -> list[tuple[str, str | None]]:
        return [("weight", "q"), ("weight", "k")]

    def load_weight(self, name: str, slot: str | None, tensor: Tensor) -> None:
        start, num = self._slots[slot or ""]
        part = self.weight.narrow(0, start, num)
        self.copy_part(part, tensor.expand(num, -1) if tensor.dim() == 1 else tensor)

    def forward(self, qk: Tensor, rope: tuple[Tensor, Tensor]) -> Tensor:
        """Normalise `[T, Hq + Hk, D]` and rotate it by the step's cosine and sine."""
        return ops.norm_rotate(qk, self.weight, self.eps, *rope)
