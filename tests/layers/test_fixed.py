"""A product of one tile and one order of sums: right, and the same bits for a row in any company."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from dovetail_backends.kernels.triton import fixed

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
DTYPES = [torch.float32, torch.bfloat16] if DEVICE == "cuda" else [torch.float32, torch.float16]
"""Triton's interpreter multiplies bfloat16 matrices as if their bits were integers."""
ROWS = 150
SHAPES = [(70, 300), (130, 1100), (1, 64), (64, 700), (200, 63)]
"""Outputs and inputs off the tiles, of one span and of several."""


def random(*shape: int, dtype: torch.dtype, seed: int) -> Tensor:
    """Random numbers on the test device."""
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(DEVICE, dtype)


@pytest.mark.sampled
@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("dtype", DTYPES)
def test_a_row_has_the_bits_that_it_has_alone(shape: tuple[int, int], dtype: torch.dtype, keeps_bits: bool) -> None:
    """With bias and residual, spans apart and one after the other: right, and equal for every number of rows."""
    n, k = shape
    x, weight = random(ROWS, k + 3, dtype=dtype, seed=0)[:, :k], random(n, k, dtype=dtype, seed=1) / k**0.5
    bias, residual = random(n, dtype=dtype, seed=2), random(ROWS, n, dtype=dtype, seed=3)
    want = x.double() @ weight.double().t() + bias.double()
    tolerance = 1e-5 if dtype == torch.float32 else 2e-2
    plain = fixed.linear(x, weight, bias)
    torch.testing.assert_close(plain.double(), want, rtol=tolerance, atol=tolerance)
    whole = fixed.linear(x, weight, bias, residual)
    torch.testing.assert_close(whole.double(), want + residual.double(), rtol=tolerance, atol=tolerance)
    for num in (1, 63, 64, 65, 128, 129):
        at = slice(ROWS - num, ROWS)
        found = fixed.linear(x[at], weight, bias, residual[at])
        torch.testing.assert_close(found, whole[at], rtol=tolerance, atol=tolerance)
        assert (DEVICE == "cpu" and not keeps_bits) or torch.equal(found, whole[at]), num


def test_both_ways_to_sum_are_tried() -> None:
    """The rows above take spans apart, and together, and shapes have one span and several."""
    assert ROWS > fixed.FEW * fixed.TILE_M
    assert {fixed.num_spans(*shape) > 1 for shape in SHAPES} == {True, False}


def test_spans_follow_from_the_weight() -> None:
    """Wide products have one, narrow and long ones several; all inputs are in one of them."""
    assert fixed.num_spans(151936, 1024) == 1
    assert fixed.num_spans(896, 4864) == fixed.MAX_SPANS
    assert fixed.num_spans(64, 64) == 1


def test_no_rows() -> None:
    """Nothing is computed of nothing."""
    weight = random(5, 8, dtype=torch.float32, seed=0)
    assert fixed.linear(random(0, 8, dtype=torch.float32, seed=1), weight, None).shape == (0, 5)
