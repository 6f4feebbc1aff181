"""Quantisations with one fault each: the kit names every fault."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from functools import partial
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from dovetail.contracts.layers import LayerFactory, MatrixSpec, Stream
from dovetail.contracts.quantization import Conversion, FileTensor, Quantization, Stored, Target
from dovetail.sdk.layers.matrix import Matrix
from dovetail_testing import check_class
from dovetail_testing.conformance.quantization import QuantizationConformance


class RightLinear(Matrix):
    """Bytes around 128 with a scale a row."""

    def __init__(self, ctx: Any, spec: MatrixSpec) -> None:
        super().__init__(ctx, spec.path, spec.in_features, spec.parts, spec.shard)
        self.bias = None
        self.gate = None if spec.act is None else ctx.operation("act_and_mul", F=self.local_out // 2, act=spec.act)
        self.store("weight", torch.uint8)
        self.store("weight_scale", torch.float32, granule=spec.in_features)
        if spec.bias:
            self.store("bias", ctx.dtype, granule=None)

    def finalize(self) -> None:
        if self.is_share and self.parallel.rank > 0:
            self.bias = None

    def written_out(self, dtype: torch.dtype) -> Tensor:
        weight, scale = self.get_parameter("weight"), self.get_parameter("weight_scale")
        return ((weight.float() - 128) * scale).to(dtype)

    def forward(self, x: Any, *, norm: Any = None, add: Stream | None = None, scale: float = 1.0) -> Any:
        x = x.total() if isinstance(x, Stream) else x
        x = x if norm is None else norm(x)
        y = F.linear(x, self.written_out(x.dtype), self.bias)
        return self.finish(y if self.gate is None else self.gate(y), add, scale)


class Right(Quantization):
    linear_class: type[Matrix] = RightLinear

    @classmethod
    def why_not(cls, config: Mapping[str, Any]) -> str | None:
        return None if config.get("quant_method") == "bytes" else "it reads bytes"

    def factory(self, plain: LayerFactory) -> LayerFactory:
        return Factory(self.stored, plain, self.linear_class)


class Factory:
    def __init__(self, stored: Stored, plain: LayerFactory, linear_class: Any) -> None:
        self.stored, self.plain, self.linear_class = stored, plain, linear_class

    def linear(self, ctx: Any, spec: Any) -> Any:
        if self.stored.is_known and "U8" not in self.stored.dtypes(spec.path):
            return self.plain.linear(ctx, spec)
        return self.linear_class(ctx, spec)

    def experts(self, ctx: Any, spec: Any) -> Any:
        from dovetail.contracts.errors import ModelError

        raise ModelError(f"{spec.path}: experts are not read")


def with_linear(**methods: Any) -> type[Quantization]:
    """The right one, with a matrix that differs."""
    return type("Broken", (Right,), {"linear_class": type("BrokenLinear", (RightLinear,), methods)})


def forward_without_norm(self: RightLinear, x: Any, *, norm: Any = None, add: Any = None, scale: float = 1.0) -> Any:
    return RightLinear.forward(self, x, add=add, scale=scale)


def forward_without_scale(self: RightLinear, x: Any, *, norm: Any = None, add: Any = None, scale: float = 1.0) -> Any:
    return RightLinear.forward(self, x, norm=norm, add=add)


def forward_up_to_nine(self: RightLinear, x: Any, *, norm: Any = None, add: Any = None, scale: float = 1.0) -> Any:
    """Right up to 9 tokens."""
    y = RightLinear.forward(self, x, norm=norm, scale=scale)
    y[9:] = 0
    return y if add is None else self.finish(y, add, 1.0)


def one_scale(self: RightLinear, dtype: torch.dtype) -> Tensor:
    """All rows by the largest one's scale."""
    weight, scale = self.get_parameter("weight"), self.get_parameter("weight_scale")
    return ((weight.float() - 128) * scale.max()).to(dtype)


def finalize_keeping_bias(self: RightLinear) -> None:
    return None


def finalize_writing_out(self: RightLinear) -> None:
    self.copy = nn.Parameter(self.written_out(torch.float32), requires_grad=False)
    RightLinear.finalize(self)


class TakesAll(Right):
    @classmethod
    def why_not(cls, config: Mapping[str, Any]) -> str | None:
        return None


class Raises(Right):
    @classmethod
    def why_not(cls, config: Mapping[str, Any]) -> str | None:
        return None if config["quant_method"] == "bytes" else "it reads bytes"


class CoversAll(Right):
    def factory(self, plain: LayerFactory) -> LayerFactory:
        return Factory(Stored({}, is_known=False), plain, RightLinear)


class NeedsACheckpoint(Right):
    def factory(self, plain: LayerFactory) -> LayerFactory:
        if not self.stored.is_known:
            raise LookupError("no checkpoint")
        return super().factory(plain)


class Turned(Right):
    """The right one, for files that hold matrices `[K, N]` with the scale and a zero for each 32 inputs of all rows."""

    zero: float = 128
    along: int = 32
    dtype: str = "F32"

    @classmethod
    def conversions(
        cls, config: Mapping[str, Any], tensors: Mapping[str, FileTensor], target: Target
    ) -> Iterator[Conversion]:
        for name, tensor in tensors.items():
            if name.endswith(".turned"):
                weight = name.removesuffix("turned") + "weight"
                made = FileTensor(weight, cls.dtype, (tensor.shape[1], tensor.shape[0]), tensor.path)
                yield Conversion((name, f"{name}_scale"), (made,), partial(cls.written, weight))

    @classmethod
    def written(cls, weight: str, tensors: Mapping[str, Tensor]) -> Mapping[str, Tensor]:
        turned, scale = (tensors[name] for name in sorted(tensors))
        wide = scale.repeat_interleave(cls.along, dim=0)
        wide = torch.cat((wide, wide[-1:].expand(turned.shape[0], -1)))[: turned.shape[0]]
        return {weight: ((turned.float() - cls.zero) * wide).T.contiguous()}

    def factory(self, plain: LayerFactory) -> LayerFactory:
        return plain


def turned(**attrs: Any) -> type[Quantization]:
    """The one above, with what differs."""
    return type("Broken", (Turned,), attrs)


def zeros_and_scales_swapped(cls: Any, weight: str, tensors: Mapping[str, Tensor]) -> Mapping[str, Tensor]:
    made = Turned.written(weight, tensors)
    return {name: tensor.flip(0) for name, tensor in made.items()}


class Kit(QuantizationConformance):
    """How the right one packs."""

    config = {"quant_method": "bytes"}
    has_experts = False

    def pack(self, weight: Tensor) -> Mapping[str, Tensor]:
        scale = weight.abs().amax(1, keepdim=True) / 127
        return {".weight": ((weight / scale).round() + 128).to(torch.uint8), ".weight_scale": scale}

    def unpack(self, tensors: Mapping[str, Tensor]) -> Tensor:
        return (tensors[".weight"].float() - 128) * tensors[".weight_scale"]


class TurnedKit(Kit):
    """How the turned one packs."""

    has_experts = True
    stays_packed = False

    def pack(self, weight: Tensor) -> Mapping[str, Tensor]:
        grouped = weight.T.abs().split(32)
        scale = torch.stack([group.amax(0) for group in grouped]) / 127
        wide = scale.repeat_interleave(32, dim=0)[: weight.shape[1]]
        return {".turned": ((weight.T / wide).round() + 128).to(torch.uint8), ".turned_scale": scale}

    def unpack(self, tensors: Mapping[str, Tensor]) -> Tensor:
        number, scale = tensors[".turned"], tensors[".turned_scale"]
        return ((number.float() - 128) * scale.repeat_interleave(32, dim=0)[: len(number)]).T


CONVERTED: dict[str, tuple[type[Quantization], str, str]] = {
    "zeros off by one": (turned(zero=127), "test_product_equals_the_unpacked_weight", "off by"),
    "blocks one longer": (turned(along=33), "test_product_equals_the_unpacked_weight", "off by"),
    "blocks of a half": (turned(along=16), "test_parts_keep_their_own_scales", "of a fused matrix in"),
    "rows from the end": (
        turned(written=classmethod(zeros_and_scales_swapped)),
        "test_ranks_add_up",
        "part q of rank 0 of two",
    ),
    "says what it does not make": (turned(dtype="F16"), "test_experts", "a conversion of m.0."),
}
"""Of those that convert: the fault, the test that sees it, and what is said."""


def test_a_right_conversion_passes() -> None:
    """The one that those faults are made from has none."""
    report = check_class(type("TestRight", (TurnedKit,), {"plugin_class": Turned, "__module__": __name__}))
    assert report.passed, report.text()


@pytest.mark.parametrize("fault", CONVERTED)
def test_the_kit_names_a_conversions_fault(fault: str) -> None:
    """What is made of a file's tensors is compared as matrices that are packed."""
    plugin, test, message = CONVERTED[fault]
    cls: Callable[..., Any] = type("TestBroken", (TurnedKit,), {"plugin_class": plugin, "__module__": __name__})
    report = check_class(cls, select=test)  # type: ignore[arg-type]
    failures = {name: text for name, text in report.failures.items() if name.partition("[")[0] == test}
    assert any(message in text for text in failures.values()), report.text()


FAULTS: dict[str, tuple[type[Quantization], str, str, dict[str, Any]]] = {
    "takes everything": (TakesAll, "test_says_which_checkpoints_it_reads", "why_not takes {}", {}),
    "raises for others": (Raises, "test_says_which_checkpoints_it_reads", "why_not raised KeyError", {}),
    "forgets the norm": (
        with_linear(forward=forward_without_norm),
        "test_product_equals_the_unpacked_weight",
        "norm True",
        {},
    ),
    "forgets the factor": (
        with_linear(forward=forward_without_scale),
        "test_product_equals_the_unpacked_weight",
        "off by",
        {},
    ),
    "wrong beyond nine tokens": (
        with_linear(forward=forward_up_to_nine),
        "test_product_equals_the_unpacked_weight",
        "65 tokens",
        {},
    ),
    "one scale for all parts": (
        with_linear(written_out=one_scale),
        "test_parts_keep_their_own_scales",
        "of a fused matrix in torch.float32: off by",
        {},
    ),
    "covers what is plain": (
        CoversAll,
        "test_matrices_that_are_not_quantised_are_plain",
        "m.weight F32 instead of uint8",
        {},
    ),
    "every rank adds the bias": (
        with_linear(finalize=finalize_keeping_bias),
        "test_ranks_add_up",
        "the sum of two ranks' shares",
        {},
    ),
    "refuses what it should read": (
        Right,
        "test_experts",
        "experts are refused: m: experts are not read",
        {"has_experts": True},
    ),
    "keeps a copy written out": (
        with_linear(finalize=finalize_writing_out),
        "test_weights_stay_packed",
        "bytes are stored for a matrix, and",
        {},
    ),
    "needs a checkpoint": (NeedsACheckpoint, "test_works_without_a_checkpoint", "no checkpoint", {}),
}


def test_a_right_quantisation_passes() -> None:
    """The one that the faults are made from has none."""
    report = check_class(type("TestRight", (Kit,), {"plugin_class": Right, "__module__": __name__}))
    assert report.passed, report.text()


@pytest.mark.parametrize("fault", FAULTS)
def test_the_kit_names_a_quantisations_fault(fault: str) -> None:
    """A quantisation with one fault fails the test for it, with a message that names it."""
    plugin, test, message, attrs = FAULTS[fault]
    cls: Callable[..., Any] = type("TestBroken", (Kit,), {"plugin_class": plugin, "__module__": __name__, **attrs})
    report = check_class(cls, select=test)  # type: ignore[arg-type]
    failures = {name: text for name, text in report.failures.items() if name.partition("[")[0] == test}
    assert any(message in text for text in failures.values()), report.text()


class GroupsOf64(QuantizationConformance):
    """A format without experts whose groups have 64 inputs."""

    has_experts = False

    def pack(self, weight: Tensor) -> Mapping[str, Tensor]:
        assert weight.shape[1] % 64 == 0, tuple(weight.shape)
        return {".weight": weight}

    def unpack(self, tensors: Mapping[str, Tensor]) -> Tensor:
        return tensors[".weight"]


def test_experts_that_a_format_does_not_have_are_packed_in_a_width_that_it_can_have() -> None:
    """Only to see them refused: 48 inputs are for those that have experts, and may say another width."""
    kit = GroupsOf64()
    _, plain = kit._expert_checkpoint(num=1, hidden=64, inner=kit._inner())
    assert {tuple(tensor.shape) for tensor in plain.values()} == {(64, 64)}
