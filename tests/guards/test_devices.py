"""The core asks `Device` about devices: places that name CUDA or a kind of device outside of it only become fewer."""

from __future__ import annotations

import re
from pathlib import Path

import dovetail

CORE = Path(dovetail.__file__).parent
ANSWERS = {"devices"}
"""Files of `runtime/device` that answer; all others have to ask."""
ASKS = re.compile(r"\btorch\.cuda\b|\bis_cuda\b|[\"']cuda[\"']|\bdevice\.type\b")
MOST = 21
"""What is left; a change that makes it less lowers it here. The goal is 0."""
CLEAN = (
    "executor",
    "runtime/attention",
    "runtime/memory",
    "runtime/start",
    "runtime/graphs",
    "runtime/checkpoint",
    "engine",
)
EXCEPT = {"runtime/graphs/step_ops.py"}


def asking(folder: Path) -> list[str]:
    """Return the lines that ask, as `file:line`, of files that have to ask `Device`."""
    found = []
    for file in sorted(folder.rglob("*.py")):
        if file.parent == CORE / "runtime/device" and file.stem in ANSWERS:
            continue
        lines = file.read_text(encoding="utf-8").splitlines()
        found += [f"{file.relative_to(CORE)}:{num}" for num, line in enumerate(lines, 1) if ASKS.search(line)]
    return found


def test_places_that_ask_which_device_there_is_only_become_fewer() -> None:
    """A new one asks `device_of(…)` for a method or a fact instead."""
    found = asking(CORE)
    assert len(found) <= MOST, f"{len(found)} places, at most {MOST}: {found}"


def test_rooms_that_are_done_stay_so() -> None:
    """Rooms of the core that know no kind of device, but for files whose kernels are still their own."""
    found = [place for room in CLEAN for place in asking(CORE / room) if place.partition(":")[0] not in EXCEPT]
    assert not found
