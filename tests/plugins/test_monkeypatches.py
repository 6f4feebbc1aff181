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
"""Modules that are imported in each look: the snapshots look at each, which may let the collector run for each."""


@pytest.fixture
def importing() -> Iterator[tuple[list[str], list[int]]]:
    """Import a module, and give one of the core an attribute, whenever the garbage collector runs: all the time.

    Yields their names, and how many there may be.
    """
    added: list[str] = []
    most = [MOST]
    core = ModuleType("dovetail.made_up")
    sys.modules[core.__name__] = core

    def add(phase: str, info: dict[str, Any]) -> None:
        if len(added) == most[0]:
            return
        name = f"imported_meanwhile_{len(added)}"
        added.append(name)
        sys.modules[name] = ModuleType(name)
        setattr(core, name, None)

    before = gc.get_threshold()
    gc.callbacks.append(add)
    gc.set_threshold(1, 1, 1)
    yield added, most
    gc.set_threshold(*before)
    gc.callbacks.remove(add)
    for name in [core.__name__, *added]:
        sys.modules.pop(name, None)


def test_modules_may_be_imported_meanwhile(importing: tuple[list[str], list[int]]) -> None:
    """A snapshot copies what it walks in one go."""
    added, most = importing
    before = snapshot()
    num = len(added)
    most[0] = num + MOST
    assert not [name for name in detect_monkeypatches(before) if "made_up" not in name]
    assert len(added) > num > 0, "nothing was imported while one of the two looked"
