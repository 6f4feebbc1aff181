"""Figures that `auto` chooses by: measured once, and kept in a file named by a digest of all that they depend on."""

from __future__ import annotations

import contextlib
import dataclasses
import hashlib
import json
import os
import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

import msgspec
import torch

from dovetail.base.distribution import DISTRIBUTION
from dovetail.plugins.scan import installed_version

MARGIN = 0.05
"""By which another candidate has to be faster than the default, which noise does not reach."""
ALIKE = 2e-2
"""By how much a result may differ from the default's: rounding in bfloat16 stays below, a wrong one does not."""

Run = Callable[[], Any]
"""Runs what is timed."""
Clock = Callable[[Run, bool], float]
"""Runs what it is given some times, in a graph if it may be captured, and returns the seconds of one time."""


@dataclass(slots=True)
class Figures:
    """What was measured: seconds of those that ran, the default first, and in one line each why others did not.

    `is_lasting`: Nothing failed that may not fail another time, for want of memory.
    """

    times: dict[str, list[float]]
    failed: dict[str, str] = dataclasses.field(default_factory=dict)
    is_lasting: bool = True

    @classmethod
    def remembered(cls, folder: Path | None, name: str, candidates: Sequence[str], num: int) -> Self | None:
        """Read the figures of an earlier start, of `num` steps each; None: there are none, or they cannot be read."""
        if folder is None:
            return None
        try:
            found = msgspec.json.decode((folder / name).read_bytes(), type=cls)
        except (OSError, ValueError, msgspec.MsgspecError):
            return None
        is_whole = bool(found.times) and {*found.times, *found.failed} <= set(candidates)
        return found if is_whole and all(len(each) == num for each in found.times.values()) else None

    def remember(self, folder: Path | None, name: str, **about: Any) -> None:
        """Keep the figures for later starts, with what they are about, where a folder can be written."""
        if folder is None or not self.times or not self.is_lasting:
            return
        with contextlib.suppress(OSError):  # then the next start measures again
            folder.mkdir(parents=True, exist_ok=True)
            with tempfile.NamedTemporaryFile("w", dir=folder, delete=False) as file:
                json.dump({**about, "times": self.times, "failed": self.failed}, file)
            os.replace(file.name, folder / name)

    def failed_by(self, name: str, error: Exception) -> None:
        """Note why a candidate could not be measured."""
        self.is_lasting &= not isinstance(error, torch.OutOfMemoryError)
        self.failed[name] = f"it could not be measured: {type(error).__name__}: {' '.join(str(error).split())}"

    def best(self, ratios: Mapping[str, float]) -> str:
        """Return the candidate to take by times as parts of the default's: the default unless one beats it clearly."""
        found = min(ratios, key=lambda name: ratios[name])
        return found if ratios[found] < 1 - MARGIN else next(iter(self.times))


def digest_of(facts: Any) -> str:
    """Return a name for all that figures depend on."""
    return hashlib.sha256(json.dumps([facts, MARGIN], default=repr).encode()).hexdigest()[:32]


def versions() -> list[Any]:
    """Return the versions of what computes whatever is measured."""
    return [installed_version(DISTRIBUTION), torch.__version__, installed_version("triton")]
