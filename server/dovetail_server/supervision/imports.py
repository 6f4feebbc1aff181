"""What a process keeps until its end: what it imports, and what its start has made."""

from __future__ import annotations

import gc
import signal
from collections.abc import Iterator
from contextlib import contextmanager

GC_YOUNG = 10_000
"""New objects before a round over the youngest; Python's own 700 is for programs with less going on."""
END_S = 3.0
"""For so long a process may take to end once it has nothing left to do."""


@contextmanager
def for_good() -> Iterator[None]:
    """Keep the garbage collector out of a block that imports, and what is there at its end out of later rounds.

    Everything that is imported stays, and a round looks at all of it: that takes an eighth of the time that torch takes
    to import, and as much again in every full round while the process serves.
    """
    was_on = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        gc.freeze()
        if was_on:
            gc.enable()


def started() -> None:
    """Take what a start has made out of the garbage collector's rounds, and make these rarer.

    A round over all of it stops every stream for tens of milliseconds. The young generation's rounds took a fifth of
    the server's time at many streams: what they look at is mostly freed without them.
    """
    gc.collect()
    gc.freeze()
    gc.set_threshold(GC_YOUNG, 20, 20)


def ending() -> None:
    """Give back to the garbage collector what was kept from it: called where a process is about to end.

    The interpreter's last round frees what it may look at. Triton's bindings count what is left behind that round, and
    print a screenful about leaks under the last line of a server's log.

    The kernel ends the process after `END_S`: a GPU that waits for a lost rank keeps the destructors of CUDA and NCCL
    waiting for ever, and at that point no Python runs that could tell.
    """
    signal.signal(signal.SIGALRM, signal.SIG_DFL)
    signal.setitimer(signal.ITIMER_REAL, END_S)
    gc.unfreeze()
