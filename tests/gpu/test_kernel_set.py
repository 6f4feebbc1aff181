"""The built-in kernel set passes the whole kit on a GPU: every width, both dtypes, up to 4,097 rows, in graphs."""

from __future__ import annotations

import pytest

from dovetail_backends.kernels.triton import MADE
from dovetail_testing import check_class, conformance_class

pytestmark = pytest.mark.gpu


@pytest.mark.parametrize("op", sorted(MADE))
def test_the_triton_set_passes_the_whole_kit(op: str) -> None:
    """Each operation equals its meaning."""
    report = check_class(conformance_class("kernels", "triton", ops=[op]))
    assert report.passed, report.text()
