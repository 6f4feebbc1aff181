"""Products with packed weights give the written-out weight's result on CUDA, with the tiles that layers use."""

from __future__ import annotations

import pytest
import torch

from dovetail.contracts.kernels import make_ask
from dovetail.contracts.layers import RMSScale
from dovetail.runtime.device.devices import device_of
from dovetail.sdk.layers.ops import reference
from dovetail.sdk.quantization.forms import Form, Int4, Mxfp4, Scaled
from dovetail_backends.kernels.triton import TritonKernels, packed
from dovetail_backends.kernels.triton.experts import ExpertWeights, gated_experts
from dovetail_backends.kernels.triton.packed_experts import packed_gated_experts
from dovetail_backends.kernels.triton.packed_pairs import by_pairs, fits_pairs
from dovetail_backends.kernels.triton.packed_slots import PackedExpertWeights
from dovetail_backends.kernels.triton.packed_stacked import by_stacked
from dovetail_backends.kernels.triton.packed_weight import PackedWeight, stacked, weight_of

pytestmark = pytest.mark.gpu
FLOAT8 = torch.float8_e4m3fn


@pytest.mark.parametrize(
    "form",
    [
        Scaled(FLOAT8),
        Scaled(FLOAT8, 128),
        Scaled(FLOAT8, activations=FLOAT8),
        Scaled(),
        Int4(128),
        Int4(128, has_zero=True),
        Int4(64, has_zero=True),
        Int4(32),
        Mxfp4(),
    ],
    ids=str,
)
@pytest.mark.parametrize(("n", "k"), [(6144, 4096), (1152, 896), (2880, 2880), (200, 640)])
@pytest.mark.parametrize("rows", [1, 2, 4, 16, 33, 64, 65, 100, 200, 300, 513, 1500])
def test_products(form: Form, n: int, k: int, rows: int) -> None:
    """Onto a residual, and behind a norm with a gate."""
    if getattr(form, "group", None) and k % form.group:  # type: ignore[attr-defined]
        pytest.skip("groups do not divide the inputs")
    torch.manual_seed(0)
    tensors = form.quantise(torch.randn(n, k, device="cuda") * 0.02)
    weight = weight_of(form, tensors, torch.bfloat16)
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
        rounds = getattr(form, "activations", None) is not None
        assert error.max() < (0.25 if rounds else 0.1)
        assert (found - want).norm() < (0.06 if rounds else 0.015) * want.norm()


@pytest.mark.parametrize(
    "form", [Scaled(FLOAT8), Scaled(), Scaled(torch.int8, 8), Int4(None), Int4(96, has_zero=True)], ids=str
)
@pytest.mark.parametrize(("n", "k"), [(136, 288), (72, 1000)])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
def test_odd_sizes(form: Form, n: int, k: int, dtype: torch.dtype) -> None:
    """No multiples of tiles or blocks, a scale for a row or for unusual groups, and every dtype of models."""
    if getattr(form, "group", None) and k % form.group:  # type: ignore[attr-defined]
        pytest.skip("groups do not divide the inputs")
    torch.manual_seed(0)
    tensors = form.quantise(torch.randn(n, k, device="cuda") * 0.02)
    weight = weight_of(form, tensors, dtype)
    plain = form.dequantise(tensors, torch.float64)
    norm = torch.randn(k, device="cuda").to(dtype)
    for rows in (1, 3, 5, 17, 33, 65, 129, 257, 700):
        x, residual = (torch.randn(rows, size, device="cuda").to(dtype) for size in (k, n))
        torch.cuda.synchronize()
        found = packed.linear(x, weight, None, residual=residual)
        gated = packed.linear(x, weight, None, norm=RMSScale(norm, 1e-6), act="silu_and_mul")
        want = residual.double() + x.double() @ plain.T
        want_gated = reference.norm_gate(x.double(), norm.double(), 1e-6, plain, None)
        most = 2e-3 if dtype == torch.float32 else 0.015
        assert (found.double() - want).norm() < most * want.norm(), rows
        assert (gated.double() - want_gated).norm() < most * want_gated.norm(), rows


@pytest.mark.parametrize(("n", "k"), [(6144, 4096), (384, 512), (1152, 3072)])
def test_rounded_blocks(n: int, k: int) -> None:
    """Scales of 128 x 128 meet rows with scales of 128 inputs, at any number of rows, within what rounding loses."""
    torch.manual_seed(0)
    form = Scaled(FLOAT8, 128, FLOAT8)
    scale = (torch.rand(n // 128, k // 128, device="cuda") + 0.1) / 300
    tensors = {
        "weight": torch.randn(n, k, device="cuda").to(FLOAT8),
        "weight_scale": scale.repeat_interleave(128, 0).contiguous(),
    }
    weight = weight_of(form, tensors, torch.bfloat16)
    assert weight.block_scale is not None
    plain = form.dequantise(tensors, torch.float64)
    norm = torch.randn(k, device="cuda").bfloat16()
    for rows in (1, 64, 65, 66, 67, 100, 129, 257, 1000, 4097):
        x, residual = (torch.randn(rows, size, device="cuda").bfloat16() for size in (k, n))
        torch.cuda.synchronize()
        found = packed.linear(x, weight, None, residual=residual.clone())
        gated = packed.linear(x, weight, None, norm=RMSScale(norm, 1e-6), act="silu_and_mul")
        want = residual.double() + x.double() @ plain.T
        want_gated = reference.norm_gate(x.double(), norm.double(), 1e-6, plain, None)
        assert (found.double() - want).norm() < 0.045 * want.norm(), rows
        assert (gated.double() - want_gated).norm() < 0.065 * want_gated.norm(), rows
        if rows > 64:  # against rows that are rounded by hand: only the order of sums is left
            parts = x.double().unflatten(-1, (-1, 128))
            by = parts.abs().amax(-1, keepdim=True) / 448
            near = ((parts / by).float().to(FLOAT8).double() * by).flatten(-2)
            right = residual.double() + near @ plain.T
            assert (found.double() - right).norm() < 0.005 * right.norm(), rows


def test_groups_without_kernels() -> None:
    """Where scales are for fewer inputs than half a block, there is no packed weight."""
    view = device_of(torch.device("cuda")).view
    ask = make_ask("packed_linear", view, "bfloat16", {"N": 64, "K": 128}, {"form": Int4(16)})
    assert TritonKernels().serves(ask) == "no kernel for int4 in groups of 16"


@pytest.mark.parametrize("form", [Scaled(FLOAT8), Scaled(FLOAT8, 128)], ids=str)
@pytest.mark.parametrize("rows", [65, 200])
def test_pairs(form: Form, rows: int) -> None:
    """K split or not, and by the library: the error is that of rounding, with outliers among the inputs."""
    torch.manual_seed(0)
    tensors = form.quantise(torch.randn(1008, 1152, device="cuda") * 0.02)
    weight = weight_of(form, tensors, torch.bfloat16)
    assert fits_pairs(weight)
    x = torch.randn(rows, 1152, device="cuda").bfloat16()
    x[:40, 70] *= 300
    torch.cuda.synchronize()
    want = x.double() @ form.dequantise(tensors, torch.float32).double().T
    tiles = ((128, (128, 128, 8, 4, 1)), (128, (128, 128, 8, 4, 3)), (64, (64, 128, 4, 3, 2)))
    found = [by_pairs(x, weight, None, tile).double() for tile in tiles]
    found += [by_stacked(x, weight, None).double()] if weight.groups == 0 else []
    for one in found:
        assert one.isfinite().all()
        assert ((one - want).norm(dim=1) / want.norm(dim=1)).max() < 4e-3


def experts(form: Form, num: int, n: int, k: int) -> tuple[PackedWeight, torch.Tensor]:
    """Matrices of experts with scales from tiny to large, packed and written out."""
    made, plain = [], []
    for expert in range(num):
        spread = torch.logspace(-2, 2, k, device="cuda")[None, :] * torch.logspace(-3, 0, n, device="cuda")[:, None]
        tensors = form.quantise(torch.randn(n, k, device="cuda") * 0.02 * (1 + expert) * spread)
        weight = weight_of(form, tensors, torch.bfloat16)
        made.append(weight)
        plain.append(form.dequantise(tensors, torch.bfloat16))
    return stacked(made), torch.stack(plain)


@pytest.mark.parametrize("form", [Scaled(FLOAT8, 128), Int4(32, has_zero=True), Int4(128), Mxfp4()], ids=str)
@pytest.mark.parametrize(("hidden", "inner"), [(2880, 2880), (640, 384)])
@pytest.mark.parametrize("tokens", [1, 3, 4, 5, 16, 17, 40, 300])
def test_experts(form: Form, hidden: int, inner: int, tokens: int) -> None:
    """Each choice by itself, sorted, and written out, with biases and a choice that another rank has."""
    if getattr(form, "group", None) and hidden % form.group:  # type: ignore[attr-defined]
        pytest.skip("groups do not divide the inputs")
    torch.manual_seed(0)
    num, top_k = 6, 4
    gate_up, plain_gate_up = experts(form, num, 2 * inner, hidden)
    down, plain_down = experts(form, num, hidden, inner)
    biases = tuple(torch.randn(num, size, device="cuda").bfloat16() for size in (2 * inner, hidden))
    x, residual = (torch.randn(tokens, hidden, device="cuda").bfloat16() for _ in range(2))
    ids = torch.rand(tokens, num + 1, device="cuda").topk(top_k).indices
    shares = torch.rand(tokens, top_k, device="cuda").bfloat16()
    torch.cuda.synchronize()
    want = gated_experts(
        x, ids, shares, ExpertWeights(plain_gate_up, plain_down, *biases, 0, "silu_and_mul", False), residual
    )
    weights = PackedExpertWeights(gate_up, down, *biases, 0, "silu_and_mul", False)
    for is_few in (True, False) if tokens <= 17 else (None,):
        found = packed_gated_experts(x, ids, shares, weights, residual, is_few=is_few)
        assert (found - want).float().norm() < 0.015 * want.float().norm()
