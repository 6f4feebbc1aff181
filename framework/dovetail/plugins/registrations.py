"""Functions that a plugin registers with Python for good when it is loaded, which Python does not list.

Exit handlers, functions around forks, audit hooks and searches for codecs can be added and not read back. So the
functions that add one are replaced while a plugin is loaded, and note calls that its own package makes. What a library
registers when the plugin imports it is the library's concern: torch, logging and multiprocessing do so.
"""

from __future__ import annotations

import atexit
import codecs
import os
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import wraps
from typing import Any

ADDED = (
    (atexit, "register", "a function that runs when the process exits (atexit.register)"),
    (os, "register_at_fork", "a function that runs at every fork (os.register_at_fork)"),
    (sys, "addaudithook", "an audit hook (sys.addaudithook)"),
    (codecs, "register", "a search for codecs (codecs.register)"),
)
"""By module and function: what a call adds to the process."""


@contextmanager
def registrations(target: str) -> Iterator[list[str]]:
    """Yield a list that grows by what the package of a plugin's target registers meanwhile, once each."""
    package, found = target.partition(":")[0].partition(".")[0], list[str]()
    originals = [getattr(module, name) for module, name, _ in ADDED]
    for (module, name, what), original in zip(ADDED, originals, strict=True):
        setattr(module, name, _noting(original, package, what, found))
    try:
        yield found
    finally:
        for (module, name, _), original in zip(ADDED, originals, strict=True):
            # Another function stands there if the plugin replaced it, which `detect_monkeypatches` names.
            if getattr(getattr(module, name), "__wrapped__", None) is original:
                setattr(module, name, original)


def _noting(original: Any, package: str, what: str, found: list[str]) -> Callable[..., Any]:
    """Return a function that does the same: a plugin may keep it (`from atexit import register`)."""

    @wraps(original)
    def add(*args: Any, **kwargs: Any) -> Any:
        frame: Any = sys._getframe(1)
        while frame.f_back is not None and frame.f_globals is globals():  # the kit watches a start, which watches too
            frame = frame.f_back
        caller = str(frame.f_globals.get("__name__", ""))
        if caller.partition(".")[0] == package and what not in found:
            found.append(what)
        return original(*args, **kwargs)

    return add
