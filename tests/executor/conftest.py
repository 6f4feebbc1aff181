"""Further ranks in threads; the helpers beside this file, and the engines of the examples' models, are importable."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

sys.path.append(str(Path(__file__).parent))
sys.path.append(str(Path(__file__).parents[1] / "engine"))

from rank_engines import start_in_threads


@pytest.fixture
def in_threads(monkeypatch: pytest.MonkeyPatch) -> None:
    """Start further ranks in threads: a process takes seconds to import torch."""
    start_in_threads(monkeypatch)
