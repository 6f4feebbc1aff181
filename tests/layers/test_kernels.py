"""The built-in kernel set passes the kit at every width."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest

from dovetail_backends.kernels.triton import DRAWS, MADE, MIXTURES, PRODUCTS
from dovetail_testing import check_class, conformance_class
from dovetail_testing.conformance.kernels_mixers import BY_REQUEST, FOLDS

TOO_LONG = {"experts", "packed_experts", "routed_experts"}
"""More than five minutes each in the interpreter: `test_expert_kernels.py` and `test_packed_kernels.py` hold them."""

DTYPES = ("float32", "bfloat16")
"""No kernel asks which of the two dtypes of 16 bits it has; `tests/gpu/test_kernel_set.py` tries all three."""


@pytest.mark.full
@pytest.mark.parametrize("op", sorted(MADE.keys() - TOO_LONG))
def test_the_triton_set_passes_the_whole_kit(op: str) -> None:
    """On the CPU in Triton's interpreter, where products of 4,097 rows, and draws of 257, would take many minutes.

    `test_builtins.py` runs a part of it, and `tests/gpu/test_kernel_set.py` all of it.
    """
    pytest.importorskip("triton")
    attrs: dict[str, Sequence[Any]] = {"dtypes": DTYPES}
    if op in PRODUCTS | {"mask_logits"}:
        attrs["many_rows"] = (257,)
    elif op in MIXTURES | FOLDS | DRAWS:
        attrs["many_rows"] = ()
    if op in FOLDS:
        # Of 101 tokens, one request ends in its second piece. A decoded token is a program: more say no more.
        prompts = {"rows": (0, 1, 7, 101), "few_rows": (0, 17)}
        attrs |= prompts if op in BY_REQUEST else {"rows": (0, 1, 2, 7, 17), "few_rows": (0, 5)}
    report = check_class(conformance_class("kernels", "triton", ops=[op], **attrs))
    assert report.passed, report.text()
