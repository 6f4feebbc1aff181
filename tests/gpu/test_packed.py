"""Products with packed weights give the written-out weight's result on CUDA, with the tiles that layers use."""

from __future__ import annotations

import pytest
import torch

from dovetail.contracts.layers import RMSScale
from dovetail.layers import cuda_products
from dovetail.layers.ops import packed, reference
from dovetail.layers.packed_forms import Form, Int4, Mxfp4, Scaled

pytestmark = pytest.mark.gpu
FLOAT8 = torch.float8_e4m3fn


@pytest.mark.parametrize(
    "form", [Scaled(FLOAT8), Scaled(FLOAT8, 128), Scaled(), Int4(128), Int4(64, has_zero=True), Mxfp4()], ids=str
)
@pytest.mark.parametrize(("n", "k"), [(6144, 4096), (1152, 896), (2880, 2880), (200, 640)])
@pytest.mark.parametrize("rows", [1, 2, 4, 16, 33, 64, 100, 200, 300, 700])
def test_products(form: Form, n: int, k: int, rows: int) -> None:
    """Onto a residual, and behind a norm with a gate."""
    if getattr(form, "group", None) and k % form.group:  # type: ignore[attr-defined]
        pytest.skip("groups do not divide the inputs")
    torch.manual_seed(0)
    tensors = form.quantise(torch.randn(n, k, device="cuda") * 0.02)
    weight = cuda_products.packed(form, tensors, torch.bfloat16)
    assert weight is not None
    plain = form.dequantise(tensors, torch.bfloat16)
    x, residual = (torch.randn(rows, size, device="cuda").bfloat16() for size in (k, n))
    norm = torch.randn(k, device="cuda").bfloat16()
    torch.cuda.synchronize()  # weights are loaded before the kernel waits for what was launched before it
    pairs = (
        (packed.linear(x, weight, None, residual=residual), residual + x @ plain.T),
        (
            packed.linear(x, weight, None, norm=RMSScale(norm, 1e-6), act="silu_and_mul"),
            reference.norm_gate(x, norm, 1e-6, plain, None),
        ),
    )
    for found, want in pairs:
        found, want = found.float(), want.float()
        usual = want.norm(dim=0)
        # What is added up in another order may round to the next number: of an output's own size, or of the usual one.
        error = (found - want).norm(dim=0) / usual.clamp_min(usual.median())
        assert error.max() < 0.1
        assert (found - want).norm() < 0.015 * want.norm()
