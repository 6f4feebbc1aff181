"""What a plugin changed in the core is found while other threads import."""

from __future__ import annotations

import gc
import sys
from collections.abc import Iterator
from types import ModuleType
from typing import Any

import pytest

from dovetail.plugins.monkeypatches import detect_monkeypatches, snapshot

MOST = 2_000
"""Modules that are imported: each is looked at by the snapshots, which may let the collector run for each."""


@pytest.fixture
def importing() -> Iterator[list[str]]:
    """Import a module, and give one of the core an attribute, whenever the garbage collector runs: all the time."""
    added: list[str] = []
    core = ModuleType("dovetail.made_up")
    sys.modules[core.__name__] = core

    def add(phase: str, info: dict[str, Any]) -> None:
        if len(added) == MOST:
            return
        name = f"imported_meanwhile_{len(added)}"
        added.append(name)
        sys.modules[name] = ModuleType(name)
        setattr(core, name, None)

    before = gc.get_threshold()
    gc.callbacks.append(add)
    gc.set_threshold(1, 1, 1)
    yield added
    gc.set_threshold(*before)
    gc.callbacks.remove(add)
    for name in [core.__name__, *added]:
        sys.modules.pop(name, None)


def test_modules_may_be_imported_meanwhile(importing: list[str]) -> None:
    """A snapshot copies what it walks in one go."""
    before = snapshot()
    num = len(importing)
    assert not [name for name in detect_monkeypatches(before) if "made_up" not in name]
    assert MOST > num > 0, "nothing was imported while the second looked"
