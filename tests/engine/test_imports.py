"""An engine's process imports its core first: nothing that it imports needs something else to be there before."""

from __future__ import annotations

import subprocess
import sys

import pytest


@pytest.mark.parametrize(
    "module", ["dovetail.engine.core", "dovetail.grammar.matching.constraint", "dovetail.grammar.compile.child"]
)
def test_a_module_can_be_the_first(module: str) -> None:
    """No circle of imports is hidden by whoever comes before."""
    done = subprocess.run([sys.executable, "-c", f"import {module}"], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-500:]


def test_imports_stay_out_of_the_collectors_rounds() -> None:
    """No round takes place while a process imports what it keeps, and later ones do not look at it."""
    code = (
        "import gc; from dovetail import imports\n"
        "def rounds(): return sum(generation['collections'] for generation in gc.get_stats())\n"
        "with imports.for_good():\n"
        "    before = rounds(); kept = [[] for _ in range(100_000)]; print(rounds() - before)\n"
        "print(gc.isenabled(), gc.get_freeze_count() > 100_000)\n"
        "gc.disable()\n"
        "with imports.for_good(): pass\n"
        "print(gc.isenabled())\n"
    )
    assert subprocess.check_output([sys.executable, "-c", code], text=True) == "0\nTrue True\nFalse\n"
