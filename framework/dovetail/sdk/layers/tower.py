"""Layers of vision towers: patches become hidden states, which attend to one another both ways, whole or by window.

N patches of one image, H width of the tower, D width of a head. A tower is computed whole on every rank.

What needs much memory for each patch, and looks at that patch alone, is computed in pieces of 8,192 patches. So an
image of 100,000 takes little more than its hidden states, queries, keys and values. An image is always encoded alone:
its bits depend on nothing else.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from math import prod
from typing import cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from dovetail.contracts.config import ModelConfig
from dovetail.contracts.layers import BuildContext, Parallel, Part
from dovetail.sdk.layers.base import Layer, Slot
from dovetail.sdk.layers.matrix import Matrix
from dovetail.sdk.layers.plain import PLAIN
from dovetail.sdk.layers.transformer import GatedMLP


def tower_context(ctx: BuildContext, path: str) -> BuildContext:
    """Return the context of a tower at `path`: in the model's dtype, as no quantisation is made for it, and undivided.

    So any number of ranks can have it.
    """
    return replace(ctx.at(path), parallel=Parallel(), factory=PLAIN)


PIECE = 8192
"""Patches of a piece."""


def in_pieces(make: Callable[[Tensor], Tensor], x: Tensor, merged: int = 1) -> Tensor:
    """Return `make(x)` with as many rows as `x`, each of which is of `merged` patches; it gets a piece at a time."""
    size = max(1, PIECE // merged)
    first = make(x[:size])
    if len(x) <= size:
        return first
    found = first.new_empty(len(x), first.shape[1])
    found[:size] = first
    for at in range(size, len(x), size):
        found[at : at + size] = make(x[at : at + size])
    return found


ALIGNED, WIDE = 8, 64
"""Elements: an inner width that is no multiple of the first is filled up to one of the second."""
Shape = tuple[int, int, int] | tuple[int, int, int, int]
"""Channels, frames, rows and columns of a patch; without frames, the checkpoint's convolution has none."""


class Convolution(Layer):
    """A convolution whose stride is its size, as a product.

    Args:
        shape: Of what becomes one row of the output.
        width: H of the output.
        ctx: Device and dtype.
        bias: Whether there is one.
    """

    def __init__(self, shape: Shape, width: int, ctx: BuildContext, *, bias: bool = False) -> None:
        super().__init__()
        self._shape = shape
        self.weight = self.empty(width, prod(shape), device=ctx.device, dtype=ctx.dtype)
        self.bias = self.empty(width, device=ctx.device, dtype=ctx.dtype) if bias else None

    def slots(self) -> dict[Slot, tuple[int, ...]]:
        """See `Layer.slots`."""
        return {**super().slots(), Slot("weight"): (self.weight.shape[0], *self._shape)}

    def place(self, slot: Slot, tensor: Tensor) -> Tensor | None:
        """See `Layer.place`."""
        return super().place(slot, tensor.reshape(getattr(self, slot.tensor).shape))

    @property
    def holds(self) -> bool | None:
        """See `Layer.holds`."""
        return False

    def forward(self, patches: Tensor) -> Tensor:
        """Map `[N, channels * frames * rows * columns]` to `[N, H]`."""
        return F.linear(patches, self.weight, self.bias)


class PatchEmbedding(Convolution):
    """Hidden states of patches.

    Args:
        shape: Of a patch.
        width: H.
        ctx: Device and dtype.
        mean: Of the pixels of each channel, from 0 to 1.
        std: Their deviation.
        bias: Whether there is one.
    """

    def __init__(
        self,
        shape: Shape,
        width: int,
        ctx: BuildContext,
        *,
        mean: Sequence[float],
        std: Sequence[float],
        bias: bool = False,
    ) -> None:
        super().__init__(shape, width, ctx, bias=bias)
        self._mean, self._std = (torch.tensor(list(v), device=ctx.device).view(1, -1, 1, 1) for v in (mean, std))

    def forward(self, patches: Tensor) -> Tensor:
        """Map pixels `[N, channels * rows * columns]` uint8, which stand for every frame, to `[N, H]`."""
        channels, *frames, rows, columns = self._shape
        pixels = patches.view(-1, channels, 1, rows * columns).float() / 255
        values = ((pixels - self._mean) / self._std).to(self.weight.dtype)
        return super().forward(values.expand(-1, -1, *(frames or (1,)), -1).reshape(len(patches), -1))


class Learned(Layer):
    """A tensor of that shape, which may stand in a checkpoint under the module's own name."""

    suffixes = {"weight": ("", ".weight")}  # noqa: RUF012 - as the base declares it

    def __init__(self, shape: Sequence[int], ctx: BuildContext) -> None:
        super().__init__()
        self.weight = self.empty(*shape, device=ctx.device, dtype=ctx.dtype)


Divided = Sequence[tuple[int, int]]
"""How many windows there are, and of how many patches each, for patches that stand together by window."""


class TowerAttention(nn.Module):
    """Attention of patches to all of their image or window.

    Args:
        width: H.
        num_heads: Heads.
        ctx: Device, dtype and path.
        bias: On queries, keys and values.
        out_bias: On the output; None: as `bias`.
        qk_norm: Makes an RMS norm of all queries and one of all keys of a patch, before rotation; None: there is none.
        order: Of the rows of query and key heads, see `Part`.
    """

    def __init__(
        self,
        width: int,
        num_heads: int,
        ctx: BuildContext,
        *,
        bias: bool = True,
        out_bias: bool | None = None,
        qk_norm: Callable[[], nn.Module] | None = None,
        order: tuple[int, ...] | None = None,
    ) -> None:
        super().__init__()
        self._heads, dim = num_heads, width // num_heads
        self._rotate = ctx.operation("norm_rotate", D=dim)
        parts = [Part(name, width, dim, order=None if name == "v" else order) for name in "qkv"]
        self.qkv = ctx.linear("qkv", width, parts, bias=bias)
        self.out = ctx.linear("out", width, width, bias=bias if out_bias is None else out_bias)
        self.q_norm = None if qk_norm is None else qk_norm()
        self.k_norm = None if qk_norm is None else qk_norm()

    def forward(self, x: Tensor, rope: tuple[Tensor, Tensor] | None, windows: Divided | None) -> Tensor:
        """Map `[N, H]` to `[N, H]`.

        Args:
            x: Hidden states.
            rope: Cosine and sine as `axial_rope` returns them; None: no rotation.
            windows: Patches that attend to one another; None: all.
        """
        qkv = self.qkv(x).view(len(x), 3, -1)
        if self.q_norm is not None and self.k_norm is not None:
            qkv = torch.stack((self.q_norm(qkv[:, 0].contiguous()), self.k_norm(qkv[:, 1].contiguous()), qkv[:, 2]), 1)
        heads = qkv.view(len(x), 3 * self._heads, -1)
        qk, v = heads[:, : 2 * self._heads], heads[:, 2 * self._heads :]
        if rope is not None:
            qk = self._rotated(qk, rope)
        divided = windows or ((1, len(x)),)
        lens = [num * size for num, size in divided]
        parts = [torch.split(each, lens) for each in (*qk.chunk(2, 1), v)]
        found = [
            F.scaled_dot_product_attention(*(part.unflatten(0, shape).transpose(1, 2) for part in given))
            for shape, *given in zip(divided, *parts, strict=True)
        ]
        return self.out(torch.cat([part.transpose(1, 2).flatten(0, 1).flatten(1) for part in found]))

    def _rotated(self, qk: Tensor, rope: tuple[Tensor, Tensor]) -> Tensor:
        """Rotate heads: a piece at a time, and in place, where there are several."""
        for part, cos, sin in zip(*(torch.split(each, PIECE) for each in (qk, *rope)), strict=True):
            found: Tensor = self._rotate(part, None, 0.0, cos, sin)
            if len(part) == len(qk):
                return found
            part.copy_(found)
        return qk


class TowerMLP(GatedMLP):
    """A gated MLP of any inner width.

    Libraries of matrix products want rows to begin at multiples of 16 bytes. Where the width is no multiple of 8
    elements, zeros fill it up: Qwen2.5-VL's 3,420 become 3,456. They are gated to zero, and multiplied by zeros.
    """

    def __init__(self, config: ModelConfig, ctx: BuildContext, *, bias: bool = False, inner: int) -> None:
        more = -inner % WIDE if inner % ALIGNED else 0
        super().__init__(config, ctx, bias=bias, inner=inner + more)
        cast(Matrix, self.gate_up).zeros, cast(Matrix, self.down).zeros = (more, 0), (0, more)  # as `PLAIN` makes them


class TowerLayer(nn.Module):
    """Attention and MLP, each behind a norm and added to what it reads."""

    def __init__(self, norms: tuple[nn.Module, nn.Module], attention: TowerAttention, mlp: nn.Module) -> None:
        super().__init__()
        self.attention_norm, self.mlp_norm = norms
        self.attention, self.mlp = attention, mlp

    def forward(self, x: Tensor, rope: tuple[Tensor, Tensor] | None, windows: Divided | None) -> Tensor:
        """Map `[N, H]` to `[N, H]`; `rope` and `windows` as for its attention."""
        x = x + self.attention(self.attention_norm(x), rope, windows)
        return in_pieces(lambda rows: rows + self.mlp(self.mlp_norm(rows)), x)


def axial_rope(
    rows: Tensor, columns: Tensor, dim: int, theta: float, *, between: bool = False
) -> tuple[Tensor, Tensor]:
    """Return float32 cosine and sine `[N, 1, D]` for `norm_rotate` of patches at `rows`, `columns` `[N]`.

    A quarter of a head turns by the row, the next one by the column, and the second half as the first. Both have the
    same frequencies; or `between`, where the column's lie between the row's.
    """
    freqs = 1.0 / (theta ** (torch.arange(0, dim // 2, 2, device=rows.device).float() / (dim // 2)))
    of_columns = freqs * theta ** (-2 / dim) if between else freqs
    return halves_rope(torch.cat((rows[:, None] * freqs, columns[:, None] * of_columns), -1))


def halves_rope(angles: Tensor) -> tuple[Tensor, Tensor]:
    """Return cosine and sine `[N, 1, D]` for `norm_rotate`, of angles `[N, D / 2]`."""
    cos, sin = angles.cos()[:, None], angles.sin()[:, None]
    return torch.cat((cos, cos), -1), torch.cat((-sin, sin), -1)


def merged_places(grid_rows: int, grid_columns: int, merge: int, device: torch.device) -> tuple[Tensor, Tensor]:
    """Return row and column `[N]` of each patch, where those of a block of `merge` by `merge` stand together."""
    shape = (grid_rows // merge, merge, grid_columns // merge, merge)
    rows = torch.arange(grid_rows, device=device)[:, None].expand(grid_rows, grid_columns)
    columns = torch.arange(grid_columns, device=device).expand(grid_rows, grid_columns)
    ordered = [each.reshape(shape).transpose(1, 2).flatten() for each in (rows, columns)]
    return ordered[0], ordered[1]
