"""What tests change in the interpreter of Triton leaves kernels, errors and `triton.language` as they are."""

from __future__ import annotations

from typing import Any

import pytest
import torch

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
