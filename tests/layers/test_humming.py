"""The kernel set `humming` over a stand-in for the library that checks what that checks: CI does not install it."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Mapping
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from dovetail.contracts.device import DeviceView
from dovetail.contracts.errors import PluginError
from dovetail.contracts.kernels import Ask, Claim, make_ask
from dovetail.contracts.layers import RMSScale
from dovetail.plugins import Registry
from dovetail.sdk.layers.ops import reference
from dovetail.sdk.quantization.forms import Form, Int4, Mxfp4, Scaled
from dovetail_backends.kernels import humming
from dovetail_backends.kernels.humming import HummingKernels, HummingOptions
from dovetail_backends.kernels.triton import packed

HOPPER = DeviceView("cuda", capability=(9, 0))
N, K = 256, 384


class FakeLayer:
    """`humming.layer.HummingLayer`: nibbles lie in order, zero points along outputs."""

    def __init__(
        self, shape_n: int, shape_k: int, weight_config: dict[str, Any], input_config: Any = None, *, torch_dtype: Any
    ) -> None:
        assert (shape_n % 128, shape_k % 128) == (0, 0)
        assert weight_config.keys() == {"dtype", "group_size", "has_zero_point"}
        assert weight_config["dtype"] == "uint4"
        self.shape_n, self.shape_k, self.config, self.dtype = shape_n, shape_k, weight_config, torch_dtype
        self.input_config, self.humming_config, self.calls = input_config, SimpleNamespace(), list[int]()

    def to(self, device: torch.device) -> FakeLayer:
        """As a module."""
        return self

    def load_from_tensors(self, tensors: Mapping[str, Tensor]) -> None:
        """Take a matrix."""
        groups = self.shape_k // self.config["group_size"]
        want = {"weight": (torch.int32, (self.shape_n, self.shape_k // 8)),
                "weight_scale": (self.dtype, (self.shape_n, groups))}  # fmt: skip
        if self.config["has_zero_point"]:
            want["zero_point"] = torch.int32, (self.shape_n // 8, groups)
        assert {name: (one.dtype, tuple(one.shape)) for name, one in tensors.items()} == want
        assert all(one.is_contiguous() for one in tensors.values())
        self.tensors = dict(tensors)

    def transform(self) -> None:
        """Lay it out."""
        shifts = 4 * torch.arange(8, dtype=torch.int32)

        def unpacked(words: Tensor) -> Tensor:
            return ((words[..., None] >> shifts) & 15).flatten(-2).double()

        zero = unpacked(self.tensors["zero_point"].t()).t() if "zero_point" in self.tensors else torch.tensor([[8.0]])
        group = self.config["group_size"]
        scale, zero = (one.double().repeat_interleave(group, 1) if one.numel() > 1 else one
                       for one in (self.tensors["weight_scale"], zero))  # fmt: skip
        self.matrix = (unpacked(self.tensors["weight"]) - zero) * scale
        self.humming_config = SimpleNamespace(to_str=lambda: f"{self.shape_n} x {self.shape_k}")

    def __call__(self, x: Tensor) -> Tensor:
        """Multiply."""
        assert x.is_contiguous()
        assert x.dtype == self.dtype
        assert x.shape[1] == self.shape_k
        self.calls.append(len(x))
        return (x.double() @ self.matrix.t()).to(x.dtype)


@pytest.fixture
def prepared(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Install the stand-in; returns what kernels were compiled for."""
    found: list[str] = []
    modules = {name: ModuleType(name) for name in ("humming", "humming.kernel", "humming.kernel.humming")}
    modules["humming.layer"] = ModuleType("humming.layer")
    modules["humming.layer"].HummingLayer = FakeLayer  # type: ignore[attr-defined]
    kernel = SimpleNamespace(prepare_kernels=found.append)
    modules["humming.kernel.humming"].HummingKernel = kernel  # type: ignore[attr-defined]
    for name, module in modules.items():
        monkeypatch.setitem(sys.modules, name, module)
    monkeypatch.setattr(humming, "find_spec", lambda name: name)
    monkeypatch.setattr(torch.cuda, "device", lambda place: contextlib.nullcontext())
    return found


def kernels(**options: Any) -> HummingKernels:
    """The set with settings."""
    made = type("Set", (HummingKernels,), {"options": HummingOptions(**options)})
    return made()  # type: ignore[no-any-return]


def ask(
    op: str, form: Form, *, n: int = N, k: int = K, dtype: str = "float16", device: DeviceView = HOPPER,
    invariant: bool = False, act: str = "silu_and_mul",
) -> Ask:  # fmt: skip
    """The question for a place."""
    dims = {"F": n // 2, "K": k} if op == "packed_norm_gate" else {"N": n, "K": k}
    options = {"form": form, "act": act} if op == "packed_norm_gate" else {"form": form}
    return make_ask(op, device, dtype, dims, options, invariant=invariant, captured=True)


@pytest.mark.parametrize("rows", [0, 1, 5, 33, 300])
@pytest.mark.parametrize("form", [Int4(128), Int4(32, has_zero=True), Int4(64, torch.float16)], ids=str)
def test_products_are_those_of_the_matrix(form: Int4, rows: int, prepared: list[Any]) -> None:
    """With a bias, a norm, a gate and a residual; rows may be a view."""
    torch.manual_seed(0)
    tensors = form.quantise(torch.randn(N, K) * 0.05)
    plain = form.dequantise(tensors, torch.float16)
    x = torch.randn(K, rows).half().t()
    norm, bias, residual = torch.randn(K).half(), torch.randn(N).half(), torch.randn(rows, N).half()
    one = kernels(few_rows=0)
    product, normed, gated = (one.make(ask(op, form))
                              for op in ("packed_linear", "packed_norm_linear", "packed_norm_gate"))  # fmt: skip
    weight = product.pack(tensors)
    assert weight.few is None
    assert prepared == [f"{N} x {K}"]
    found = product(x, weight, bias), normed(x, norm, 1e-6, weight, bias, residual), gated(x, norm, 1e-6, weight, None)
    rms = reference.rms_norm(x, norm, 1e-6)
    want = x @ plain.T + bias, rms @ plain.T + bias + residual, reference.norm_gate(x, norm, 1e-6, plain, None)
    for mine, right in zip(found, want, strict=True):
        assert mine.shape == right.shape
        torch.testing.assert_close(mine, right, atol=2e-2, rtol=1e-2)


def test_few_rows_are_the_other_sets(prepared: list[Any], monkeypatch: pytest.MonkeyPatch) -> None:
    """A second copy serves as many rows as the setting says, whatever is around; none before Hopper."""
    calls: list[tuple[int, object, object]] = []

    def few(x: Tensor, weight: Any, bias: Any, *, norm: Any = None, act: Any = None, residual: Any = None) -> Tensor:
        calls.append((len(x), norm, act))
        return x.new_zeros(len(x), N)

    monkeypatch.setattr("dovetail_backends.kernels.humming_products.linear", few)
    form, one = Int4(128), kernels(few_rows=5)
    tensors = form.quantise(torch.randn(N, K))
    product, gated = (one.make(ask(op, form)) for op in ("packed_linear", "packed_norm_gate"))
    weight, norm = product.pack(tensors), torch.ones(K).half()
    assert isinstance(weight.few, packed.PackedWeight)
    for rows in (1, 5, 6):
        x = torch.randn(rows, K).half()
        product(x, weight, None)
        gated(x, norm, 1e-5, weight, None)
    assert [call[0] for call in calls] == [1, 1, 5, 5]
    assert calls[0][1:] == (None, None)
    assert isinstance(calls[1][1], RMSScale)
    assert calls[1][2] == "silu_and_mul"
    assert weight.layer.calls == [6, 6]
    old = one.make(ask("packed_linear", form, device=DeviceView("cuda", capability=(8, 6))))
    assert old.pack(tensors).few is None  # which that set has no kernels for


def test_rows_are_rounded_where_users_ask(prepared: list[Any]) -> None:
    """The library rounds them."""
    form = Int4(128)
    for activations, want in (("model", None), ("float8", {"dtype": "float8e4m3"})):
        product = kernels(few_rows=0, activations=activations).make(ask("packed_linear", form))
        assert product.pack(form.quantise(torch.randn(N, K))).layer.input_config == want


@pytest.mark.parametrize(
    ("changes", "why"),
    [
        ({"form": Scaled()}, "no kernel for Scaled"),
        ({"form": Mxfp4()}, "no kernel for Mxfp4"),
        ({"form": Int4(None)}, "no kernel for Int4"),
        ({"form": Int4(96)}, "no kernel for Int4"),
        ({"form": Int4(128), "dtype": "float32"}, "float32"),
        ({"form": Int4(128), "n": 200}, "200 outputs and 384 inputs are no multiples of 128"),
        ({"form": Int4(32), "k": 160}, "256 outputs and 160 inputs"),
        ({"form": Int4(128), "device": DeviceView("cuda", capability=(7, 5))}, "from compute capability 8.0 on"),
        ({"form": Int4(128), "device": DeviceView("cpu")}, "from compute capability 8.0 on"),
    ],
    ids=str,
)
def test_it_says_what_it_does_not_serve(changes: dict[str, Any], why: str, prepared: list[Any]) -> None:
    """In a line."""
    found = kernels().serves(ask("packed_linear", **changes))
    assert isinstance(found, str)
    assert why in found
    gate = kernels().serves(ask("packed_norm_gate", Int4(128), act="relu2"))
    assert gate == "no kernel for relu2"


def test_claims(prepared: list[Any]) -> None:
    """Graphs record it; rows that must not depend on one another are left to others."""
    assert kernels().serves(ask("packed_norm_gate", Int4(128), n=512)) == Claim((0, (1 << 31) - 1), capturable=True)
    assert "depend on how many" in str(kernels().serves(ask("packed_linear", Int4(64), invariant=True)))
    assert kernels().keeps_packed(ask("packed_linear", Int4(64)))
    assert not kernels().keeps_packed(ask("packed_linear", Int4(64), n=8))


def test_without_the_library_it_says_what_to_install() -> None:
    """`auto` does not load it then; where it is named, its package is missing."""
    assert "pip install 'dovetail-llm[humming]'" in str(kernels().serves(ask("packed_linear", Int4(128))))
    found = [one for one in Registry.scan().records if (one.kind, one.name) == ("kernels", "humming")]
    assert [one.facts.packages for one in found] == [("humming-kernels",)]


def test_a_library_that_cannot_compile_is_named(prepared: list[Any], monkeypatch: pytest.MonkeyPatch) -> None:
    """One line that says what else to do."""

    def fail(*_: object) -> None:
        raise RuntimeError("NVRTC is not there")

    monkeypatch.setattr(sys.modules["humming.kernel.humming"].HummingKernel, "prepare_kernels", fail)
    product = kernels(few_rows=0).make(ask("packed_linear", Int4(128)))
    with pytest.raises(PluginError, match=r"256 x 384 int4: NVRTC is not there.*--kernels triton"):
        product.pack(Int4(128).quantise(torch.randn(N, K)))
