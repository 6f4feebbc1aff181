"""Triton versions of the layer operations equal the torch reference; on CPU they run in Triton's interpreter."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from dovetail.sdk.layers.ops import reference
from dovetail_backends.kernels.triton import latent, norms, products
from dovetail_backends.kernels.triton.gemv import gemv
from dovetail_backends.kernels.triton.launch import Tile
from dovetail_backends.kernels.triton.skinny import skinny, tile_for

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
DOT_DTYPES = [torch.float32, torch.bfloat16] if DEVICE == "cuda" else [torch.float32]
"""Triton's interpreter multiplies bfloat16 matrices as if their bits were integers."""
TOLERANCE = {torch.float32: 1e-5, torch.bfloat16: 2e-2}


def random(*shape: int, dtype: torch.dtype, seed: int = 0) -> Tensor:
    """Random numbers on the test device."""
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(DEVICE, dtype)


def close(found: Tensor, want: Tensor) -> None:
    """Relative error of the whole tensor below the dtype's tolerance."""
    assert found.shape == want.shape
    assert found.dtype == want.dtype
    error = (found.double() - want.double()).norm() / want.double().norm()
    assert error < TOLERANCE[want.dtype]


@pytest.mark.sampled
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("width", [63, 256, 896])
@pytest.mark.parametrize("with_residual", [False, True])
def test_add_rms_norm(dtype: torch.dtype, width: int, with_residual: bool) -> None:
    """The fused addition and norm equal the reference, for widths off powers of two and strided rows."""
    x = random(5, width + 7, dtype=dtype)[:, :width]
    residual = random(5, width, dtype=dtype, seed=1) if with_residual else None
    weight = random(width, dtype=dtype, seed=2)
    if residual is None:
        close(norms.rms_norm(x, weight, 1e-6), reference.rms_norm(x, weight, 1e-6))
        return
    for found, want in zip(
        norms.add_rms_norm(x, residual, weight, 1e-6), reference.add_rms_norm(x, residual, weight, 1e-6), strict=True
    ):
        close(found, want)


@pytest.mark.sampled
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("dim", [16, 64, 80, 128])
@pytest.mark.parametrize("with_norm", [False, True])
@pytest.mark.parametrize("is_wide", [False, True])
def test_norm_rotate(dtype: torch.dtype, dim: int, with_norm: bool, is_wide: bool) -> None:
    """The fused head norm and rotation equal the reference on a strided view of a fused projection."""
    x = random(3, 9, dim, dtype=dtype)[:, :6]
    cos, sin = (random(3, 1, dim, dtype=torch.float32 if is_wide else dtype, seed=s) for s in (1, 2))
    weight = random(6, dim, dtype=dtype, seed=3) if with_norm else None
    close(norms.norm_rotate(x, weight, 1e-6, cos, sin), reference.norm_rotate(x, weight, 1e-6, cos, sin))


@pytest.mark.sampled
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("shape", [(1, 4, 8, 32, 16), (3, 17, 0, 20, 6), (2, 5, 3, 96, 64)], ids=str)
def test_latent_rows(dtype: torch.dtype, shape: tuple[int, int, int, int, int]) -> None:
    """Rotated queries and rows of the cache equal the reference, for numbers of heads and widths off the tiles."""
    num, heads, nope, rank, dim = shape
    q = random(num, heads, nope + dim, dtype=dtype)
    kv_a = random(num, rank + dim + 3, dtype=dtype, seed=1)[:, : rank + dim]
    cos, sin = (random(num, 1, dim, dtype=dtype, seed=s) for s in (2, 3))
    norm = random(rank, dtype=dtype, seed=4)
    found, want = (way.latent_rows(q, kv_a, norm, 1e-6, cos, sin) for way in (latent, reference))
    assert found[0].shape == (num, heads, rank + dim)
    close(found[0][..., rank:], want[0][..., rank:])
    close(found[1], want[1])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("dim", [16, 80])
def test_rotations(dtype: torch.dtype, dim: int) -> None:
    """Cosine and sine of small and large positions equal the reference."""
    positions = torch.tensor([0, 1, 77, 5000, 131071]).to(DEVICE)
    freqs = (1.0 / 10000 ** (torch.arange(0, dim, 2) / dim)).to(DEVICE)
    for found, want in zip(
        norms.rotations(positions, freqs, 1.3, dtype=dtype),
        reference.rotations(positions, freqs, 1.3, dtype=dtype),
        strict=True,
    ):
        close(found, want)


@pytest.mark.sampled
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("shape", [(63, 100), (896, 896), (300, 2050)])
@pytest.mark.parametrize("with_bias", [False, True])
def test_gemv(dtype: torch.dtype, shape: tuple[int, int], with_bias: bool) -> None:
    """One row times a matrix equals the reference, for sizes off the tiles."""
    x, weight = random(1, shape[1], dtype=dtype), random(*shape, dtype=dtype, seed=1)
    bias = random(shape[0], dtype=dtype, seed=2) if with_bias else None
    close(products.linear(x, weight, bias), reference.linear(x, weight, bias))


def test_gemv_of_thousands_of_outputs() -> None:
    """They have tiles of their own, as a vocabulary's projection does."""
    x, weight, bias = (random(*shape, dtype=torch.float32) for shape in ((1, 64), (4100, 64), (4100,)))
    close(products.linear(x, weight, bias), reference.linear(x, weight, bias))


@pytest.mark.sampled
@pytest.mark.parametrize("dtype", DOT_DTYPES)
@pytest.mark.parametrize(("rows", "block_m"), [(2, 16), (7, 16), (16, 16), (7, 32), (33, 64), (64, 64)])
@pytest.mark.parametrize("tile", [(16, 64, 2, 3, 1), (64, 128, 4, 3, 2), (32, 256, 4, 5, 1), (32, 64, 2, 1, 4)])
@pytest.mark.parametrize("with_bias", [False, True])
def test_skinny(dtype: torch.dtype, rows: int, block_m: int, tile: Tile, with_bias: bool) -> None:
    """A few strided rows times a matrix equal the reference for every tile, at sizes off the tiles."""
    x, weight = random(rows, 330, dtype=dtype)[:, :300], random(100, 300, dtype=dtype, seed=1)
    bias = random(100, dtype=dtype, seed=2) if with_bias else None
    close(skinny(x, weight, bias, (block_m, tile)), reference.linear(x, weight, bias))


@pytest.mark.sampled
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("width", [63, 1024, 2000])
def test_silu_and_mul(dtype: torch.dtype, width: int) -> None:
    """The fused gate equals the reference for widths off the block size."""
    gate_up = random(4, 2 * width, dtype=dtype)
    close(norms.silu_and_mul(gate_up), reference.silu_and_mul(gate_up))


@pytest.mark.sampled
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("tile", [(2, 128, 2), (4, 512, 4)])
@pytest.mark.parametrize("with_bias", [False, True])
def test_gemv_with_its_surroundings(dtype: torch.dtype, tile: tuple[int, int, int], with_bias: bool) -> None:
    """One row: norm before, gate or residual after the product equal the reference, in one chunk and in several."""
    x, weight = random(1, 300, dtype=dtype), random(126, 300, dtype=dtype, seed=1)
    bias = random(126, dtype=dtype, seed=2) if with_bias else None
    norm, residual = random(300, dtype=dtype, seed=3), random(1, 126, dtype=dtype, seed=4)
    around = {"norm": norm, "eps": 1e-3, "tile": tile}
    close(gemv(x, weight, bias, **around), reference.norm_linear(x, norm, 1e-3, weight, bias))
    close(gemv(x, weight, bias, gate=True, **around), reference.norm_gate(x, norm, 1e-3, weight, bias))
    close(gemv(x, weight, bias, residual=residual, tile=tile), reference.linear_add(x, weight, bias, residual.clone()))


@pytest.mark.sampled
@pytest.mark.parametrize("dtype", DOT_DTYPES)
@pytest.mark.parametrize("tile", [(32, 64, 2, 3, 4), (16, 512, 2, 1, 1)])
@pytest.mark.parametrize("with_bias", [False, True])
@pytest.mark.parametrize(("rows", "block_m"), [(5, 16), (40, 64)])
def test_skinny_with_its_surroundings(dtype: torch.dtype, tile: Tile, with_bias: bool, rows: int, block_m: int) -> None:
    """A few rows: norm before, gate or residual after the product equal the reference, in one chunk and in several."""
    x, weight = random(rows, 330, dtype=dtype)[:, :300], random(126, 300, dtype=dtype, seed=1)
    bias = random(126, dtype=dtype, seed=2) if with_bias else None
    norm, residual = random(300, dtype=dtype, seed=3), random(rows, 126, dtype=dtype, seed=4)
    around = {"norm": norm, "eps": 1e-3}
    whole = (block_m, tile)
    close(skinny(x, weight, bias, whole, **around), reference.norm_linear(x, norm, 1e-3, weight, bias))
    close(skinny(x, weight, bias, whole, gate=True, **around), reference.norm_gate(x, norm, 1e-3, weight, bias))
    found = skinny(x, weight, bias, whole, residual=residual)
    close(found, reference.linear_add(x, weight, bias, residual.clone()))


def test_a_tile_is_chosen_by_the_number_of_rows() -> None:
    """The smallest that holds the rows, if there is one for it: not for one row, and not beyond the largest."""
    weight = random(96, 64, dtype=torch.bfloat16)
    tile = (16, 64, 4, 3, 1)
    tiles = {(96, 64): {16: tile, 64: tile}}
    found = [tile_for(rows, weight, tiles) for rows in (1, 2, 16, 17, 32, 33, 64, 65)]
    assert found == [None, (16, tile), (16, tile), None, None, (64, tile), (64, tile), None]
    assert tile_for(2, weight[:95], tiles) is None


@pytest.mark.parametrize("rows", [1, 3, 40])
def test_operations_by_the_number_of_rows(rows: int) -> None:
    """Whatever kernels serve a number of rows, the operations of the set equal the reference."""
    x, weight, bias = (random(*shape, dtype=torch.float32, seed=len(shape)) for shape in ((rows, 64), (96, 64), (96,)))
    norm, residual = random(64, dtype=torch.float32, seed=3), random(rows, 96, dtype=torch.float32, seed=4)
    found = products.norm_linear(x, norm, 1e-6, weight, bias)
    close(found, reference.norm_linear(x, norm, 1e-6, weight, bias))
    found = products.norm_gate(x, norm, 1e-6, weight, bias)
    close(found, reference.norm_gate(x, norm, 1e-6, weight, bias))
    want = reference.linear_add(x, weight, bias, residual.clone())
    close(products.linear_add(x, weight, bias, residual), want)
