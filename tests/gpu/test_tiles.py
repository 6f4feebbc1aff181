"""Every tile that the few-rows product is measured with gives the reference's result on a CUDA device."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from dovetail.sdk.layers.ops import reference
from dovetail_backends.kernels.triton.launch import Tile
from dovetail_backends.kernels.triton.skinny import GATE_TILES, TILES, Tiles, skinny

pytestmark = pytest.mark.gpu


def entries(tiles: Tiles) -> list[tuple[int, int, int, Tile]]:
    """Weight `[N, K]`, rows and tile."""
    return [(n, k, rows, tile) for (n, k), by_rows in tiles.items() for rows, tile in by_rows.items()]


def close(found: Tensor, want: Tensor) -> None:
    """Equal but for the rounding of bfloat16, every column of the output by itself: a tile's fault is whole columns."""
    error, usual = (found.float() - want.float()).norm(dim=0), want.float().norm(dim=0).median()
    assert error.max() < 0.1 * usual
    assert error.mean() < 0.01 * usual


def draw(*shape: int) -> Tensor:
    """Normal numbers."""
    return torch.randn(*shape, device="cuda").to(torch.bfloat16)


@pytest.mark.parametrize(("n", "k", "rows", "tile"), entries(TILES))
def test_products(n: int, k: int, rows: int, tile: Tile) -> None:
    """Plain, behind a norm, and onto a residual; for all rows of the tile and for fewer."""
    weight, norm = draw(n, k) * 0.02, draw(k)
    for num in (rows, rows - 3, rows // 2 + 1):
        x, residual = draw(num, k), draw(num, n)
        torch.cuda.synchronize()  # weights are loaded before the kernel waits for what was launched before it
        whole = (rows, tile)
        close(skinny(x, weight, None, whole), reference.linear(x, weight, None))
        found = skinny(x, weight, None, whole, norm=norm, eps=1e-6)
        close(found, reference.norm_linear(x, norm, 1e-6, weight, None))
        found = skinny(x, weight, None, whole, residual=residual)
        close(found, reference.linear_add(x, weight, None, residual.clone()))


@pytest.mark.parametrize(("n", "k", "rows", "tile"), entries(GATE_TILES))
def test_gates(n: int, k: int, rows: int, tile: Tile) -> None:
    """Norm, gate and up."""
    weight, norm = draw(n, k) * 0.02, draw(k)
    for num in (rows, rows - 3, rows // 2 + 1):
        x = draw(num, k)
        torch.cuda.synchronize()  # as above
        found = skinny(x, weight, None, (rows, tile), norm=norm, eps=1e-6, gate=True)
        close(found, reference.norm_gate(x, norm, 1e-6, weight, None))
