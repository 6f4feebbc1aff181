"""Operations that a kernel set claims: what they are given and return, and what a test says of those it compared."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

from torch import Tensor

from dovetail.contracts.kernels import OPS, Ask, Claim, Kernel
from dovetail_testing.conformance import kernels_packed as packed
from dovetail_testing.conformance.kernels_samples import Operands
from dovetail_testing.conformance.kernels_steps import read_back


class ClaimedOperation(NamedTuple):
    """A claimed operation at a place: the question, what holds, and the kernel."""

    ask: Ask
    claim: Claim
    kernel: Kernel

    @property
    def has_results(self) -> bool:
        """Whether it returns something; others change operands alone."""
        return not OPS[self.ask.op].signature.endswith("None")


def compared(places: Sequence[ClaimedOperation]) -> str:
    """Return operations by the dtypes that they are claimed in: `linear, rms_norm in float32, bfloat16`."""
    dtypes: dict[str, list[str]] = {}
    for place in places:
        of_op = dtypes.setdefault(place.ask.op, [])
        of_op += [place.ask.dtype] if place.ask.dtype not in of_op else []
    by_dtypes: dict[str, list[str]] = {}
    for op, found in dtypes.items():
        by_dtypes.setdefault(", ".join(found), []).append(op)
    return "; ".join(f"{', '.join(ops)} in {found}" for found, ops in by_dtypes.items()) + "; no other is claimed"


def copies(operands: Operands) -> Operands:
    """Return operands whose tensors are copies."""
    return [one.clone() if isinstance(one, Tensor) else one for one in operands]


def row_of(operands: Operands, ask: Ask, row: int) -> Operands:
    """Return the operands of one row: those whose first axis is T."""
    parts = OPS[ask.op].signature.partition(" -> ")[0]
    is_by_row = {name: f"{name} [T" in parts for name in list(OPS[ask.op].operands)}
    return [
        one[row : row + 1] if isinstance(one, Tensor) and is_by_row[name] else one
        for name, one in zip(list(OPS[ask.op].operands), operands, strict=True)
    ]


def results_of(ask: Ask, found: Any, operands: Operands) -> tuple[Tensor, ...]:
    """Return an operation's results, and the operands that it changes behind them.

    What it leaves to its caller is left out: the first R of queries of `latent_rows`, and what `draw_adjusted` does not
    have to say.
    """
    results = () if found is None else found if isinstance(found, tuple) else (found,)
    row = OPS[ask.op]
    if ask.op in ("route", "norm_route"):
        results = packed.dense(ask, results)
    if ask.op == "latent_rows" and len(results) == 2:
        results = results[0][..., ask.dim("R") :], results[1]
    by_name = dict(zip(row.operands, operands, strict=True))
    if ask.op == "draw_adjusted" and len(results) == 2:
        results = results[0], read_back(results[1], by_name["rows"], by_name["numbers"])
    return *results, *(one for name, one in by_name.items() if name in row.changes)


def one_of_each(places: Sequence[ClaimedOperation]) -> Iterator[ClaimedOperation]:
    """Yield the first place of each operation."""
    seen: set[str] = set()
    for place in places:
        if place.ask.op not in seen:
            seen.add(place.ask.op)
            yield place
