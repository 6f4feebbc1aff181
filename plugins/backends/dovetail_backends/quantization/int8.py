"""`int8`: weights of 8 bits with a scale for each row, or for groups of a row's inputs. The reference product.

Reads what `compressed-tensors` writes as `int-quantized` (also called w8a16 and w8a8): for a matrix `[N, K]` an int8
`weight` and a floating-point `weight_scale` `[N, 1]`, or `[N, K / group]`; the number is `weight * weight_scale`. Where
the checkpoint asks for activations of 8 bits, they are not rounded here: what comes out is nearer to the unquantised
model. Every product writes the weight out in the model's dtype, so it saves memory at rest, and no time.

Source: https://github.com/vllm-project/compressed-tensors, `compressors/quantized_compressors/naive_quantized.py` and
`quantization/quant_config.py`, read November 2026. T tokens, N outputs, K inputs, E experts.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from dovetail.contracts.layers import Act, BuildContext, Experts, LayerFactory, Linear, Norm, Part, Stream
from dovetail.contracts.quantization import Quantization, Stored
from dovetail.errors import ModelError
from dovetail.layers import ops
from dovetail.layers.experts import ExpertMatrix, GatedExperts
from dovetail.layers.matrix import Matrix
from dovetail.layers.shards import gated

METHOD, FORMAT = "compressed-tensors", "int-quantized"


class Int8(Quantization):
    """Which checkpoints are read, and which matrices of them are int8."""

    @classmethod
    def why_not(cls, config: Mapping[str, Any]) -> str | None:
        """Say why a checkpoint cannot be served."""
        found = config.get("quant_method"), config.get("format")
        if found != (METHOD, FORMAT):
            return f"it reads quant_method {METHOD!r} with format {FORMAT!r}, not {found[0]!r} with {found[1]!r}"
        if config.get("kv_cache_scheme"):
            return f"kv_cache_scheme {config['kv_cache_scheme']!r}: the cache keeps the model's dtype"
        try:
            schemes = [_scheme(name, group) for name, group in _groups(config).items()]
        except ValueError as error:
            return str(error)
        if len(set(schemes)) > 1:
            return "config_groups differ in group_size: one for all matrices is possible"
        return None

    def factory(self, plain: LayerFactory) -> LayerFactory:
        """Return what makes int8 matrices, and plain ones where the checkpoint has none."""
        ((_, group), *_) = [(name, _scheme(name, group)) for name, group in _groups(self.config).items()]
        return Int8Factory(self.stored, group, plain)


class Int8Factory:
    """Asks the checkpoint of each matrix whether it is int8; `group` inputs share a scale, None: a row's."""

    def __init__(self, stored: Stored, group: int | None, plain: LayerFactory) -> None:
        self.stored, self.group, self.plain = stored, group, plain

    def covers(self, name: str) -> bool:
        """Whether a matrix is int8; without a checkpoint all but the output head are.

        Raises:
            ModelError: Some of its parts are and others are not.
        """
        if not self.stored.is_known:
            return name.rpartition(".")[2] != "lm_head"
        dtypes = self.stored.dtypes(name) | self.stored.dtypes(name, "")
        if "I8" in dtypes and len(dtypes) > 1:
            raise ModelError(
                f"{name}: some of its projections are int8 and others {', '.join(sorted(dtypes - {'I8'}))}"
            )
        return "I8" in dtypes

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
        if not self.covers(name):
            return self.plain.linear(ctx, name, in_features, parts, bias=bias, shard=shard, act=act)
        return Int8Linear(ctx, name, in_features, parts, bias=bias, shard=shard, act=act, group=self.group)

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
        """See `BuildContext.experts`.

        Raises:
            ModelError: One of the two matrices is int8 and the other is not.
        """
        covered = self.covers(f"{name}.gate_up"), self.covers(f"{name}.down")
        if covered[0] != covered[1]:
            raise ModelError(f"{name}: one of its matrices is int8 and the other is not")
        if not covered[0]:
            return self.plain.experts(
                ctx, name, num, top_k, hidden, inner, act=act, bias=bias, weigh=weigh, shard=shard
            )
        made = type("Int8Experts", (GatedExperts,), {"matrix": _expert_matrix(self.group)})
        found: Experts = made(ctx, name, num, top_k, hidden, inner, act=act, bias=bias, weigh=weigh, shard=shard)
        return found


class Int8Linear(Matrix):
    """`act(norm(x) Wᵀ + b) * scale` with `W = weight * weight_scale`; see `dovetail.contracts.layers.Linear`."""

    weight: nn.Parameter
    weight_scale: nn.Parameter
    bias: nn.Parameter | None

    def __init__(
        self,
        ctx: BuildContext,
        path: str,
        in_features: int,
        parts: Sequence[Part],
        *,
        bias: bool,
        shard: Literal["out", "in"] | None,
        act: Act | None,
        group: int | None,
    ) -> None:
        super().__init__(ctx, path, in_features, parts, shard)
        self._act, self._group = gated(path, act, parts), group or in_features
        self.store("weight", torch.int8)
        self.store("weight_scale", torch.float32, granule=self._group)
        self.bias = None
        if bias:
            self.store("bias", ctx.dtype, granule=None)

    def finalize(self) -> None:
        """Where ranks add up shares, the first one adds the bias."""
        if self.is_share and self.parallel.rank > 0:
            self.bias = None

    def forward(
        self, x: Tensor | Stream, *, norm: Norm | None = None, add: Stream | None = None, scale: float = 1.0
    ) -> Tensor | Stream:
        x = x.total() if isinstance(x, Stream) else x
        x = x if norm is None else norm(x)
        y = F.linear(x, dequantise(self.weight, self.weight_scale, self._group, x.dtype), self.bias)
        return self.finish(y if self._act is None else ops.act_and_mul(self._act, y), add, scale)


class Int8ExpertMatrix(ExpertMatrix):
    """One int8 matrix for each expert."""

    group: int | None = None
    suffixes = {**ExpertMatrix.suffixes, "weight_scale": (".weight_scale", "_scale")}  # noqa: RUF012 - as the base

    weight_scale: nn.Parameter

    def make_weight(self, ctx: BuildContext) -> None:
        """Store numbers and scales."""
        self.store("weight", torch.int8)
        self.store("weight_scale", torch.float32, granule=self.group or self.in_features)

    def of_expert(self, expert: int, dtype: torch.dtype) -> Tensor:
        """Return one expert's weight."""
        group = self.group or self.in_features
        return dequantise(self.weight[expert], self.weight_scale[expert], group, dtype)


def _expert_matrix(group: int | None) -> type[Int8ExpertMatrix]:
    return type("Int8ExpertMatrix", (Int8ExpertMatrix,), {"group": group})


def dequantise(weight: Tensor, scale: Tensor, group: int, dtype: torch.dtype) -> Tensor:
    """Return `weight` `[N, K]` int8 times `scale` `[N, ceil(K / group)]`, rounded to `dtype` once."""
    if scale.shape[1] == 1:
        return (weight * scale).to(dtype)
    return (weight * scale.repeat_interleave(group, dim=1)[:, : weight.shape[1]]).to(dtype)


def _groups(config: Mapping[str, Any]) -> Mapping[str, Any]:
    groups = config.get("config_groups")
    if not isinstance(groups, Mapping) or not groups:
        raise ValueError(f"config_groups is {groups!r}: expected the schemes of the weights")
    return groups


def _scheme(name: str, group: Any) -> int | None:
    """Return the inputs that share a scale, None for a row's.

    Raises:
        ValueError: The scheme is another one; says which key.
    """
    weights = group.get("weights") if isinstance(group, Mapping) else None
    if not isinstance(weights, Mapping):
        raise ValueError(f"config_groups.{name} has no weights")
    wanted: dict[str, tuple[Any, ...]] = {
        "num_bits": (8,),
        "type": ("int",),
        "symmetric": (True,),
        "strategy": ("channel", "group"),
        "actorder": (None, False),
    }
    for key, possible in wanted.items():
        if weights.get(key) not in possible:
            given = weights.get(key)
            raise ValueError(f"config_groups.{name}.weights.{key} is {given!r}; possible: {possible[0]!r}")
    if weights["strategy"] == "channel":
        return None
    size = weights.get("group_size")
    if not isinstance(size, int) or size < 1:
        raise ValueError(f"config_groups.{name}.weights.group_size is {size!r}; possible: a number from 1")
    return size
