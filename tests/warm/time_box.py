"""A run that has a given time: it says how many tests it did not reach, and each commit begins at another file.

CI has 90 minutes on processors of which some take three times as long as others. What one run skips, others reach.
"""

from __future__ import annotations

import time
import zlib

import pytest

BEGAN = time.monotonic()
GUARDS = "tests/guards/"
"""They hold whatever changed, so they come first."""


def add_options(parser: pytest.Parser) -> None:
    """Add the two options of a run with a given time."""
    parser.addoption("--within", type=float, metavar="S", help="skip what has not begun after so many seconds")
    parser.addoption("--begin-at", default="", metavar="COMMIT", help="choose the first file by this text")


def rotate(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Begin with the guards, then at the file that `--begin-at` chooses; those before it come last."""
    if not config.getoption("begin_at"):
        return
    files = sorted({item.nodeid.partition("::")[0] for item in items})
    first = zlib.crc32(config.getoption("begin_at").encode()) % max(1, len(files))
    in_turn = sorted(files[first:] + files[:first], key=lambda file: not file.startswith(GUARDS))
    place = {file: number for number, file in enumerate(in_turn)}
    items.sort(key=lambda item: place[item.nodeid.partition("::")[0]])


def skip_when_late(item: pytest.Item) -> None:
    """Have the test that is about to begin skipped if the run's time has passed.

    By a mark: an exception here would come before other plugins prepared what they take apart after the test.
    """
    within = item.config.getoption("within")
    if within is not None and time.monotonic() - BEGAN > within:
        item.add_marker(pytest.mark.skip(reason=f"not reached within {within:.0f} s"))
