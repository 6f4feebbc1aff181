"""What grammar backends import is imported while the model loads."""

from __future__ import annotations

import subprocess
import sys
import threading
from types import SimpleNamespace
from typing import Any

from dovetail.client import launch


def test_backends_are_preloaded_beside_the_model() -> None:
    """Each in turn, in a thread of its own; one that fails is somebody else's to tell of."""
    seen: list[str] = []

    class Fails:
        @staticmethod
        def preload() -> None:
            seen.append(threading.current_thread().name)
            raise ImportError("not installed")

    class Works:
        @staticmethod
        def preload() -> None:
            seen.append("works")

    plugins: Any = SimpleNamespace(candidates=lambda kind: [(None, Fails), (None, Works)])
    launch._preload_grammars(plugins)
    for thread in threading.enumerate():
        if thread.name == "grammar preload":
            thread.join(10)
    assert seen == ["grammar preload", "works"]


def test_the_built_in_ones_are_there_afterwards() -> None:
    """In a fresh process, xgrammar is imported by `preload`, and by nothing before."""
    code = (
        "import sys; from dovetail_grammar.xgrammar import XgrammarBackend as b; "
        "before = 'xgrammar' in sys.modules; b.preload(); print(before, 'xgrammar' in sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=120)
    assert done.stdout.split() == ["False", "True"]
