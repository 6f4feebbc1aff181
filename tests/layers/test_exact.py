"""Products of float32 in parts, in Triton's interpreter."""

from __future__ import annotations

from typing import Any

import pytest
import torch

triton = pytest.importorskip("triton")
tl = triton.language
pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="the interpreter runs on CPU")

from dovetail_backends.kernels.triton import exact  # noqa: E402

upper, product = exact._upper, exact.product


@triton.jit
def multiplied(x_ptr: Any, upper_ptr: Any, found_ptr: Any, size: tl.constexpr) -> None:
    """The upper parts of a square, and its square."""
    at = tl.arange(0, size)[:, None] * size + tl.arange(0, size)[None, :]
    x = tl.load(x_ptr + at)
    tl.store(upper_ptr + at, upper(x))
    tl.store(found_ptr + at, product(x, x))


def test_a_product_of_float32_is_of_two_parts_each() -> None:
    """The upper ones are the nearest numbers of tf32, which has 11 bits; nothing of the product is lost."""
    numbers = torch.randn(16, 16, generator=torch.Generator().manual_seed(1)) * 2.0 ** torch.arange(-8, 8)
    parts, found = torch.empty_like(numbers), torch.empty_like(numbers)
    multiplied[(1,)](numbers, parts, found, 16)
    assert not (parts.view(torch.int32) & 0x1FFF).any()
    assert torch.all((numbers - parts).abs() <= numbers.abs() * 2.0**-11)
    assert not torch.equal(numbers, parts)
    torch.testing.assert_close(found, numbers @ numbers, rtol=1e-5, atol=1e-4)
