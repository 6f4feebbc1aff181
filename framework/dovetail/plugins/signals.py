"""Tells Ctrl-C from a `KeyboardInterrupt` that a plugin's code raises by itself, which is an error like any other."""

from __future__ import annotations

import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any


class Signalled(KeyboardInterrupt):
    """A signal has asked this process to end."""


@contextmanager
def catching_signals() -> Iterator[None]:
    """Raise `Signalled` in the block where the handler of SIGINT or SIGTERM raises `KeyboardInterrupt`.

    Handlers run in the main thread only, so that in others nothing changes.
    """
    replaced: dict[signal.Signals, tuple[Callable[..., Any], Callable[..., Any]]] = {}
    if threading.current_thread() is threading.main_thread():
        for number in (signal.SIGINT, signal.SIGTERM):
            before = signal.getsignal(number)
            if callable(before):
                replaced[number] = _catching(before), before
                signal.signal(number, replaced[number][0])
    try:
        yield
    finally:
        for number, (ours, earlier) in replaced.items():
            if signal.getsignal(number) is ours:  # else the block has set another, which is told as left behind
                signal.signal(number, earlier)


def _catching(handler: Callable[..., Any]) -> Callable[[int, FrameType | None], None]:
    def handle(number: int, frame: FrameType | None) -> None:
        try:
            handler(number, frame)
        except KeyboardInterrupt:
            raise Signalled from None

    return handle
