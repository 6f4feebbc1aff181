"""Processes that outlive their parent: one that was stopped does not notice that it is alone, unless it is woken."""

from __future__ import annotations

import ctypes
import signal

_PR_SET_PDEATHSIG = 1


def wake_when_orphaned() -> None:
    """Have this process go on when its parent ends, should it be stopped (SIGSTOP) then.

    What ends a process whose parent has gone is the end of their socket or pipe, which it has to read. The signal does
    nothing to a process that is not stopped, so it does not matter that the system also sends it when only the thread
    that started this process ends. Of Linux only; elsewhere a stopped process stays until somebody continues it.
    """
    control = getattr(ctypes.CDLL(None), "prctl", None)
    if control is not None:
        control(_PR_SET_PDEATHSIG, int(signal.SIGCONT), 0, 0, 0)
