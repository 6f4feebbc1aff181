"""Hundreds of rows as two float8 numbers each equal the written-out weight; on CPU in Triton's interpreter."""

from __future__ import annotations

from typing import Any, get_args

import pytest
import torch
from torch import Tensor

from dovetail.contracts.layers import Act, RMSScale
from dovetail.sdk.layers.ops import reference
from dovetail.sdk.quantization.forms import Form, Scaled
from dovetail_backends.kernels.triton import packed
from dovetail_backends.kernels.triton.launch import Tile
from dovetail_backends.kernels.triton.packed_halves import halves
from dovetail_backends.kernels.triton.packed_pairs import by_pairs, fits_pairs
from dovetail_backends.kernels.triton.packed_stacked import by_stacked, fits_stacked
from dovetail_backends.kernels.triton.packed_weight import PackedWeight, weight_of

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
FLOAT8 = torch.float8_e4m3fn
FORMS = [Scaled(FLOAT8), Scaled(FLOAT8, 128), Scaled(FLOAT8, 256)]
pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")  # numpy's, where the interpreter divides by zero


def random(*shape: int, seed: int = 0, dtype: torch.dtype = torch.bfloat16) -> Tensor:
    """Random numbers on the test device."""
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(DEVICE, dtype)


def made(form: Form, weight: Tensor) -> tuple[PackedWeight, Tensor]:
    """Quantise a weight; returns it packed for kernels, and written out by the form in float32."""
    tensors = form.quantise(weight)
    assert isinstance(form, Scaled)
    return weight_of(form, tensors, torch.bfloat16), form.dequantise(tensors, torch.float32)


def far(found: Tensor, want: Tensor) -> float:
    """Relative error of the whole tensor."""
    assert found.shape == want.shape
    return float((found.double() - want.double()).norm() / want.double().norm())


def stored(want: Tensor) -> Tensor:
    """In bfloat16, as a kernel stores it: rounded by a GPU, cut off by the interpreter."""
    if DEVICE.type == "cuda":
        return want.bfloat16()
    return (want.float().view(torch.int32) & -0x10000).view(torch.float32).bfloat16()


@pytest.mark.sampled
@pytest.mark.parametrize("form", FORMS, ids=str)
@pytest.mark.parametrize(("rows", "k", "splits"), [(70, 512, 2), (17, 384, 1), (65, 256, 1)])
def test_products(form: Form, rows: int, k: int, splits: int) -> None:
    """With a bias onto a residual, at numbers of rows and outputs off the tiles: only the result is rounded."""
    if getattr(form, "group", None) and k % (form.group or 1):  # type: ignore[attr-defined]
        k = 512
    weight, plain = made(form, random(74, k, dtype=torch.float32))
    assert fits_pairs(weight)
    x, residual, bias = random(rows, k, seed=1), random(rows, 74, seed=2), random(74, seed=4)
    found = by_pairs(x, weight, bias, (32, (32, 128, 4, 2, splits)), residual=residual)
    want = stored(stored(x.double() @ plain.double().T + bias.double()).float() + residual.float())
    assert far(found, want) < 4e-4  # some are cut off on the other side of a number


@pytest.mark.parametrize("form", [Scaled(FLOAT8), Scaled(FLOAT8, 128)], ids=str)
def test_layers_multiply_hundreds_of_rows_so(form: Form) -> None:
    """With the tile that is chosen, behind a norm and with a gate onto a residual."""
    weight, plain = made(form, random(80, 384, dtype=torch.float32))
    x, norm, residual = random(70, 384, seed=1), random(384, seed=3), random(70, 40, seed=2)
    found = packed.linear(x, weight, None, norm=RMSScale(norm, 1e-6), act="silu_and_mul", residual=residual)
    want = reference.norm_gate(x.float(), norm.float(), 1e-6, plain, None) + residual.float()
    assert far(found, want) < 3e-2
    assert far(packed.linear(x, weight, None), stored(x.double() @ plain.double().T)) < 4e-4


@pytest.mark.parametrize(
    ("n", "k", "rows", "gate", "tile"),
    [
        (6144, 4096, 65, False, (128, (128, 128, 8, 4, 2))),
        (6144, 4096, 256, False, (128, (128, 128, 8, 4, 1))),
        (4096, 14336, 128, False, (128, (128, 128, 8, 4, 4))),
        (4096, 4096, 129, False, (128, (128, 128, 8, 4, 2))),
        (4096, 4096, 512, False, (128, (128, 128, 8, 4, 1))),
        (28672, 4096, 256, True, (128, (128, 128, 8, 3, 1))),
        (28672, 4096, 257, True, (64, (64, 128, 4, 3, 1))),
    ],
)
def test_tiles_are_those_that_were_measured(n: int, k: int, rows: int, gate: bool, tile: tuple[int, Tile]) -> None:
    """At the sites of an 8B model's layer."""
    weight = PackedWeight("scaled", torch.empty(0), None, None, None, 0, n, k)
    assert packed.pairs_tile(weight, rows, gate=gate) == tile


@pytest.mark.first(2)
@pytest.mark.parametrize("act", [None, *get_args(Act)])
def test_stacked_halves(act: Act | None) -> None:
    """By the library's product: scales of outputs, bias, gate and residual are those of the other kernels."""
    weight, _ = made(Scaled(FLOAT8), random(96, 272, dtype=torch.float32))
    assert fits_stacked(weight)
    x, norm, bias = random(67, 272, seed=1), random(272, seed=3), random(96, seed=4)
    around: dict[str, Any] = {"norm": norm, "eps": 1e-6, "act": act, "residual": random(67, 48 if act else 96, seed=2)}
    found = by_stacked(x, weight, bias, **around)
    assert far(found, by_pairs(x, weight, bias, (32, (32, 128, 4, 2, 1)), **around)) < 1e-3


@pytest.mark.parametrize(("n", "k", "group"), [(90, 256, None), (96, 264, None), (96, 256, 128)])
def test_other_weights_are_not_stacked(n: int, k: int, group: int | None) -> None:
    """Outputs or inputs that 16 does not divide, and groups, which the library does not multiply."""
    weight, plain = made(Scaled(FLOAT8, group), random(n, k, dtype=torch.float32))
    assert not fits_stacked(weight)
    x = random(65, k, seed=1)
    assert far(packed.linear(x, weight, None), stored(x.double() @ plain.double().T)) < 1e-3


def test_halves_keep_what_bfloat16_rows_hold() -> None:
    """Numbers from 2 ** -9 of a row's greatest on are exact, others within 2 ** -17 of it, whatever a row's size."""
    x = random(9, 300, seed=1) * torch.logspace(-30, 30, 9, device=DEVICE).bfloat16()[:, None]
    x[:, 7] *= 4096
    x[3], x[4, 1:] = 0, 0
    made_of = halves(x)
    back = made_of.numbers.double().sum(0) * made_of.scale[:, None].double()
    most = x.double().abs().amax(-1, keepdim=True)
    assert ((back - x.double()).abs() <= 2.0**-17 * most).all()
    large = x.double().abs() >= 2.0**-9 * most
    assert (back == x.double())[large].all()


@pytest.mark.parametrize("form", FORMS, ids=str)
def test_zero_extreme_scales_and_outliers(form: Form) -> None:
    """Outputs of tiny and huge weights, one of zeros, and rows of which one number is the greatest by far."""
    spread = torch.logspace(-9, 9, 74, device=DEVICE)[:, None] * (torch.arange(74, device=DEVICE) != 3)[:, None]
    weight, plain = made(form, random(74, 512, dtype=torch.float32) * spread)
    x = random(66, 512, seed=1) * torch.logspace(-12, 12, 66, device=DEVICE).bfloat16()[:, None]
    x[5] = 0
    x[6:40, 300] *= 1000
    found = by_pairs(x, weight, None, (32, (32, 128, 4, 2, 1)))
    want = x.double() @ plain.double().T
    assert not found[:, 3].any()
    assert not found[5].any()
    usual = plain.double().norm(dim=1).clamp_min(1e-30)[None, :] * x.double().norm(dim=1).clamp_min(1e-30)[:, None]
    assert far(found.double() / usual, stored(want).double() / usual) < 1e-3


def test_a_row_that_is_not_finite_stays_so_alone() -> None:
    """Rows beside one with nan or an infinity are what they are without it."""
    weight, _ = made(Scaled(FLOAT8, 128), random(74, 256, dtype=torch.float32))
    x = random(70, 256, seed=1)
    want = by_pairs(x, weight, None, (32, (32, 128, 4, 2, 1)))
    x[4, 7], x[20, 200] = float("nan"), float("inf")
    found = by_pairs(x, weight, None, (32, (32, 128, 4, 2, 1)))
    assert found[[4, 20]].isnan().all()
    others = [row for row in range(70) if row not in (4, 20)]
    assert torch.equal(found[others], want[others])
