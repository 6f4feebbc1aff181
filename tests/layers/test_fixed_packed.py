"""Packed products, and experts, of one tile and one order of sums: right, and the same bits in any company."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from dovetail.contracts.layers import RMSScale
from dovetail.runtime.device.devices import device_of
from dovetail.runtime.kernels.binding import KernelBinder, LoadedSet
from dovetail.sdk.layers.ops import mixture, reference
from dovetail.sdk.layers.routing import Routing
from dovetail.sdk.quantization.forms import Form, Int4, Mxfp4, Scaled
from dovetail_backends.kernels.triton import TritonKernels, fixed, fixed_packed, packed_few
from dovetail_backends.kernels.triton.launch import scratch
from dovetail_backends.kernels.triton.packed_slots import PackedExpertWeights
from dovetail_backends.kernels.triton.packed_weight import PackedWeight, weight_of

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
DTYPES = [torch.float32, torch.bfloat16] if DEVICE.type == "cuda" else [torch.float32, torch.float16]
"""Triton's interpreter multiplies bfloat16 matrices as if their bits were integers."""
FLOAT8 = torch.float8_e4m3fn
FORMS = [Scaled(FLOAT8), Scaled(FLOAT8, 128), Scaled(torch.int8, 40), Int4(128), Int4(32, has_zero=True), Mxfp4()]
COUNTS = (1, 2, 7, 16, 17, 33, 64, 65, 129, 257)
"""Numbers of rows: alone, a part of a tile, a whole one, and so many that one program goes through all inputs."""
MOST = max(COUNTS)
NUM, TOP_K, HIDDEN, INNER = 4, 2, 96, 64
pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")  # NumPy's, of numbers that are masked


def random(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float32) -> Tensor:
    """Random numbers on the test device."""
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(DEVICE, dtype)


def made(form: Form, weight: Tensor, dtype: torch.dtype) -> tuple[PackedWeight, Tensor]:
    """Quantise a weight; returns it packed for kernels, and written out by the form."""
    tensors = form.quantise(weight)
    return weight_of(form, tensors, dtype), form.dequantise(tensors, torch.float32)


def close(found: Tensor, want: Tensor) -> None:
    """Relative error of the whole tensor."""
    assert found.shape == want.shape
    most = 1e-5 if found.dtype == torch.float32 else 2e-2
    assert (found.double() - want.double()).norm() <= most * want.double().norm()


@pytest.fixture(autouse=True)
def in_order(monkeypatch: pytest.MonkeyPatch) -> None:
    """The interpreter sums products one input after the other, as tensor cores do at each place of a tile alike.

    By itself it calls NumPy's library, which takes columns at the end by other instructions on some processors.
    """
    interpreter = pytest.importorskip("triton.runtime.interpreter")

    def create_dot(builder: Any, a: Any, b: Any, d: Any, *_: Any) -> Any:
        left, right, total = a.data.astype(d.data.dtype), b.data.astype(d.data.dtype), np.zeros_like(d.data)
        for k in range(left.shape[1]):
            total += left[:, k : k + 1] * right[k : k + 1]
        return interpreter.TensorHandle(total + d.data, d.dtype.scalar)

    monkeypatch.setattr(interpreter.InterpreterBuilder, "create_dot", create_dot)


def same_in_any_company(compute: Callable[[slice], Tensor], whole: Tensor) -> None:
    """The last rows by themselves, of each number, have the bits that they have among all."""
    for num in COUNTS[:-1]:
        at = slice(MOST - num, MOST)
        assert torch.equal(compute(at), whole[at]), num


@pytest.mark.sampled("form")
@pytest.mark.parametrize("form", FORMS, ids=str)
@pytest.mark.parametrize("way", ["plain", "normed", "gated"])
@pytest.mark.parametrize("dtype", DTYPES)
def test_a_row_of_a_product(form: Form, way: str, dtype: torch.dtype) -> None:
    """At widths off the tiles: onto a residual with split inputs, behind a norm with a bias, and with a gate."""
    n, k = 74, 1280  # two splits of K or more, in either dtype
    weight, plain = made(form, random(n, k) / k**0.5, dtype)
    x, bias = random(MOST, k + 3, seed=1, dtype=dtype)[:, :k], random(n, seed=4, dtype=dtype)
    residual, scale = random(MOST, n, seed=2, dtype=dtype), random(k, seed=3, dtype=dtype)
    norm = RMSScale(scale, 1e-6)

    def compute(at: slice) -> Tensor:
        if way == "plain":
            return fixed_packed.linear(x[at], weight, None, residual=residual[at])
        act: Any = "silu_and_mul" if way == "gated" else None
        return fixed_packed.linear(x[at], weight, bias, norm=norm, act=act)

    whole, wide = compute(slice(None)), x.float()
    if way == "plain":
        close(whole, wide @ plain.T + residual.float())
    elif way == "normed":
        close(whole, reference.norm_linear(wide, scale.float(), 1e-6, plain, bias.float()))
    else:
        close(whole, reference.norm_gate(wide, scale.float(), 1e-6, plain, bias.float()))
    same_in_any_company(compute, whole)


def test_splits_are_summed_in_both_ways(monkeypatch: pytest.MonkeyPatch) -> None:
    """The rows above take splits apart and together: what is compared above is not the same kernel twice."""
    weight, _ = made(Scaled(FLOAT8), random(74, 640), torch.float32)
    seen: list[tuple[int, int]] = []

    def noted(device: torch.device, size: int, tiles: int) -> tuple[Tensor, Tensor]:
        seen.append((size, tiles))
        return scratch(device, size, tiles)

    monkeypatch.setattr(packed_few, "scratch", noted)
    for num in COUNTS:
        fixed_packed.linear(random(num, 640), weight, None)
    assert 0 < len(seen) < len(COUNTS)
    assert len({*seen}) <= fixed.FEW, "memory for sums does not grow with rows"


def choices(num: int) -> tuple[Tensor, Tensor]:
    """Different experts for each token, some of which nobody chooses, and shares."""
    generator = torch.Generator().manual_seed(3)
    ids = torch.stack([torch.randperm(NUM - 1, generator=generator)[:TOP_K] for _ in range(num)]).to(DEVICE)
    return ids, random(num, TOP_K, seed=5).abs()


WAYS: dict[str, dict[str, Any]] = {
    "plain": {"act": "silu_and_mul", "weigh": "output"},
    "input": {"act": "gelu_and_mul", "weigh": "input"},
    "clamped": {"act": "clamped_silu_and_mul", "weigh": "output", "bias": True},
}


@pytest.mark.sampled
@pytest.mark.parametrize("form", [None, Scaled(FLOAT8), Scaled(FLOAT8, 32), Int4(32), Mxfp4()], ids=str)
@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("dtype", DTYPES)
def test_a_row_of_experts(form: Form | None, way: str, dtype: torch.dtype) -> None:
    """Plain and packed, with biases and without, shares of outputs and of inputs, onto a residual."""
    how = dict(WAYS[way])
    has_bias, act, weigh = how.pop("bias", False), how["act"], how["weigh"]
    ups, downs = random(NUM, 2 * INNER, HIDDEN, seed=6) / 8, random(NUM, HIDDEN, INNER, seed=7) / 8
    up_bias = random(NUM, 2 * INNER, seed=8, dtype=dtype) if has_bias else None
    down_bias = random(NUM, HIDDEN, seed=9, dtype=dtype) if has_bias else None
    x, residual = random(MOST, HIDDEN, seed=1, dtype=dtype), random(MOST, HIDDEN, seed=2, dtype=dtype)
    ids, shares = choices(MOST)
    shares = shares.to(dtype)
    if form is None:
        plain_up, plain_down = ups.to(dtype).float(), downs.to(dtype).float()
        matrices = ups.to(dtype), up_bias, downs.to(dtype), down_bias
    else:
        (up, plain_up), (down, plain_down) = made(form, ups, dtype), made(form, downs, dtype)
        weights = PackedExpertWeights(up, down, up_bias, down_bias, 0, act, weigh == "input")

    def compute(at: slice) -> Tensor:
        given = x[at], ids[at], shares[at]
        if form is not None:
            return fixed_packed.gated_experts(*given, weights, residual[at])
        return fixed_packed.experts(*given, *matrices, residual[at], act=act, weigh=weigh, first=0, total=NUM)

    wide_bias = [None if one is None else one.float() for one in (up_bias, down_bias)]
    want = mixture.experts(
        x.float(), ids, shares.float(), plain_up, wide_bias[0], plain_down, wide_bias[1], residual.float(), act=act,
        weigh=weigh, first=0, total=NUM,
    )  # fmt: skip
    whole = compute(slice(None))
    close(whole, want)
    same_in_any_company(compute, whole)


ROUTINGS = {
    "softmax": Routing(num=8, top_k=2, score="softmax", normalise=True),
    "chosen": Routing(num=8, top_k=4, score="chosen", bias=True),
    "sigmoid": Routing(num=8, top_k=3, score="sigmoid", correction=True, groups=2, top_groups=1),
}


def bound(op: str, name: str, dims: dict[str, int], **options: Any) -> tuple[Any, str]:
    """Bind an operation as an engine with `--batch-invariant` does; returns it, and what serves it."""
    binder = KernelBinder([LoadedSet("triton", "triton", TritonKernels(), True)], device_of(DEVICE).view)
    kernel = binder.bind(binder.ask(op, name, dims, options, invariant=True))
    return kernel, {use.operation.split()[0]: use.served[0][2] for use in binder.table}[op]


@pytest.mark.parametrize("which", ROUTINGS)
@pytest.mark.parametrize("dtype", DTYPES)
def test_a_row_of_a_router(which: str, dtype: torch.dtype) -> None:
    """Put together of a norm, a product and a choice, each of which has rows of its own."""
    routing = ROUTINGS[which]
    kernel, by = bound("norm_route", str(dtype).removeprefix("torch."), {"H": HIDDEN}, routing=routing, dtype=dtype)
    assert by == "composed"
    x, weight, norm = (random(*shape, dtype=dtype) for shape in ((65, HIDDEN), (8, HIDDEN), (HIDDEN,)))
    bias = random(8, seed=1, dtype=dtype) if routing.bias else None
    correction = random(8, seed=2) if routing.correction else None
    whole = kernel(x, norm, 1e-6, weight, bias, correction, 1.0)
    for num in (1, 2, 7, 16, 17, 33, 64):
        found = kernel(x[-num:], norm, 1e-6, weight, bias, correction, 1.0)
        for one, all_rows in zip(found, whole, strict=True):
            assert torch.equal(one, all_rows[-num:]), num


def test_logits_in_float32() -> None:
    """A wide product of numbers of 16 bits is not rounded to them."""
    dtype = DTYPES[1]
    x, weight = random(70, HIDDEN, dtype=dtype), random(8, HIDDEN, seed=1, dtype=dtype)
    found = fixed.wide_linear(x, weight, None)
    assert found.dtype == torch.float32
    torch.testing.assert_close(found.double(), x.double() @ weight.double().T, rtol=1e-5, atol=1e-4)


@pytest.mark.parametrize(
    ("op", "dims", "options"),
    [
        ("packed_linear", {"N": 64, "K": 64}, {"form": Scaled(FLOAT8)}),
        ("packed_norm_linear", {"N": 64, "K": 64}, {"form": Int4(32)}),
        ("packed_norm_gate", {"F": 64, "K": 64}, {"form": Mxfp4(), "act": "silu_and_mul"}),
        ("wide_linear", {"N": 64, "K": 64}, {}),
        ("experts", {"E": 4, "H": 64, "I": 64, "C": 2},
         {"act": "silu_and_mul", "weigh": "output", "first": 0, "total": 4}),
        ("packed_experts", {"E": 4, "H": 64, "I": 64, "C": 2},
         {"forms": (Mxfp4(), Mxfp4()), "act": "silu_and_mul", "weigh": "output", "first": 0}),
    ],
    ids=lambda given: given if isinstance(given, str) else "",
)  # fmt: skip
def test_the_set_claims_them(op: str, dims: dict[str, int], options: dict[str, Any]) -> None:
    """An engine takes these kernels, and not what an operation is put together of."""
    kernel, by = bound(op, "float32", dims, **options)
    assert by == "triton"
    module = getattr(kernel, "func", kernel)
    assert "fixed" in getattr(module, "__module__", type(kernel).__module__)


@pytest.mark.parametrize("form", [Scaled(FLOAT8), Mxfp4()], ids=str)
def test_no_rows(form: Form) -> None:
    """Nothing is computed of nothing."""
    weight, _ = made(form, random(64, 64), torch.float32)
    none = torch.empty(0, 64, device=DEVICE)
    assert fixed_packed.linear(none, weight, None).shape == (0, 64)
    assert fixed_packed.linear(none, weight, None, act="silu_and_mul").shape == (0, 32)
