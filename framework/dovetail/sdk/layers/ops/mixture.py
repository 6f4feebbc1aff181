"""Routers and experts in plain torch: the reference that faster kernels must equal.

T tokens, H hidden size, E experts, I width between of an expert, C experts chosen for each token, G groups of experts.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any, Literal

import torch
import torch.nn.functional as F
from torch import Tensor

from dovetail.contracts.device import is_on_host
from dovetail.contracts.kernels import Ask, PackedKernel
from dovetail.contracts.operations import Component
from dovetail.sdk.layers.ops import reference
from dovetail.sdk.layers.ops.reference import LinearKernel, NormKernel, Unary
from dovetail.sdk.layers.routing import Routing

if TYPE_CHECKING:
    from dovetail.contracts.layers import Act
    from dovetail.sdk.quantization.forms import Form

Choice = tuple[Tensor, Tensor]
"""Ids and shares, `[T, C]` both."""
OfExpert = Callable[[Tensor, int], Tensor]
"""Multiplies rows by the matrix of one of this rank's experts."""
Weigh = Literal["output", "input"]

ROW_BYTES = 16
"""Rows of a grouped product take a multiple of so many."""


def route(logits: Tensor, correction: Tensor | None, scale: float, *, routing: Routing, dtype: torch.dtype) -> Choice:
    """Choose by logits `[T, E]`; returns ids, and shares in `dtype`, which are multiplied by `scale`."""
    if routing.score == "chosen":
        best, ids = logits.topk(routing.top_k, dim=-1)
        shares = best.softmax(-1).float()
    else:
        wide = logits.float()
        scores = wide.sigmoid() if routing.score == "sigmoid" else wide.softmax(-1)
        choice = _by_groups(scores if correction is None else scores + correction, routing)
        ids = choice.topk(routing.top_k, dim=-1, sorted=False).indices
        shares = scores.gather(1, ids)
        if routing.normalise:
            shares = shares / (shares.sum(-1, keepdim=True) + routing.least)
    return ids, (shares * (routing.scale * scale)).to(dtype)


def _by_groups(choice: Tensor, routing: Routing) -> Tensor:
    """What experts are chosen by, `[T, E]`: those outside the best groups fall behind all others."""
    if routing.groups == 1:
        return choice
    by_group = choice.view(-1, routing.groups, routing.num // routing.groups)
    num = 1 if routing.group_score == "best" else 2
    of_group = by_group.topk(num, dim=-1).values.sum(-1)
    best = of_group.topk(routing.top_groups, dim=-1, sorted=False).indices
    stays = torch.zeros_like(of_group, dtype=torch.bool).scatter_(1, best, True)
    return by_group.masked_fill(~stays[..., None], float("-inf")).view_as(choice)


def route_by_rows(
    logits: Tensor, correction: Tensor | None, scale: float, *, routing: Routing, dtype: torch.dtype
) -> Choice:
    """As `route`, each row by itself."""
    rows = [route(row, correction, scale, routing=routing, dtype=dtype) for row in torch.split(logits, 1)]
    return torch.cat([ids for ids, _ in rows]), torch.cat([shares for _, shares in rows])


def parts_of_norm_route(ask: Ask) -> tuple[Component, ...]:
    """Return what `normed_route` is put together of."""
    routing = ask.option("routing")
    product = "wide_linear" if routing.is_wide else "linear"
    return (
        Component("rms_norm", {"H": "H"}),
        Component(product, {"N": routing.num, "K": "H"}),
        Component("route", {}, {"routing": routing, "dtype": ask.option("dtype")}),
    )


def normed_route(
    norm: NormKernel, linear: LinearKernel, route: Callable[..., Choice], *, routing: Routing, dtype: torch.dtype
) -> Callable[..., tuple[Tensor, Tensor, Tensor]]:
    """Return `norm_route` put together of the kernels of a norm, a product and a choice."""

    def norm_route(
        x: Tensor, weight: Tensor | None, eps: float, matrix: Tensor, bias: Tensor | None, correction: Tensor | None,
        scale: float,
    ) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
        rows = x if weight is None else norm(x, weight, eps)
        return *route(linear(rows, matrix, bias), correction, scale), rows

    return norm_route


def experts(
    x: Tensor, ids: Tensor, shares: Tensor, gate_up: Tensor, gate_up_bias: Tensor | None, down: Tensor,
    down_bias: Tensor | None, residual: Tensor | None, *, act: Act, weigh: Weigh, first: int, total: int,
) -> Tensor:  # fmt: skip
    """Add up what each token's experts make of it, times their shares, and `residual`.

    Args:
        x: `[T, H]`.
        ids: `[T, C]`, numbers among all ranks' experts; those that are not here add nothing.
        shares: `[T, C]`.
        gate_up: `[E, 2I, H]`, of the experts here; with `relu2`, which has no gate, `[E, I, H]`.
        gate_up_bias: `[E, 2I]`, or None; see there.
        down: `[E, H, I]`.
        down_bias: `[E, H]`, or None.
        residual: `[T, H]`, or None.
        act: Of the gate.
        weigh: Whether shares multiply an expert's output or its input.
        first: Number of the first expert here.
        total: Experts of all ranks.
    """
    gate = lambda both: reference.act_and_mul(both, act=act)  # noqa: E731 - one expression
    if are_groupable(x, gate_up, down, total):
        return grouped(x, ids, shares, gate_up, gate_up_bias, down, down_bias, residual, gate=gate, weigh=weigh)
    of_each = each_expert(gate, F.linear, F.linear, act=act, weigh=weigh, first=first, total=total)
    return of_each(x, ids, shares, gate_up, gate_up_bias, down, down_bias, residual)


def are_groupable(x: Tensor, gate_up: Tensor, down: Tensor, total: int) -> bool:
    """Whether torch's grouped product multiplies by these: all experts are here, and rows as it takes them."""
    if not is_on_host(x.device) and x.dtype != torch.bfloat16:
        return False  # torch's grouped product of other types cannot be recorded in a graph
    widths = (*gate_up.shape[1:], *down.shape[1:])
    return len(gate_up) == total and all(width * x.element_size() % ROW_BYTES == 0 for width in widths)


def grouped(
    x: Tensor, ids: Tensor, shares: Tensor, gate_up: Tensor, gate_up_bias: Tensor | None, down: Tensor,
    down_bias: Tensor | None, residual: Tensor | None, *, gate: Unary, weigh: Weigh,
) -> Tensor:  # fmt: skip
    """As `experts`, with one row for each choice, sorted by expert."""
    order = ids.flatten().argsort(stable=True)
    chosen, rows, weight = ids.flatten()[order], order // ids.shape[1], shares.flatten()[order, None].to(x.dtype)
    ends = (chosen[None] <= torch.arange(len(gate_up), device=x.device)[:, None]).sum(1, dtype=torch.int32)

    def product(given: Tensor, matrix: Tensor, bias: Tensor | None) -> Tensor:
        y: Tensor = F.grouped_mm(given, matrix.transpose(-1, -2), offs=ends)
        return y if bias is None else y + bias[chosen]

    given = x[rows] * weight if weigh == "input" else x[rows]
    y = product(gate(product(given, gate_up, gate_up_bias)), down, down_bias)
    y = y if weigh == "input" else y * weight
    # A token's experts are added up in the order of its choice, whoever else is in the batch.
    out = torch.empty_like(y).index_copy_(0, order, y).view(*ids.shape, y.shape[-1]).sum(1)
    return out if residual is None else residual + out


def parts_of_experts(ask: Ask) -> tuple[Component, ...]:
    """Return what `each_expert` is put together of."""
    return (
        Component("act_and_mul", {"F": "I"}, {"act": ask.option("act")}),
        Component("linear", {"N": "I" if ask.option("act") == "relu2" else "2I", "K": "H"}),
        Component("linear", {"N": "H", "K": "I"}),
    )


def each_expert(
    gate: Unary, up: LinearKernel, down: LinearKernel, *, act: Act, weigh: Weigh, first: int, total: int
) -> Callable[..., Tensor]:
    """Return `experts` put together of the kernels of an activation and two products, one expert after the other."""

    def experts(
        x: Tensor, ids: Tensor, shares: Tensor, ups: Tensor, up_bias: Tensor | None, downs: Tensor,
        down_bias: Tensor | None, residual: Tensor | None,
    ) -> Tensor:  # fmt: skip
        return _each(
            x, ids, shares, residual, len(ups), first, weigh, gate,
            lambda rows, one: up(rows, ups[one], None if up_bias is None else up_bias[one]),
            lambda rows, one: down(rows, downs[one], None if down_bias is None else down_bias[one]),
        )  # fmt: skip

    return experts


def _each(
    x: Tensor, ids: Tensor, shares: Tensor, residual: Tensor | None, num: int, first: int, weigh: Weigh, gate: Unary,
    up: OfExpert, down: OfExpert,
) -> Tensor:  # fmt: skip
    """Every expert computes every token, which takes E / C times as long as it must; on CPU, those that chose it."""
    out = torch.zeros_like(x)

    def of_one(one: int, rows: Tensor, weight: Tensor) -> Tensor:
        y = down(gate(up(rows * weight if weigh == "input" else rows, one)), one)
        return y if weigh == "input" else y * weight

    for one in range(num):
        chosen = ids == first + one
        weight, has_chosen = (shares * chosen).sum(-1, keepdim=True).to(x.dtype), chosen.any(-1)
        if is_on_host(x.device):  # nothing waits on the host there
            rows = has_chosen.nonzero()[:, 0]
            if len(rows):
                out[rows] += of_one(one, x[rows], weight[rows])
        else:
            out = out + of_one(one, x, weight).where(has_chosen[:, None], 0)
    return out if residual is None else residual + out


def parts_of_packed_experts(ask: Ask) -> tuple[Component, ...]:
    """Return what `EachPacked` is put together of."""
    return (Component("act_and_mul", {"F": "I"}, {"act": ask.option("act")}),)


class EachPacked:
    """`packed_experts`, put together of an activation and matrices that are written out, one expert after the other.

    A subclass may multiply by packed matrices: it overrides `keeps`, `pack` and `product`.
    """

    def __init__(
        self, gate: Unary, *, forms: tuple[Form | None, Form | None], act: Act, weigh: Weigh, first: int
    ) -> None:
        self._gate, self._weigh, self._first = gate, weigh, first
        self.forms = dict(zip(("gate_up", "down"), forms, strict=True))

    def keeps(self, half: str = "") -> bool:
        """See `PackedKernel.keeps`."""
        return True

    def pack(self, tensors: Mapping[str, Tensor], half: str = "") -> Any:
        """See `PackedKernel.pack`."""
        return tensors

    def product(self, x: Tensor, weight: Any, bias: Tensor | None, one: int, half: str) -> Tensor:
        """Multiply by the matrix of one expert, and add its bias."""
        form, of_one = self.forms[half], {name: tensor[one] for name, tensor in weight.items()}
        matrix = of_one["weight"] if form is None else form.dequantise(of_one, x.dtype)
        return F.linear(x, matrix, None if bias is None else bias[one])

    def __call__(
        self, x: Tensor, ids: Tensor, shares: Tensor, ups: Any, up_bias: Tensor | None, downs: Any,
        down_bias: Tensor | None, residual: Tensor | None,
    ) -> Tensor:  # fmt: skip
        """See `experts`."""
        return _each(
            x, ids, shares, residual, self.num(ups), self._first, self._weigh, self._gate,
            lambda rows, one: self.product(rows, ups, up_bias, one, "gate_up"),
            lambda rows, one: self.product(rows, downs, down_bias, one, "down"),
        )  # fmt: skip

    def num(self, weight: Any) -> int:
        """Experts of a matrix."""
        return len(next(iter(weight.values())))


def parts_of_routed_experts(ask: Ask) -> tuple[Component, ...]:
    """Return what `RoutedPacked` is put together of."""
    options = {name: ask.option(name) for name in ("forms", "act", "weigh", "first")}
    return (
        Component("norm_route", {"H": "H"}, {"routing": ask.option("routing"), "dtype": ask.option("dtype")}),
        Component("packed_experts", {letter: letter for letter in "EHIC"}, options),
    )


class RoutedPacked:
    """`routed_experts`, put together of a router and experts, whose matrices are packed as these want them."""

    def __init__(self, router: Callable[..., tuple[Tensor, Tensor, Tensor]], experts: PackedKernel, **_: Any) -> None:
        self._router, self._experts = router, experts
        self.keeps, self.pack = experts.keeps, experts.pack

    def __call__(
        self, x: Tensor, norm: Tensor | None, eps: float, weight: Tensor, bias: Tensor | None,
        correction: Tensor | None, scale: float, *matrices: Any,
    ) -> Tensor:  # fmt: skip
        """Choose experts, and add up what they make."""
        ids, shares, rows = self._router(x, norm, eps, weight, bias, correction, scale)
        made: Tensor = self._experts(rows, ids, shares, *matrices)
        return made
