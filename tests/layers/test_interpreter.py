"""What tests and the kit change in Triton's interpreter: it rounds as devices do, and is as it was in all else."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from dovetail_testing.conformance.interpreter import rounding_to_nearest

triton = pytest.importorskip("triton")
tl = pytest.importorskip("triton.language")

pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="the interpreter runs on CPU")


@triton.jit
def outer_sum(left: Any, right: Any) -> Any:
    """Every sum of a column's and a row's numbers."""
    return left[:, None] + right[None, :]


@triton.jit
def sums(x_ptr: Any, y_ptr: Any, out_ptr: Any, rows: tl.constexpr, columns: tl.constexpr) -> None:
    """Write a table of sums; shapes that are the same, that are broadcast, and of fewer axes."""
    row, column = tl.arange(0, rows), tl.arange(0, columns)
    table = outer_sum(tl.load(x_ptr + row), tl.load(y_ptr + column))
    table = table + tl.load(y_ptr + column) + outer_sum(row, column) * 0
    tl.store(out_ptr + row[:, None] * columns + column[None, :], table)


@triton.jit
def unlike(out_ptr: Any) -> None:
    """Add what cannot be broadcast."""
    tl.store(out_ptr + tl.arange(0, 4), outer_sum(tl.arange(0, 4), tl.arange(0, 4)) + tl.arange(0, 8))


def test_shapes_are_broadcast_and_names_restored_even_after_an_error() -> None:
    """A launch that fails says why; those before and behind it compute the same; nothing stays replaced."""
    before = {name: getattr(tl, name) for name in ("load", "store", "arange", "range")}
    x, y = torch.randn(4), torch.randn(8)
    for _ in range(2):
        out = torch.zeros(4, 8)
        sums[(1,)](x, y, out, rows=4, columns=8)
        assert torch.equal(out, x[:, None] + y + y)
        with pytest.raises(Exception, match="incompatible dimensions"):
            unlike[(1,)](out)
        assert {name: getattr(tl, name) for name in before} == before


@triton.jit
def narrow(x_ptr: Any, cast_ptr: Any, stored_ptr: Any, num: tl.constexpr) -> None:
    """Round numbers to bfloat16 by a cast, which is undone, and by a store."""
    at = tl.arange(0, num)
    given = tl.load(x_ptr + at)
    tl.store(cast_ptr + at, given.to(tl.bfloat16).to(tl.float32))
    tl.store(stored_ptr + at, given)


def test_float32_is_rounded_to_the_nearest_bfloat16() -> None:
    """As torch does: halfway to the even one, to infinity beyond the largest, and NaN stays NaN."""
    halfway = torch.arange(1, 9) * 2**-8 + 1
    others = [0.0, -0.0, 1e-45, -1e-39, 1e-38, 3.4e38, -3.4e38, torch.inf, -torch.inf, torch.nan, -torch.nan]
    x = torch.cat((torch.tensor(others), halfway, -halfway, torch.randn(101)))
    assert len(x) == 128
    cast, stored = torch.empty(128), torch.empty(128, dtype=torch.bfloat16)
    with rounding_to_nearest(), rounding_to_nearest():
        narrow[(1,)](x, cast, stored, num=128)
    want = x.bfloat16()
    assert torch.equal(cast.nan_to_num(7), want.float().nan_to_num(7))
    assert torch.equal(stored.nan_to_num(7), want.nan_to_num(7))
    assert bool(cast[9:11].isnan().all()), "a NaN became a number"
    assert cast.signbit().equal(x.signbit())
