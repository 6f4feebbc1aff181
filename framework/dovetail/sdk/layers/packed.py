"""Layers over packed matrices, and the factory that makes them where a checkpoint has the tensors of a form.

N outputs, K inputs, E experts.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, ClassVar, Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from dovetail.contracts.errors import ModelError
from dovetail.contracts.layers import Act, BuildContext, Experts, LayerFactory, Linear, Norm, Part, RMSScale, Stream
from dovetail.contracts.quantization import Stored, StoredTensor
from dovetail.sdk.layers import cpu_products, cuda_products
from dovetail.sdk.layers.experts import ExpertMatrix, GatedExperts
from dovetail.sdk.layers.matrix import Matrix
from dovetail.sdk.layers.shards import gated
from dovetail.sdk.quantization.forms import Form, Int4, Mxfp4, Scaled

if TYPE_CHECKING:
    from dovetail.sdk.layers.cuda_products import PackedWeight
    from dovetail.sdk.layers.ops.packed_integers import Integers, Words
    from dovetail.sdk.layers.ops.packed_slots import PackedExpertWeights

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
    """`act(norm(x) Wᵀ + b) * scale` over a packed matrix; see `dovetail.contracts.layers.Linear`."""

    suffixes = SPELLINGS
    bias: nn.Parameter | None

    def __init__(
        self,
        ctx: BuildContext,
        path: str,
        in_features: int,
        parts: Sequence[Part],
        form: Form,
        *,
        bias: bool,
        shard: Literal["out", "in"] | None,
        act: Act | None,
    ) -> None:
        super().__init__(ctx, path, in_features, parts, shard)
        self.form, self._act = form, gated(path, act, parts)
        self._gate = None if act is None else ctx.operation("act_and_mul", F=self.local_out // 2, act=act)
        self._names = store(self, form)
        if isinstance(form, Int4) and ctx.device.type == "cpu":
            self.gather(*self._names)
        self.bias = None
        if bias:
            self.store("bias", ctx.dtype, granule=None)
        self._dtype = ctx.dtype
        self._product: cpu_products.Product | None = None
        self._packed: PackedWeight | None = None

    def finalize(self) -> None:
        """Where ranks add up shares, the first one adds the bias; pack for torch's products on CPU, and for ours."""
        if self.is_share and self.parallel.rank > 0:
            self.bias = None
        tensors = {name: self.gathered(name) for name in self._names}
        self._packed = cuda_products.packed(self.form, tensors, self._dtype)
        if self._packed is not None:
            drop(self, self._names)
            return
        self._product = product_of(self.form, tensors, self._dtype)
        if self._product is not None and isinstance(self.form, Int4):
            drop(self, self._names)
            return
        for name, tensor in tensors.items():
            if tensor is not self.get_parameter(name):  # a piece may be a view of the file
                setattr(self, name, nn.Parameter(tensor.clone(), requires_grad=False))

    def dequantised(self, dtype: torch.dtype) -> Tensor:
        """Return this rank's weight `[out, in]`: the reference; unavailable where a kernel has repacked it."""
        return self.form.dequantise({name: self.get_parameter(name) for name in self._names}, dtype)

    def forward(
        self, x: Tensor | Stream, *, norm: Norm | None = None, add: Stream | None = None, scale: float = 1.0
    ) -> Tensor | Stream:
        x = x.total() if isinstance(x, Stream) else x
        if self._packed is not None:
            return self._on_cuda(x, self._packed, norm, add, scale)
        x = x if norm is None else norm(x)
        if self._product is None:
            y = F.linear(x, self.dequantised(x.dtype), self.bias)
        else:
            y = self._product(x)
            y = y if self.bias is None else y + self.bias
        return self.finish(y if self._gate is None else self._gate(y), add, scale)

    def _on_cuda(
        self, x: Tensor, weight: PackedWeight, norm: Norm | None, add: Stream | None, scale: float
    ) -> Tensor | Stream:
        """In our own kernels, which compute a plain norm, and add to the stream unless ranks have shares of it."""
        from dovetail.sdk.layers.ops import packed  # imports Triton

        rms: RMSScale | None = None if norm is None else getattr(norm, "rms", None)
        x = x if norm is None or rms is not None else norm(x)
        if add is None or self.is_share or scale != 1.0 or self._act is not None:
            y = packed.linear(x, weight, self.bias, norm=rms, act=self._act, normed=norm, gated=self._gate)
            return self.finish(y, add, scale)
        add.value = packed.linear(x, weight, self.bias, norm=rms, residual=add.value, normed=norm)
        return add


def drop(matrix: Matrix, names: Sequence[str]) -> None:
    """Free parameters that a kernel has repacked."""
    for name in names:
        setattr(matrix, name, None)


def product_of(form: Form, tensors: Mapping[str, Tensor], dtype: torch.dtype) -> cpu_products.Product | None:
    """Return torch's own product over a packed matrix, None where it has none: the matrix is written out each time."""
    if isinstance(form, Scaled) and form.dtype == torch.int8:
        return cpu_products.int8(tensors["weight"], tensors["weight_scale"], dtype)
    if isinstance(form, Int4) and tensors["weight_packed"].device.type == "cpu":
        return cpu_products.int4(tensors["weight_packed"], tensors["weight_scale"], tensors.get("weight_zero"), dtype)
    return None


def store(matrix: Matrix, form: Form) -> tuple[str, ...]:
    """Make a form's parameters in a matrix; returns their names."""
    tensors = form.tensors(matrix.in_features)
    for name, (dtype, granule) in tensors.items():
        matrix.store(name, dtype, granule=granule)
    return tuple(tensors)


class PackedExpertMatrix(ExpertMatrix):
    """One packed matrix for each expert, or a plain one where the checkpoint has that."""

    forms: ClassVar[Mapping[str, Form | None]] = {}
    """Of the matrices, by name: `gate_up` and `down`."""
    has_kernel: ClassVar[bool] = False
    """Whether both are packed in one way, as the kernels for experts want it."""
    suffixes = SPELLINGS

    def make_weight(self, ctx: BuildContext) -> None:
        """Store what the form has."""
        self.form = self.forms[str(self.path).rpartition(".")[2]]
        self._names: tuple[str, ...] = ()
        if self.form is None:
            super().make_weight(ctx)
        else:
            self._names = store(self, self.form)
        self._dtype = ctx.dtype
        self._products: list[cpu_products.Product] = []
        self.packed: PackedWeight | None = None

    def finalize(self) -> None:
        """As plain experts; pack for torch's products on CPU, and for ours."""
        super().finalize()
        if self.form is None:
            return
        tensors = {name: self.get_parameter(name) for name in self._names}
        if self.has_kernel:
            self.packed = cuda_products.packed(self.form, tensors, self._dtype)
        if self.packed is not None:
            drop(self, self._names)
            return
        for expert in range(self.local_experts):
            product = product_of(self.form, {name: tensor[expert] for name, tensor in tensors.items()}, self._dtype)
            if product is None:
                return  # there is none for the others either
            self._products.append(product)
        if isinstance(self.form, Int4):
            drop(self, self._names)

    def forward(self, x: Tensor, expert: int) -> Tensor:
        """Multiply by one of this rank's experts."""
        if not self._products:
            return super().forward(x, expert)
        y = self._products[expert](x)
        return y if self.bias is None else y + self.bias[expert]

    def of_expert(self, expert: int, dtype: torch.dtype) -> Tensor:
        """Return one expert's weight."""
        if self.form is None:
            return super().of_expert(expert, dtype)
        return self.form.dequantise({name: self.get_parameter(name)[expert] for name in self._names}, dtype)


class PackedExperts(GatedExperts):
    """Experts whose matrices are packed; on CUDA in kernels of their own, else each by itself."""

    def _is_for_triton(self, x: Tensor, ids: Tensor) -> bool:
        return self.gate_up.packed is not None and self.down.packed is not None

    def _made(self, x: Tensor, ids: Tensor, shares: Tensor, residual: Tensor | None) -> Tensor:
        from dovetail.sdk.layers.ops.packed_experts import packed_gated_experts  # imports Triton

        return packed_gated_experts(x, ids, shares, self._weights(), residual)

    def words(self, x: Tensor) -> Words | None:
        """Return how these tokens are wanted as integers by `of_integers`; None: they are not."""
        if self.gate_up.packed is None or self.down.packed is None:
            return None
        from dovetail.sdk.layers.ops.packed_slots import wanted_words  # imports Triton

        return wanted_words(self._weights(), len(x) * self._top_k, x.dtype)

    def of_integers(
        self, x: Tensor, given: Integers, ids: Tensor, weights: Tensor, *, add: Stream | None = None
    ) -> Tensor | Stream:
        """Compute as a call does, for tokens like `x` that are integers already, as `words` says."""
        from dovetail.sdk.layers.ops.packed_slots import of_slots, slot_tiles  # imports Triton

        of, residual = self._weights(), self._residual(add)
        out = of_slots(x, ids, weights, of, residual, slot_tiles(of, ids.numel()), given=given)
        return self._added(out, add, residual)

    def _weights(self) -> PackedExpertWeights:
        """What kernels take."""
        from dovetail.sdk.layers.ops.packed_slots import PackedExpertWeights  # imports Triton

        up, down = self.gate_up, self.down
        if not isinstance(up, PackedExpertMatrix) or not isinstance(down, PackedExpertMatrix):
            raise TypeError(f"matrices of packed experts are {type(up).__name__} and {type(down).__name__}")
        if up.packed is None or down.packed is None:
            raise RuntimeError("experts without packed matrices have no kernel")
        return PackedExpertWeights(
            up.packed, down.packed, up.bias, down.bias, up.first_expert, self._act, self._weigh == "input"
        )


class PackedFactory:
    """Makes packed matrices where the checkpoint, or what it is converted to, has the tensors of a form.

    Args:
        stored: What there is for each matrix.
        plain: Makes the others.
        dummy: The form of all matrices where there is no checkpoint; None: they are plain.
        dummy_experts: That of experts' matrices.
    """

    def __init__(
        self, stored: Stored, plain: LayerFactory, dummy: Form | None = None, dummy_experts: Form | None = None
    ) -> None:
        self.stored, self.plain, self.dummy, self.dummy_experts = stored, plain, dummy, dummy_experts

    def form(self, path: str, in_features: int, dummy: Form | None) -> Form | None:
        """Return a matrix's form, None for a plain one; `dummy` where there is no checkpoint.

        Raises:
            ModelError: Its parts have different ones.
        """
        if not self.stored.is_known:
            return dummy if dummy is None or dummy.fits(in_features) else None
        return form_of(path, self.stored.of(path), in_features)

    def linear(
        self,
        ctx: BuildContext,
        name: str,
        in_features: int,
        parts: Sequence[Part],
        *,
        bias: bool,
        shard: Literal["out", "in"] | None,
        act: Act | None,
    ) -> Linear:
        """See `BuildContext.linear`."""
        form = self.form(name, in_features, self.dummy)
        if form is None:
            return self.plain.linear(ctx, name, in_features, parts, bias=bias, shard=shard, act=act)
        return PackedLinear(ctx, name, in_features, parts, form, bias=bias, shard=shard, act=act)

    def experts(
        self,
        ctx: BuildContext,
        name: str,
        num: int,
        top_k: int,
        hidden: int,
        inner: int,
        *,
        act: Act,
        bias: bool,
        weigh: Literal["output", "input"],
        shard: Literal["inner", "expert"],
    ) -> Experts:
        """See `BuildContext.experts`."""
        dummy = self.dummy_experts
        forms = self.form(f"{name}.gate_up", hidden, dummy), self.form(f"{name}.down", inner, dummy)
        if forms[0] is None and forms[1] is None:
            return self.plain.experts(
                ctx, name, num, top_k, hidden, inner, act=act, bias=bias, weigh=weigh, shard=shard
            )
        by_name = {"forms": {"gate_up": forms[0], "down": forms[1]}, "has_kernel": None not in forms}
        matrix = type("PackedExpertMatrix", (PackedExpertMatrix,), by_name)
        made = type("PackedExperts", (PackedExperts,), {"matrix": matrix})
        found: Experts = made(ctx, name, num, top_k, hidden, inner, act=act, bias=bias, weigh=weigh, shard=shard)
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
