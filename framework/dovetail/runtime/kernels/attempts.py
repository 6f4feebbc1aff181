"""Tries what a package's kernel set claims before weights are read: a call, held against what the operation means.

A second call shows whether the first one's result is its caller's own.

Weights may take minutes to load, and a wrong kernel may serve for days unnoticed. The conformance kit compares every
row and many widths; these calls see what no rounding explains.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import prod
from typing import Any

import torch
from torch import Tensor

from dovetail.contracts.kernels import OPS, Ask, meaning
from dovetail.runtime.kernels.contest import Contender, copies_of, distance_of, operands_of, results_of, results_with

ROWS = 3
MAX_NUMBERS = 1 << 26
"""Product of an operation's widths: more would take memory and time beside a model that is about to be loaded."""
WRONG = 0.1
"""Of a result's norm. The kit allows a row 3e-2 in bfloat16."""
FREE = frozenset({"draw_adjusted", "norm_route", "route"})
"""Operations whose kernels may leave a part of a result as it is, or order it as they like: the kit knows how."""


def fault(ask: Ask, tried: Contender, place: torch.device) -> str:
    """Return in a line what a kernel does other than it claims, "" where nothing was found or nothing can be tried.

    Not tried is an operation over ranks, one of `FREE`, one whose widths need more than `MAX_NUMBERS`, and one whose
    operands have to mean something where the set brings none.
    """
    rows = min(max(ROWS, tried.claim.rows[0]), tried.claim.rows[1])
    is_large = prod(number for _, number in ask.dims) > MAX_NUMBERS
    if rows < 1 or is_large or OPS[ask.op].over_ranks or ask.op in FREE:
        return ""
    what = f"it claims {ask.place} in {ask.dtype}, and a call of {rows} rows"
    with torch.random.fork_rng([] if place.index is None else [place]), torch.inference_mode():
        try:
            if (operands := operands_of(ask, [tried], rows, place)) is None:
                return ""
            wanted = results_of(ask, tried._replace(kernel=meaning(ask)), operands)
        except torch.OutOfMemoryError:
            return ""
        except Exception as error:  # a stranger's operands may be anything
            return f"its trial of {ask.place} with {rows} rows cannot be computed: {_said(error)}"
        try:
            given, before = copies_of(ask, tried, operands), copies_of(ask, tried, operands)
            found = results_with(ask, tried, given)
            written = _written(ask, tried, given, before)
            is_borrowed = bool(_places(found) & _places(results_of(ask, tried, operands)))
            forms = [_forms(each) for each in (found, wanted)]
            distance = distance_of(found, wanted) if forms[0] == forms[1] else 0.0
        except torch.OutOfMemoryError:
            return ""
        except Exception as error:  # a stranger's kernel may raise anything, on a device when its result is read
            return f"{what} raises {_said(error)}"
    if forms[0] != forms[1]:
        return f"{what} returns {forms[0]}; it is {forms[1]}"
    if distance > WRONG:
        return f"{what} differs from what it means by {distance:.2g} of its size"
    if written:
        return f"{what} writes to {written}, which the claim's overwrites does not name"
    return f"{what} returns memory that the next call returns again" if is_borrowed else ""


def _written(ask: Ask, tried: Contender, given: Sequence[Any], before: Sequence[Any]) -> str:
    """Return the operands that a call has changed and must not."""
    free = tried.claim.overwrites | OPS[ask.op].changes
    each = zip(OPS[ask.op].operands, given, before, strict=True)
    return " and ".join(
        name for name, now, was in each if isinstance(now, Tensor) and name not in free and not torch.equal(now, was)
    )


def _places(tensors: list[Tensor]) -> set[int]:
    return {tensor.untyped_storage().data_ptr() for tensor in tensors if tensor.numel()}


def _said(error: Exception) -> str:
    return f"{type(error).__name__}: {' '.join(str(error).split())}"


def _forms(tensors: list[Tensor]) -> str:
    each = (f"{str(tensor.dtype).removeprefix('torch.')} {list(tensor.shape)}" for tensor in tensors)
    return " and ".join(each) or "no tensor"
