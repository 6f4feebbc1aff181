"""Every way in which a built-in quantisation finds a matrix stored passes the kit that is offered to everybody."""

from __future__ import annotations

from typing import Any

import pytest
from packers import METHODS

from dovetail.plugins import Registry
from dovetail.plugins.loader import import_planned
from dovetail.plugins.plan import as_planned
from dovetail_testing import QuantizationConformance, check_class

ONE_OF = {method.plugin: name for name, method in METHODS.items()}
"""Those which tests/testing/test_builtins.py runs."""


@pytest.mark.full
@pytest.mark.parametrize("name", [name for name in METHODS if name not in ONE_OF.values()])
def test_each_method_passes_the_kit(name: str) -> None:
    """Products, parts, ranks and experts are those of the matrix that was packed."""
    method = METHODS[name]
    attrs: dict[str, Any] = {"config": method.config, **method.kit}
    attrs |= {"pack": lambda self, weight: method.pack(weight), "unpack": lambda self, tensors: method.unpack(tensors)}
    attrs["plugin_class"] = import_planned(as_planned(Registry.scan().resolve("quantization", method.plugin)))
    report = check_class(type("TestMethod", (QuantizationConformance,), {**attrs, "__module__": __name__}))
    assert report.passed, report.text()
