"""The built-in kernel set passes the kit at every width, in both dtypes."""

from __future__ import annotations

import pytest

from dovetail_backends.kernels.triton import DRAWS, MADE, MIXTURES, PRODUCTS
from dovetail_testing import check_class, conformance_class
from dovetail_testing.conformance.kernels_mixers import FOLDS

TOO_LONG = {"experts", "packed_experts", "routed_experts"}
"""More than five minutes each in the interpreter: `test_expert_kernels.py` and `test_packed_kernels.py` hold them."""


@pytest.mark.full
@pytest.mark.parametrize("op", sorted(MADE.keys() - TOO_LONG))
def test_the_triton_set_passes_the_whole_kit(op: str) -> None:
    """On the CPU in Triton's interpreter, where products and draws of 4,097 rows would take many minutes.

    `test_builtins.py` runs a part of it, and `tests/gpu/test_kernel_set.py` all of it.
    """
    pytest.importorskip("triton")
    many = {"many_rows": (257,)} if op in PRODUCTS | DRAWS | {"mask_logits"} else {}
    many = {"many_rows": ()} if op in MIXTURES | FOLDS else many
    report = check_class(conformance_class("kernels", "triton", ops=[op], **many))
    assert report.passed, report.text()
