"""Layers over packed matrices, and the factory that makes them where a checkpoint has the tensors of a form.

N outputs, K inputs, E experts.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from dovetail.contracts.device import is_on_host
from dovetail.contracts.errors import ModelError
from dovetail.contracts.kernels import PackedKernel
from dovetail.contracts.layers import (
    BuildContext,
    Experts,
    ExpertsSpec,
    LayerFactory,
    Linear,
    MatrixSpec,
    Norm,
    RMSScale,
    Stream,
)
from dovetail.contracts.quantization import Stored, StoredTensor
from dovetail.sdk.layers.experts import ExpertMatrix, GatedExperts
from dovetail.sdk.layers.matrix import Matrix
from dovetail.sdk.layers.routing import Routing
from dovetail.sdk.layers.shards import gated
from dovetail.sdk.quantization.forms import Form, Int4, Mxfp4, Scaled

SPELLINGS: dict[str, tuple[str, ...]] = {
    "weight": (".weight", ""),
    "weight_packed": (".weight_packed", "_packed"),
    "weight_scale": (".weight_scale", "_scale"),
    "weight_zero": (".weight_zero", "_zero"),
    "bias": (".bias", "_bias"),
}
"""How the loader finds a form's tensors: behind the module's name, or behind that of one tensor of all experts."""
FLOATS = {"F16": torch.float16, "BF16": torch.bfloat16, "F32": torch.float32}
EIGHT = {"I8": torch.int8, "F8_E4M3": torch.float8_e4m3fn}


class PackedLinear(Matrix):
    """`act(norm(x) Wᵀ + b) * scale` over a packed matrix, or a repacked plain one (`form` None); see `Linear`."""

    suffixes = SPELLINGS
    bias: nn.Parameter | None

    def __init__(self, ctx: BuildContext, spec: MatrixSpec, form: Form | None) -> None:
        super().__init__(ctx, spec.path, spec.in_features, spec.parts, spec.shard)
        act = spec.act
        self.form, self._is_gated = form, gated(spec.path, act, spec.parts) is not None
        out, num_in = self.local_out, self.local_in
        if act is None:
            kernel: Any = ctx.operation("packed_norm_linear", N=out, K=num_in, form=form)
        else:
            kernel = ctx.operation("packed_norm_gate", F=out // 2, K=num_in, form=form, act=act)
        self._kernel: PackedKernel = kernel
        self._names = store(self, form, ctx.dtype)
        if not self._kernel.keeps() and is_on_host(ctx.device):
            self.gather(*self._names)
        self.bias = None
        if spec.bias:
            self.store("bias", ctx.dtype, granule=None)
        self._packed: Any = None

    def finalize(self) -> None:
        """Where ranks add up shares, the first one adds the bias; pack as the kernel reads it."""
        if self.is_share and self.parallel.rank > 0:
            self.bias = None
        self._packed = self._kernel.pack({name: self.gathered(name).detach() for name in self._names})
        if not self._kernel.keeps():
            drop(self, self._names)

    def forward(
        self, x: Tensor | Stream, *, norm: Norm | None = None, add: Stream | None = None, scale: float = 1.0
    ) -> Tensor | Stream:
        x = x.total() if isinstance(x, Stream) else x
        rms: RMSScale | None = None if norm is None else getattr(norm, "rms", None)
        x = x if norm is None or rms is not None else norm(x)
        given = x, *((None, 0.0) if rms is None else rms), self._packed, self.bias
        if self._is_gated:
            return self.finish(self._kernel(*given), add, scale)
        if add is None or self.is_share or scale != 1.0:
            return self.finish(self._kernel(*given, None), add, scale)
        add.value = self._kernel(*given, add.value)
        return add


def drop(matrix: Matrix, names: Sequence[str]) -> None:
    """Free parameters that a kernel has repacked."""
    for name in names:
        setattr(matrix, name, None)


def store(matrix: Matrix, form: Form | None, dtype: torch.dtype) -> tuple[str, ...]:
    """Make a form's parameters in a matrix, or the one in `dtype` of a plain matrix; returns their names."""
    tensors = {"weight": (dtype, 1)} if form is None else form.tensors(matrix.in_features)
    for name, (dtype, granule) in tensors.items():
        matrix.store(name, dtype, granule=granule)
    return tuple(tensors)


class PackedExpertMatrix(ExpertMatrix):
    """One packed matrix for each expert, or a plain one where the checkpoint has that."""

    forms: ClassVar[Mapping[str, Form | None]] = {}
    """Of the matrices, by name: `gate_up` and `down`."""
    suffixes = SPELLINGS
    kernel: PackedKernel
    """Set by the experts."""

    def make_weight(self, ctx: BuildContext) -> None:
        """Store what the form has."""
        self._half = str(self.path).rpartition(".")[2]
        self._names: tuple[str, ...] = ("weight",)
        form = self.forms[self._half]
        if form is None:
            super().make_weight(ctx)
        else:
            self._names = store(self, form, ctx.dtype)
        self._packed: Any = None

    def finalize(self) -> None:
        """As plain experts; pack as the kernel reads it."""
        super().finalize()
        tensors = {name: self.get_parameter(name).detach() for name in self._names}
        self._packed = self.kernel.pack(tensors, self._half)
        if not self.kernel.keeps(self._half):
            drop(self, self._names)

    @property
    def operand(self) -> Any:
        """See `ExpertMatrix.operand`."""
        return self._packed


class PackedExperts(GatedExperts):
    """Experts of which at least one matrix is packed."""

    def bind(self, ctx: BuildContext) -> None:
        """Bind the operation over packed matrices."""
        forms: Mapping[str, Form | None] = self.matrix.forms  # type: ignore[attr-defined]
        self._place["forms"] = forms["gate_up"], forms["down"]
        self._use(ctx.operation("packed_experts", **self._place))

    def bind_router(self, ctx: BuildContext, routing: Routing) -> None:
        """Bind the operation that chooses among them, too: `added` takes the operands of a router then."""
        self._use(ctx.operation("routed_experts", **self._place, routing=routing, dtype=ctx.dtype))

    def _use(self, kernel: Any) -> None:
        self._kernel = self.gate_up.kernel = self.down.kernel = kernel


@dataclass(frozen=True, slots=True)
class PackedFactory:
    """Makes packed matrices where the checkpoint, or what it is converted to, has the tensors of a form.

    Attributes:
        stored: What there is for each matrix.
        plain: Makes the others.
        dummy: The form of all matrices where there is no checkpoint; None: they are plain.
        dummy_experts: That of experts' matrices.
        activations: What products of numbers in this dtype may round rows to, see `Scaled`; experts' never do.
        head: The form of the output head, see `dovetail.contracts.layers.LayerFactory`.
    """

    stored: Stored
    plain: LayerFactory
    dummy: Form | None = None
    dummy_experts: Form | None = None
    activations: torch.dtype | None = None
    head: Form | None = None

    def form(self, path: str, in_features: int, dummy: Form | None) -> Form | None:
        """Return a matrix's form, None for a plain one; `dummy` where there is no checkpoint.

        Raises:
            ModelError: Its parts have different ones.
        """
        if not self.stored.is_known:
            return dummy if dummy is None or dummy.fits(in_features) else None
        return form_of(path, self.stored.of(path), in_features)

    def linear(self, ctx: BuildContext, spec: MatrixSpec) -> Linear:
        """See `LayerFactory.linear`."""
        form = self.form(spec.path, spec.in_features, self.dummy)
        if form is None:
            return self.plain.linear(ctx, spec)
        if isinstance(form, Scaled) and form.dtype == self.activations:
            form = replace(form, activations=self.activations)
        return PackedLinear(ctx, spec, form)

    def experts(self, ctx: BuildContext, spec: ExpertsSpec) -> Experts:
        """See `LayerFactory.experts`."""
        widths = {"gate_up": spec.hidden, "down": spec.inner}
        forms = {name: self.form(f"{spec.path}.{name}", width, self.dummy_experts) for name, width in widths.items()}
        if forms["gate_up"] is None and forms["down"] is None:
            return self.plain.experts(ctx, spec)
        matrix = type("PackedExpertMatrix", (PackedExpertMatrix,), {"forms": forms})
        found: Experts = type("PackedExperts", (PackedExperts,), {"matrix": matrix})(ctx, spec)
        return found


def form_of(path: str, tensors: Sequence[StoredTensor], in_features: int) -> Form | None:
    """Return the form whose tensors a matrix has, None where it has a plain weight or nothing.

    Raises:
        ModelError: Its parts have different ones.
    """
    found = {_form(path, part, tensors, in_features) for part in {tensor.part for tensor in tensors}}
    if len(found) > 1:
        raise ModelError(f"{path}: some of its projections are packed in another way than others, or not at all")
    return next(iter(found), None)


def _form(path: str, part: str, tensors: Sequence[StoredTensor], in_features: int) -> Form | None:
    of_part = {tensor.suffix: tensor for tensor in tensors if tensor.part == part}
    given = {name: next((of_part[s] for s in spelled if s in of_part), None) for name, spelled in SPELLINGS.items()}
    packed, scale, weight = given["weight_packed"], given["weight_scale"], given["weight"]
    numbers = packed if packed is not None else weight
    if numbers is None or (packed is None and numbers.dtype not in EIGHT):
        return None
    if scale is None:
        raise ModelError(f"{path}: part {part!r} is packed ({numbers.suffix} {numbers.dtype}) and has no scale")
    if numbers.dtype == "U8":
        return Mxfp4()
    group = None if not scale.shape or scale.shape[-1] == 1 else -(-in_features // scale.shape[-1])
    if numbers.dtype in EIGHT:
        return Scaled(EIGHT[numbers.dtype], group)
    if numbers.dtype != "I32" or scale.dtype not in FLOATS:
        raise ModelError(f"{path}: {numbers.suffix} is {numbers.dtype} and its scale {scale.dtype}: not a known form")
    return Int4(group, FLOATS[scale.dtype], given["weight_zero"] is not None)
