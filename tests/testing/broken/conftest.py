"""Runs a seeded fault through the kit."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from dovetail_testing import check_class, conformance_class

sys.path.append(str(Path(__file__).parent))  # last: other folders have a conftest too


@pytest.fixture
def caught() -> Callable[..., None]:
    """Assert that the kit fails on a plugin, in the test named and with a message that names the fault."""

    def run(kind: str, plugin: Any, test: str, message: str, *, select: str = "", **attrs: Any) -> None:
        report = check_class(conformance_class(kind, plugin_class=plugin, **attrs), select)
        failures = {name: text for name, text in report.failures.items() if name.partition("[")[0] == test}
        assert any(message in text for text in failures.values()), report.text()

    return run
