"""Modules of grammars, each imported before all others."""

from __future__ import annotations

import subprocess
import sys

CODE = """
import importlib, pkgutil, sys
import dovetail.grammar
names = [found.name for found in pkgutil.walk_packages(dovetail.grammar.__path__, "dovetail.grammar.")]
for name in names:
    for loaded in [each for each in sys.modules if each.startswith("dovetail.grammar")]:
        del sys.modules[loaded]
    importlib.import_module(name)
print(len(names))
"""


def test_any_module_can_be_imported_first() -> None:
    """Which one is depends on the process: the engine, the server, or one that compiles. No import goes in a circle."""
    made = subprocess.run([sys.executable, "-c", CODE], capture_output=True, text=True, check=False, timeout=120)
    assert made.returncode == 0, made.stderr[-2000:]
    assert int(made.stdout) > 20
