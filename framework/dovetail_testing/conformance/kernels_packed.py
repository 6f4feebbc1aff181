"""Places and operands of products with packed weights, of routers and of experts."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor

from dovetail.contracts.kernels import OPS, Ask, Kernel
from dovetail.contracts.layers import Act
from dovetail.sdk.layers.routing import Routing
from dovetail.sdk.quantization.forms import Form, Int4, Mxfp4, Scaled

Case = tuple[dict[str, int], dict[str, Any]]
"""Widths and options of a place."""
FLOAT8 = torch.float8_e4m3fn
FORMS: Sequence[Form] = (Scaled(), Scaled(FLOAT8), Scaled(FLOAT8, 128), Int4(128), Int4(64, has_zero=True), Mxfp4())
ROUTINGS: Sequence[Routing] = (
    Routing(num=11, top_k=4, score="chosen", bias=True),
    Routing(num=32, top_k=3, scale=2.5),
    Routing(num=8, top_k=8, normalise=False),
    Routing(num=12, top_k=4, score="sigmoid", correction=True, groups=3, top_groups=2, is_wide=True),
    Routing(num=20, top_k=2, groups=5, top_groups=3, group_score="best"),
)
EXPERTS: Mapping[str, int] = {"E": 6, "H": 128, "I": 128, "C": 2}
OTHERS = 3
"""Experts that other ranks have."""
GATES: Sequence[tuple[Act, str]] = (("silu_and_mul", "output"), ("clamped_silu_and_mul", "input"))
UNGATED: tuple[Act, str] = ("relu2", "output")
EPS, SCALE = 1e-6, 0.5
ROUNDING = Scaled(FLOAT8, activations=FLOAT8)
"""A form that lets a product round its rows; experts never have it."""
TOLERANCE = {"float32": 2e-3}
"""Largest error of a row where weights are packed: tensor cores round float32."""
ROUNDED = 8e-2
"""Largest error of a row that was rounded to float8."""


def tolerance(ask: Ask) -> Mapping[str, float]:
    """Return the largest error of a row by dtype, where it is another one than for all operations."""
    if getattr(dict(ask.options).get("form"), "activations", None) is not None:
        return dict.fromkeys(("float32", "bfloat16", "float16"), ROUNDED)
    return TOLERANCE if OPS[ask.op].packs else {}


def places(op: str, dtype: str) -> Iterator[Case] | None:
    """Return widths and options of the places of an operation whose options depend on one another, None for others."""
    if op in ("route", "norm_route"):
        return _of_routers(op, dtype)
    if op == "experts":
        return _of_experts()
    return _of_forms(op, dtype) if OPS[op].packs else None


def _of_routers(op: str, dtype: str) -> Iterator[Case]:
    """A choice by sums of rounded scores, or by corrected ones, may be another one: those are for whole numbers."""
    for at, routing in enumerate(ROUTINGS):
        if op == "route" or dtype == "float32" or (routing.groups == 1 and not routing.correction):
            dims = {"H": (63, 100, 2000)[at % 3]} if op == "norm_route" else {}
            yield dims, {"routing": routing, "dtype": getattr(torch, dtype)}


def _of_experts() -> Iterator[Case]:
    """All experts, and some of those that there are, whose rows no library takes."""
    for at, (act, weigh) in enumerate((*GATES, UNGATED)):
        ranks = {"first": OTHERS * at, "total": EXPERTS["E"] + OTHERS * at}
        yield {**EXPERTS, "I": 35 if at else 64}, {"act": act, "weigh": weigh, **ranks}


def _of_forms(op: str, dtype: str) -> Iterator[Case]:
    is_linear = op in ("packed_linear", "packed_norm_linear", "packed_norm_gate")
    for at, form in enumerate((*FORMS, ROUNDING, None) if is_linear else FORMS):
        act, weigh = GATES[at % len(GATES)]
        options: dict[str, Any] = {"forms": (form, form), "act": act, "weigh": weigh, "first": OTHERS * (at % 2)}
        if op in ("packed_linear", "packed_norm_linear"):
            yield {"N": (74, 96)[at % 2], "K": 256}, {"form": form}
        elif op == "packed_norm_gate":
            yield {"F": 37, "K": 128}, {"form": form, "act": act}
        elif op == "packed_experts":
            yield dict(EXPERTS), options
            yield dict(EXPERTS), {**options, "act": UNGATED[0], "weigh": UNGATED[1]}
        else:
            routing = replace(ROUTINGS[0], num=EXPERTS["E"] + OTHERS, top_k=EXPERTS["C"])
            yield dict(EXPERTS), {**options, "routing": routing, "dtype": getattr(torch, dtype)}


class PackedOperands:
    """Makes the operands of an operation.

    Args:
        ask: The operation.
        rows: T.
        device: Where they are.
        generator: Of their numbers.
        draw: Makes a tensor of a shape.
        by_row: Makes `[T, …]`, as slices of a wider tensor where strides are tried.
    """

    def __init__(
        self,
        ask: Ask,
        rows: int,
        device: torch.device,
        generator: torch.Generator,
        draw: Callable[..., Tensor],
        by_row: Callable[..., Tensor],
    ) -> None:
        self.ask, self.rows, self.device, self.generator = ask, rows, device, generator
        self.draw, self.by_row = draw, by_row
        self.dims, self.options = dict(ask.dims), dict(ask.options)

    def make(self) -> list[Any]:
        """Return them, in order; a packed one is the tensors of its form."""
        op, dims = self.ask.op, self.dims
        if op == "route":
            return self._route()
        if op in ("norm_route", "routed_experts"):
            around = self._norm_route(self.options["routing"], dims["H"])
            return around if op == "norm_route" else [*around, *self._matrices(), self._maybe(self.by_row, dims["H"])]
        if op in ("experts", "packed_experts"):
            total = self.options.get("total", dims["E"] + OTHERS)
            ids = torch.rand(self.rows, total, generator=self.generator).argsort(1)[:, : dims["C"]]
            shares = self.draw(self.rows, dims["C"]).abs()
            residual = self._maybe(self.by_row, dims["H"])
            return [self.by_row(dims["H"]), ids.to(self.device), shares, *self._matrices(), residual]
        out = dims["N"] if "N" in dims else 2 * dims["F"]
        weight = matrix(self.options["form"], (out, dims["K"]), self.device, self.ask.dtype)
        x, bias = self.by_row(dims["K"]), self.draw(out) if self.rows % 2 else None
        if op == "packed_linear":
            return [x, weight, bias]
        given = [x, self.draw(dims["K"]) if self.rows % 4 else None, EPS, weight, bias]
        return given if op == "packed_norm_gate" else [*given, self._maybe(self.by_row, out)]

    def _maybe(self, make: Callable[..., Tensor], width: int) -> Tensor | None:
        return make(width) if self.rows % 3 else None

    def _route(self) -> list[Any]:
        """Logits of which no two of a row are equal, in any dtype."""
        routing: Routing = self.options["routing"]
        given = self.by_row(routing.num)
        order = given.float().argsort(1) / 4
        logits = order.to(torch.float32 if routing.is_wide else given.dtype)
        if not given.is_contiguous():
            logits = torch.cat((logits, logits), dim=1)[:, : routing.num]
        return [logits, self._correction(routing), SCALE]

    def _correction(self, routing: Routing) -> Tensor | None:
        return self.draw(routing.num, dtype=torch.float32) if routing.correction else None

    def _norm_route(self, routing: Routing, hidden: int) -> list[Any]:
        """As `_route` in dtypes that round: an expert's logit is one number of the token there."""
        x, norm = self.by_row(hidden), self.draw(hidden)
        weight, bias = self.draw(routing.num, hidden), self.draw(routing.num) if routing.bias else None
        if self.ask.dtype != "float32":
            x[:, : routing.num] = (x[:, : routing.num].float().argsort(1) / 4).to(x.dtype)
            weight, norm = torch.eye(routing.num, hidden, device=x.device).to(x.dtype), norm * 0 + 1.5
            bias = None if bias is None else bias * 1e-3
        return [x, norm if self.rows % 4 else None, EPS, weight, bias, self._correction(routing), SCALE]

    def _matrices(self) -> list[Any]:
        num, hidden, inner = (self.dims[letter] for letter in "EHI")
        forms = self.options.get("forms", (None, None))
        wide = inner if self.options["act"] == UNGATED[0] else 2 * inner
        shapes = (num, wide, hidden), (num, hidden, inner)
        given: list[Any] = []
        for form, shape in zip(forms, shapes, strict=True):
            given.append(self.draw(*shape) / 8 if form is None else matrix(form, shape, self.device))
            given.append(self.draw(*shape[:2]) if self.rows % 2 else None)
        return given


@lru_cache(maxsize=64)
def matrix(
    form: Form | None, shape: tuple[int, ...], device: torch.device, dtype: str = "float32"
) -> Mapping[str, Tensor]:
    """Return the tensors of a form for a matrix, or a plain one in `dtype`, the same ones for each call."""
    weight = torch.randn(*shape, generator=torch.Generator().manual_seed(5)) / 8
    if form is None:
        return {"weight": weight.to(device, getattr(torch, dtype))}
    return {name: tensor.to(device) for name, tensor in form.quantise(weight).items()}


class Packing:
    """A kernel that packs, called with the tensors of forms: it packs each matrix once.

    Args:
        kernel: The kernel.
        names: Of its operands.
    """

    def __init__(self, kernel: Any, names: Sequence[str]) -> None:
        self._kernel, self._names = kernel, names
        self._packed: dict[str, Any] = {}

    def __call__(self, *operands: Any) -> Any:
        """Compute."""
        given = list(operands)
        for at, name in enumerate(self._names):
            if isinstance(given[at], Mapping):
                if name not in self._packed:
                    self._packed[name] = self._kernel.pack(given[at], "" if name == "weight" else name)
                given[at] = self._packed[name]
        return self._kernel(*given)


def called(ask: Ask, kernel: Kernel, names: Sequence[str]) -> Kernel:
    """Return a kernel that may be called with the tensors of forms."""
    return Packing(kernel, names) if OPS[ask.op].packs else kernel


def dense(ask: Ask, results: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
    """Return the share of every expert in place of ids and shares, whose order is free."""
    ids, shares, *rest = results
    every = shares.new_zeros(len(ids), ask.option("routing").num).scatter_(1, ids, shares)
    return every, *rest
