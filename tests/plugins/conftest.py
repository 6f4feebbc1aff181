"""Fixtures for the plugin core's tests: made-up distributions and names."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from dovetail_testing.site import FakeSite


@pytest.fixture
def site(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[FakeSite]:
    """A folder of made-up distributions at the head of `sys.path`; what is imported from it is forgotten afterwards."""
    fake = FakeSite(tmp_path / "site")
    monkeypatch.syspath_prepend(str(fake.root))
    before = set(sys.modules)
    yield fake
    for name in set(sys.modules) - before:
        origin = getattr(sys.modules[name], "__file__", None) or ""
        if origin.startswith(str(tmp_path)):
            del sys.modules[name]
