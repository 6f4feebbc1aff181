"""An engine's process imports its core first: nothing that it imports needs something else to be there before."""

from __future__ import annotations

import subprocess
import sys

import pytest


@pytest.mark.parametrize("module", ["dovetail.engine.core", "dovetail.grammar.constraint", "dovetail.grammar.child"])
def test_a_module_can_be_the_first(module: str) -> None:
    """No circle of imports is hidden by whoever comes before."""
    done = subprocess.run([sys.executable, "-c", f"import {module}"], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-500:]
