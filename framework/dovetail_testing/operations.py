"""Counting what parsing costs: a test of proportions that no busy machine can make fail."""

from __future__ import annotations

import sys
from collections.abc import Callable
from types import FrameType
from typing import Any

from dovetail.sdk.formats.matcher import Matcher


def operations(work: Callable[[], Any]) -> int:
    """Count the lines of Python run and the characters that automata read."""
    count = 0
    scan = Matcher.scan

    def line(frame: FrameType, event: str, arg: object) -> Any:
        nonlocal count
        count += 1
        return line

    def counted(self: Matcher, text: str, pos: int, state: int) -> tuple[int, int, int]:
        nonlocal count
        result = scan(self, text, pos, state)
        count += result[0] - pos
        return result

    before = sys.gettrace()
    Matcher.scan = counted  # type: ignore[method-assign]
    sys.settrace(line)
    try:
        work()
    finally:
        sys.settrace(before)
        Matcher.scan = scan  # type: ignore[method-assign]
    return count
