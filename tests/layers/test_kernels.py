"""The built-in kernel set passes the kit at every width, in both dtypes, up to 4,097 rows."""

from __future__ import annotations

import pytest

from dovetail_backends.kernels.triton import MADE
from dovetail_testing import check_class, conformance_class


@pytest.mark.full
@pytest.mark.parametrize("op", sorted(MADE))
def test_the_triton_set_passes_the_whole_kit(op: str) -> None:
    """On CPU in Triton's interpreter, which takes minutes: `test_builtins.py` runs a part of it."""
    pytest.importorskip("triton")
    report = check_class(conformance_class("kernels", "triton", ops=[op]))
    assert report.passed, report.text()
