"""What a model is built with: `BuildContext`, and the matrices that it makes.

A layer asks the context for its matrices (`ctx.linear`, `ctx.experts`) and states whole expressions when it calls them:
which norm comes before, what the result is added to. What it got decides what of that is one kernel. So a model needs
to know neither how its weights are stored nor which fusions exist. Importing this module does not import torch.

T tokens, H hidden size, E experts, K experts chosen for each token.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, Protocol, overload

from dovetail.contracts.kernels import PLAIN_KERNELS, Kernel, Kernels

if TYPE_CHECKING:
    import torch
    from torch import Tensor

Act = Literal["silu_and_mul", "gelu_and_mul", "gelu_tanh_and_mul", "clamped_silu_and_mul", "relu2"]
"""Activation of the first of two parts, times the second: `silu_and_mul` is `silu(gate) * up`.

`clamped_silu_and_mul` is gpt-oss's: `gate * sigmoid(1.702 gate) * (up + 1)`, gate at most 7 and up within 7 of zero.
`relu2` is for experts that have no gate: the square of what of `up` is above zero.
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class Parallel:
    """This process among those that compute one model together.

    Attributes:
        rank: Which one it is, from 0.
        size: How many there are.
        all_reduce: Adds up a tensor over all ranks, in place or not; needed if there is more than one.
        all_gather: Returns the tensors of all ranks, which have one shape, as one, `[size, …]`; None: they are made to
            be that by `all_reduce`.
        expert_shard: How ranks divide experts unless a model says: by inner width, or whole experts.
    """

    rank: int = 0
    size: int = 1
    all_reduce: Callable[[Tensor], Tensor] | None = None
    all_gather: Callable[[Tensor], Tensor] | None = None
    expert_shard: Literal["inner", "expert"] = "inner"

    def __post_init__(self) -> None:
        """Refuse what cannot be.

        Raises:
            ValueError: The rank is not one of them, or several have no way to add up.
        """
        if not 0 <= self.rank < self.size:
            raise ValueError(f"rank {self.rank} of {self.size}: ranks count from 0")
        if self.size > 1 and self.all_reduce is None:
            raise ValueError(f"{self.size} ranks need an all_reduce")

    def sum(self, share: Tensor) -> Tensor:
        """Add up a tensor of which every rank has a share, as the ranks' device does; see `BuildContext.rank_sums`."""
        return share if self.all_reduce is None else self.all_reduce(share)

    def join(self, mine: Tensor) -> Tensor:
        """Put what the ranks have side by side, in their order: `[…, N]` becomes `[…, size N]`."""
        if self.size == 1:
            return mine
        if self.all_gather is not None:
            return self.all_gather(mine).movedim(0, -2).flatten(-2)
        wide = mine.new_zeros(*mine.shape[:-1], self.size * mine.shape[-1])
        wide.narrow(-1, self.rank * mine.shape[-1], mine.shape[-1]).copy_(mine)
        return self.sum(wide)


class RankSums(NamedTuple):
    """Sums over ranks of tensors `[T, H]` in the model's dtype, bound for one H; see `BuildContext.rank_sums`.

    Attributes:
        ranks: Those that add up.
        sum: Kernel of `rank_sum`.
        add: Kernel of `rank_sum_add`.
        norm: Kernel of `rank_sum_norm`.
    """

    ranks: Parallel
    sum: Kernel
    add: Kernel
    norm: Kernel

    def __call__(self, share: Tensor) -> Tensor:
        """Return the sum of all ranks' shares `[T, H]`, the same bits on all."""
        found: Tensor = self.sum(share, self.ranks)
        return found


@dataclass(frozen=True, slots=True)
class Part:
    """One of the projections that a fused matrix holds, one after the other by rows.

    Args:
        name: As rules name it (`q`, `gate`).
        width: Rows in the checkpoint.
        unit: Rows that stay together when ranks divide the part: a head's.
        repeat: Ranks that get the same unit, where there are fewer units than ranks (KV heads).
        order: Which row of a unit in the checkpoint stands at each place of it here; None: as they are.
    """

    name: str
    width: int
    unit: int = 1
    repeat: int = 1
    order: tuple[int, ...] | None = None


RANK_SUMS = ("rank_sum", "rank_sum_add", "rank_sum_norm")
"""Operations over ranks, as `RankSums` holds them."""


class RMSScale(NamedTuple):
    """What a kernel needs to compute `x / rms(x) * weight` itself; rounded to the model's dtype before the weight."""

    weight: Tensor
    eps: float


class Norm(Protocol):
    """A norm over the last axis: any module that maps `[T, H]` to `[T, H]`.

    One that is the plain RMS norm says so by a property `rms`, an `RMSScale`: then a kernel may compute it, and the
    norm is not called. Without one, or if it is None, the norm is called.
    """

    def __call__(self, x: Tensor) -> Tensor:
        """Normalise."""
        ...


class Stream:
    """The residual stream `[T, H]`, which changes in place as layers add to it.

    With several ranks, what a layer adds is a share of a sum. It is added up when it is read: `total` does, and so
    do norms and products that take the stream. Until then further shares join it, and cost no message of their own.

    Attributes:
        value: What all ranks know.
        partial: This rank's share of what is still to be added, or None.
    """

    __slots__ = ("_sums", "partial", "value")

    def __init__(self, value: Tensor) -> None:
        """The stream takes `value` over and may overwrite it."""
        self.value = value
        self.partial: Tensor | None = None
        self._sums: RankSums | None = None

    def total(self) -> Tensor:
        """Return the stream; valid until something is added."""
        if self.partial is not None and self._sums is not None:
            self.value = self._sums.add(self.partial, self.value, self._sums.ranks)
            self.partial = None
        return self.value

    def normed(self, weight: Tensor, eps: float) -> Tensor | None:
        """Add the stream up and return its RMS norm; None where ranks have no shares of it that are to be added."""
        if self.partial is None or self._sums is None:
            return None
        normed: Tensor
        normed, self.value = self._sums.norm(self.partial, self.value, weight, eps, self._sums.ranks)
        self.partial = None
        return normed

    def plus(self, value: Tensor) -> Stream:
        """Add what is the same on all ranks; returns the stream itself."""
        self.value = self.value + value
        return self

    def plus_share(self, share: Tensor, sums: RankSums) -> Stream:
        """Add this rank's share of a sum, which `sums` adds up; returns the stream itself."""
        if sums.ranks.size == 1:
            return self.plus(share)
        self.partial = share if self.partial is None else self.partial + share
        self._sums = sums
        return self


class Linear(Protocol):
    """A matrix, or several side by side; bias, activation and cut were stated when it was asked for."""

    @overload
    def __call__(
        self, x: Tensor | Stream, *, norm: Norm | None = None, add: None = None, scale: float = 1.0
    ) -> Tensor: ...

    @overload
    def __call__(self, x: Tensor | Stream, *, norm: Norm | None = None, add: Stream, scale: float = 1.0) -> Stream: ...

    def __call__(
        self, x: Tensor | Stream, *, norm: Norm | None = None, add: Stream | None = None, scale: float = 1.0
    ) -> Tensor | Stream:
        """Compute `act(norm(x) Wᵀ + b) * scale`.

        Args:
            x: `[T, in]`.
            norm: Of `x`; None: `x` is taken as it is.
            add: The stream that the result is added to.
            scale: Factor of the result.

        Returns:
            `add`, or without it the result, the same on all ranks unless the matrix is cut by its outputs.
        """
        ...


class Experts(Protocol):
    """Gated MLPs of which each token goes through some."""

    @overload
    def __call__(self, x: Tensor, ids: Tensor, weights: Tensor, *, add: None = None) -> Tensor: ...

    @overload
    def __call__(self, x: Tensor, ids: Tensor, weights: Tensor, *, add: Stream) -> Stream: ...

    def __call__(self, x: Tensor, ids: Tensor, weights: Tensor, *, add: Stream | None = None) -> Tensor | Stream:
        """Add up what each token's experts make of it, times their weights.

        Args:
            x: `[T, H]`, the same on all ranks.
            ids: `[T, K]` int64, the experts of each token, all different.
            weights: `[T, K]`, each one's share.
            add: The stream that the result is added to.

        Returns:
            `add`, or without it the result `[T, H]`, the same on all ranks.
        """
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class MatrixSpec:
    """A matrix `[out, in]` that a factory is to make; see `BuildContext.linear`.

    Attributes:
        path: Where it stands in the model.
        in_features: Input width of the whole model.
        parts: The projections that stand one after the other; a plain width has become a part without a name.
        bias: Whether there is one.
        shard: How ranks divide it.
        act: Applied to the result.
    """

    path: str
    in_features: int
    parts: tuple[Part, ...]
    bias: bool = False
    shard: Literal["out", "in"] | None = None
    act: Act | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class ExpertsSpec:
    """Gated MLPs that a factory is to make; see `BuildContext.experts`.

    Attributes:
        path: Where they stand in the model.
        num: E.
        top_k: K.
        hidden: H.
        inner: Width between.
        act: Of the gate.
        bias: On all matrices.
        weigh: What a token's weights multiply.
        shard: How ranks divide them.
    """

    path: str
    num: int
    top_k: int
    hidden: int
    inner: int
    act: Act
    bias: bool = False
    weigh: Literal["output", "input"] = "output"
    shard: Literal["inner", "expert"] = "inner"


class LayerFactory(Protocol):
    """Makes matrices for a context: in the model's dtype, or as a quantised checkpoint stores them.

    One that has an attribute `head`, a form of `dovetail.sdk.quantization.forms`, has the output head packed so once it
    is read, whatever its own dtype in the checkpoint. Since API 1.5 of `dovetail.quantizations`.
    """

    def linear(self, ctx: BuildContext, spec: MatrixSpec) -> Linear:
        """Make a matrix, its parameters not initialised: see `BuildContext.linear`."""
        ...

    def experts(self, ctx: BuildContext, spec: ExpertsSpec) -> Experts:
        """Make experts, their parameters not initialised: see `BuildContext.experts`."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class BuildContext:
    """Where and how a model is built.

    Attributes:
        device: Where parameters are made.
        dtype: The model's dtype.
        factory: Makes the matrices; `dovetail.sdk.layers.plain.PLAIN` makes them in the model's dtype.
        parallel: This rank among those that share the model.
        path: Of the module that is being built (`layers.3.attention`), as `named_modules` will have it.
        batch_invariant: A row's result must have the same bits whatever rows stand beside it, and however many.
        kernels: Finds what computes an operation of `dovetail.contracts.kernels.OPS`.
    """

    device: torch.device
    dtype: torch.dtype
    factory: LayerFactory
    parallel: Parallel = Parallel()
    path: str = ""
    batch_invariant: bool = False
    kernels: Kernels = PLAIN_KERNELS

    @property
    def head_form(self) -> Any:
        """The form of the output head, see `LayerFactory`; None: it keeps the model's dtype."""
        return getattr(self.factory, "head", None)

    def operation(self, op: str, **given: Any) -> Kernel:
        """Bind an operation that a layer calls: a function of the operands that `OPS` lists for it.

        Args:
            op: A key of `dovetail.contracts.kernels.OPS`.
            given: Its widths by letter, and its options by name.

        Raises:
            PluginError: There is no such operation, or it has other widths or options.
        """
        dtype = str(self.dtype).removeprefix("torch.")
        dims = {key: value for key, value in given.items() if key.isupper()}
        options = {key: value for key, value in given.items() if not key.isupper()}
        return self.kernels.bind(self.kernels.ask(op, dtype, dims, options, invariant=self.batch_invariant))

    def rank_sums(self, width: int) -> RankSums:
        """Bind the sums over ranks of tensors `[T, width]` in the model's dtype.

        Raises:
            PluginError: A kernel set claims one and cannot make it.
        """
        ctx = self if self.parallel.size > 1 else replace(self, kernels=PLAIN_KERNELS)  # one rank adds up nothing
        return RankSums(self.parallel, *(ctx.operation(op, H=width) for op in RANK_SUMS))

    def at(self, path: str) -> BuildContext:
        """Return the context for the submodule at `path`, seen from this one's."""
        return replace(self, path=self._full(path))

    def linear(
        self,
        name: str,
        in_features: int,
        parts: int | Sequence[Part],
        *,
        bias: bool = False,
        shard: Literal["out", "in"] | None = None,
        act: Act | None = None,
    ) -> Linear:
        """Make a matrix `[out, in]`.

        Args:
            name: The attribute under which the module keeps it; weight rules and quantisation find it by its path.
            in_features: Input width of the whole model.
            parts: Output width, or the projections that stand one after the other, widths of the whole model.
            bias: Whether there is one.
            shard: How ranks divide it: `out` by units of each part (each rank has some of the outputs), `in` by inputs
                (each has a share of every output); None: every rank has all.
            act: Applied to the result; takes two parts of one width.

        Returns:
            A `torch.nn.Module`, its parameters not initialised.

        Raises:
            ModelError: The ranks do not divide it evenly.
        """
        made = (Part("", parts),) if isinstance(parts, int) else tuple(parts)
        path = self._full(name)
        spec = MatrixSpec(path=path, in_features=in_features, parts=made, bias=bias, shard=shard, act=act)
        return self.factory.linear(self, spec)

    def experts(
        self,
        name: str,
        num: int,
        top_k: int,
        hidden: int,
        inner: int,
        *,
        act: Act,
        bias: bool = False,
        weigh: Literal["output", "input"] = "output",
        shard: Literal["inner", "expert"] | None = None,
    ) -> Experts:
        """Make `num` MLPs; their matrices are `gate_up`, with the parts `gate`, but for `relu2`, and `up`, and `down`.

        Args:
            name: As for `linear`.
            num: E.
            top_k: K.
            hidden: H.
            inner: Width between.
            act: Of the gate.
            bias: On all matrices.
            weigh: What a token's weights multiply: an expert's output, or its input.
            shard: How ranks divide them: by inner width, or whole experts; None: as `Parallel.expert_shard` says.

        Returns:
            A `torch.nn.Module`, its parameters not initialised.

        Raises:
            ModelError: The ranks do not divide them evenly.
        """
        spec = ExpertsSpec(
            path=self._full(name),
            num=num,
            top_k=top_k,
            hidden=hidden,
            inner=inner,
            act=act,
            bias=bias,
            weigh=weigh,
            shard=shard or self.parallel.expert_shard,
        )
        return self.factory.experts(self, spec)

    def _full(self, name: str) -> str:
        return f"{self.path}.{name}" if self.path else name
