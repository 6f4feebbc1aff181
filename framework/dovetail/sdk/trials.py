"""Made-up operands of operations, to time kernels with: floats, numbers and packed matrices, by their signatures.

Operands that have to mean something, such as the rows of a step or the experts of a token, are not made here: a kernel
set whose operation has them brings its own (`KernelSet.trial`).
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

import torch

from dovetail.contracts.kernels import OPS, Ask

SCALARS = {"eps": 1e-6, "scale": 1.0}
FREE = {"N": 8, "nope": 128}
"""Letters of shapes that an operation takes as they come: heads, and a head's numbers that are not rotated."""
MADE = frozenset(
    {"rms_norm", "add_rms_norm", "wide_rms_norm", "layer_norm", "rotations", "norm_rotate", "latent_rows"}
    | {"act_and_mul", "linear", "wide_linear", "linear_add", "norm_linear", "norm_gate", "gated_rms_norm"}
    | {"sigmoid_gate", "packed_linear", "packed_norm_linear", "packed_norm_gate"}
)
_FACTS = re.compile(r"(?:\[([^\]]*)\])?(?: or \[([^\]]*)\])?(?: ?(float32|packed))?")


def operands(ask: Ask, rows: int, device: torch.device) -> list[Any] | None:
    """Return random operands of an operation, in its order, with as many rows T; None: they cannot be made here.

    Operands that may be None are None. A packed matrix is a mapping of its form's tensors, to be packed by a kernel.
    """
    if ask.op not in MADE:
        return None
    known = {**FREE, **dict(ask.dims), "T": rows}
    return [_made(name, facts, ask, known, device) for name, facts in OPS[ask.op].operands.items()]


def _made(name: str, facts: str, ask: Ask, known: Mapping[str, int], device: torch.device) -> Any:
    found = _FACTS.match(facts)
    if found is None or facts.endswith("None"):
        return None
    shape, other, kind = found.groups()
    if kind == "packed":
        num = known["N"] if ask.op != "packed_norm_gate" else 2 * known["F"]
        weight, form = torch.randn(num, known["K"], device=device), ask.option("form")
        return {"weight": weight.to(getattr(torch, ask.dtype))} if form is None else form.quantise(weight)
    if name == "positions":
        return torch.arange(known["T"], device=device)
    if other is not None and known[other] == 1:  # a number, or a tensor of them
        return 1.0
    if shape is None:
        return SCALARS[name]
    sizes = [_size(each, known) for each in (other or shape).split(",")]
    dtype = torch.float32 if kind == "float32" else getattr(torch, ask.dtype)
    return torch.randn(*sizes, device=device).to(dtype)


def _size(text: str, known: Mapping[str, int]) -> int:
    """Return a width such as `2F`, `D / 2` or `R + D`."""
    total = 0
    for term in text.split("+"):
        over, _, under = term.partition("/")
        size = 1
        for factor in re.findall(r"\d+|[A-Za-z]+", over):
            size *= int(factor) if factor.isdigit() else known[factor]
        total += size // int(under or 1)
    return total
