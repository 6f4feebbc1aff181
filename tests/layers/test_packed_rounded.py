"""Rows rounded to float8 before a product with float8 weights, where a quantisation allows that; in the interpreter."""

from __future__ import annotations

from typing import Any, get_args

import pytest
import torch
from torch import Tensor

from dovetail.contracts.layers import Act, RMSScale
from dovetail.sdk.layers.ops import reference
from dovetail.sdk.quantization.forms import Scaled
from dovetail_backends.kernels.triton import packed
from dovetail_backends.kernels.triton.norms import rms_norm
from dovetail_backends.kernels.triton.packed_rounded import LEAST_ROWS, MOST_ENDED, by_rounded, fits_rounded, rounded
from dovetail_backends.kernels.triton.packed_weight import PackedWeight, weight_of

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
FLOAT8 = torch.float8_e4m3fn
ROUNDING = Scaled(FLOAT8, activations=FLOAT8)
pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")  # numpy's, where the interpreter divides by zero


def random(*shape: int, seed: int = 0, dtype: torch.dtype = torch.bfloat16) -> Tensor:
    """Random numbers on the test device."""
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(DEVICE, dtype)


def far(found: Tensor, want: Tensor) -> float:
    """Relative error of the whole tensor."""
    assert found.shape == want.shape
    return float((found.double() - want.double()).norm() / want.double().norm())


def made(n: int, k: int, form: Scaled = ROUNDING) -> tuple[PackedWeight, Tensor]:
    """A weight, packed for kernels, and written out in float32."""
    tensors = form.quantise(random(n, k, dtype=torch.float32))
    return weight_of(form, tensors, torch.bfloat16), form.dequantise(tensors, torch.float32)


def nearest(x: Tensor, group: int) -> Tensor:
    """Rows rounded to float8 with a scale for each group, in float64, written down independently of the kernel."""
    parts = x.double().unflatten(-1, (-1, group))
    scale = (parts.abs().amax(-1, keepdim=True) / 448).clamp_min(1e-12)
    return ((parts / scale).float().to(FLOAT8).double() * scale).flatten(-2)


@pytest.mark.parametrize(("k", "group"), [(300, 0), (256, 0), (384, 128)])
def test_rows_are_rounded_to_the_nearest(k: int, group: int) -> None:
    """Whatever a row's size; a row of zeros stays one, one that is not finite does not become finite."""
    x = random(9, k, seed=1) * torch.logspace(-9, 30, 9, device=DEVICE).bfloat16()[:, None]
    x[3] = 0
    numbers, scale = rounded(x, group)
    if group:  # to a number of rows that the library takes
        assert len(numbers) == len(scale) == 12
        numbers, scale = numbers[:9], scale[:9]
    assert scale.shape == (9, k // group if group else 1)
    spread = scale.double().repeat_interleave(group or k, dim=1)
    want = nearest(x, group or k)
    # A number halfway between two may go to either where the division is in float32.
    step = spread * 32
    assert ((numbers.double() * spread - want).abs() <= step * 1.01).all()
    assert far(numbers.double() * spread, want) < 5e-3
    assert (numbers[3].float() == 0).all()
    bad = random(2, k, seed=2)
    bad[1, 5] = torch.nan
    assert rounded(bad, group)[1][:2].isfinite().all(1).tolist() == [True, False]


@pytest.mark.parametrize("rows", [1, 40, MOST_ENDED + 3])
@pytest.mark.parametrize("act", [None, *(act for act in get_args(Act) if act != "relu2")])
def test_products(rows: int, act: Act | None) -> None:
    """Few rows, whose scales a kernel brings in, and many, where the library does: with norm, bias, gate, residual."""
    weight, plain = made(96, 272)
    x, norm, bias = random(rows, 272, seed=1), random(272, seed=3), random(96, seed=4)
    residual = random(rows, 48 if act else 96, seed=2)
    around: dict[str, Any] = {"norm": norm, "eps": 1e-6, "act": act}
    found = by_rounded(x, weight, bias, residual=residual.clone(), **around)
    normed = nearest(rms_norm(x, norm, 1e-6), 272)  # the kernel's norm, which the interpreter cuts off alike
    want = normed @ plain.double().T + bias.double()
    if act:
        want = reference.act_and_mul(want.bfloat16(), act=act).double()
    assert far(found, want + residual.double()) < 1.6e-2


def test_only_forms_that_say_so_are_rounded() -> None:
    """And of these, only many rows of bfloat16."""
    weight, plain = made(96, 272)
    exact, _ = made(96, 272, Scaled(FLOAT8))
    assert fits_rounded(weight)
    assert not fits_rounded(exact)
    for rows in (LEAST_ROWS - 1, LEAST_ROWS):
        x = random(rows, 272, seed=5)
        norm = RMSScale(random(272, seed=3), 1e-6)
        exactly = reference.rms_norm(x, norm.weight, norm.eps).double() @ plain.double().T
        off = far(packed.linear(x, weight, None, norm=norm), exactly)
        assert (off > 1e-2) == (rows >= LEAST_ROWS)
        assert far(packed.linear(x, exact, None, norm=norm), exactly) < 1e-2


@pytest.mark.parametrize(("n", "k"), [(90, 256), (96, 264)])
def test_shapes_that_the_library_does_not_multiply(n: int, k: int) -> None:
    """Go on being multiplied exactly."""
    weight, plain = made(n, k)
    assert not fits_rounded(weight)
    x = random(70, k, seed=1)
    assert far(packed.linear(x, weight, None), x.double() @ plain.double().T) < 1e-2
