"""The kernel set `humming` with the real library: products against the matrix, and in graphs."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from dovetail.contracts.kernels import make_ask
from dovetail.runtime.device.devices import device_of
from dovetail.sdk.layers.ops import reference
from dovetail.sdk.quantization.forms import Int4
from dovetail_backends.kernels.humming import HummingKernels, HummingOptions

pytest.importorskip("humming")
pytestmark = pytest.mark.gpu
SIZES = [(6144, 4096), (512, 384), (4096, 14336), (384, 128)]
ROWS = (1, 2, 7, 16, 31, 32, 33, 64, 65, 100, 129, 256, 257, 500, 1025, 4097)


def made(op: str, form: Int4, n: int, k: int, **options: Any) -> Any:
    """A kernel of the set."""
    one = type("Set", (HummingKernels,), {"options": HummingOptions(**options)})()
    dims = {"F": n // 2, "K": k} if op == "packed_norm_gate" else {"N": n, "K": k}
    more = {"form": form, "act": "silu_and_mul"} if op == "packed_norm_gate" else {"form": form}
    view = device_of(torch.device("cuda")).view
    asked = make_ask(op, view, "bfloat16", dims, more, captured=True)
    assert not isinstance(one.serves(asked), str)
    return one.make(asked)


@pytest.mark.parametrize("form", [Int4(128), Int4(32, has_zero=True), Int4(64)], ids=str)
@pytest.mark.parametrize(("n", "k"), SIZES)
@pytest.mark.parametrize("few_rows", [0, 32])
def test_products(form: Int4, n: int, k: int, few_rows: int) -> None:
    """Of any number of rows, with a bias, a norm, a gate and a residual."""
    torch.manual_seed(0)
    tensors = form.quantise(torch.randn(n, k, device="cuda") * 0.02)
    plain = form.dequantise(tensors, torch.bfloat16)
    norm, bias = torch.randn(k, device="cuda").bfloat16(), torch.randn(n, device="cuda").bfloat16()
    product, normed, gated = (
        made(op, form, n, k, few_rows=few_rows) for op in ("packed_linear", "packed_norm_linear", "packed_norm_gate")
    )
    weight = product.pack(tensors)
    for rows in ROWS:
        x, residual = (torch.randn(rows, size, device="cuda").bfloat16() for size in (k, n))
        pairs = (
            (product(x, weight, bias), x @ plain.T + bias),
            (normed(x, norm, 1e-6, weight, None, residual), reference.rms_norm(x, norm, 1e-6) @ plain.T + residual),
            (gated(x, norm, 1e-6, weight, None), reference.norm_gate(x, norm, 1e-6, plain, None)),
        )
        for found, want in pairs:
            assert (found.float() - want.float()).norm() < 0.015 * want.float().norm(), rows


def test_a_graph_replays_it() -> None:
    """With other rows in the same place, and beside products of another matrix."""
    torch.manual_seed(0)
    form, n, k = Int4(128), 1024, 2048
    every = [form.quantise(torch.randn(n, k, device="cuda") * 0.02) for _ in range(2)]
    product = made("packed_linear", form, n, k)
    weights, x = [product.pack(one) for one in every], torch.randn(64, k, device="cuda").bfloat16()
    product(x, weights[0], None)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        found = [product(x, one, None) for one in weights]
    for seed in range(3):
        torch.manual_seed(seed)
        x.copy_(torch.randn(64, k, device="cuda"))
        graph.replay()
        for mine, tensors in zip(found, every, strict=True):
            want = x.float() @ form.dequantise(tensors, torch.float32).T
            assert (mine.float() - want).norm() < 0.01 * want.norm()
