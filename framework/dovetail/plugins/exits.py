"""A plugin that ends the process is named: `os._exit(0)` would end a server with exit code 0 and an empty log.

`os._exit` is replaced in processes that are Dovetail's own, so that only what C code calls goes unseen. Children of a
fork, and Dovetail's own modules, end as ever. `sys.exit` raises `SystemExit`, which is caught where plugins are called.
"""

from __future__ import annotations

import os
import sys
from types import FrameType, TracebackType
from typing import NoReturn

from dovetail.base import log
from dovetail.plugins.time_limit import running

OWN = ("dovetail", "dovetail_offline", "dovetail_server", "multiprocessing")


def name_exits() -> None:
    """From now on, say who ends this process by `os._exit`, and never with exit code 0."""
    owner, really_exit = os.getpid(), os._exit

    def named_exit(status: int) -> NoReturn:
        caller = sys._getframe(1)
        if os.getpid() == owner and str(caller.f_globals.get("__name__")).partition(".")[0] not in OWN:
            log.complain(f"dovetail: error: {ended_by(f'os._exit({status})', caller)}")
            status = status or 1
        really_exit(status)

    os._exit = named_exit


def ended_by(what: str, caller: FrameType | None) -> str:
    """Return the line that names where a process was ended, and what was being called."""
    where = (
        "" if caller is None else f" in {caller.f_code.co_filename}, line {caller.f_lineno}, {caller.f_code.co_name}"
    )
    during = running()
    return f"the process was ended by {what}{where}" + (f"; running then: {during}" if during else "")


def innermost(trace: TracebackType | None) -> FrameType | None:
    """Return the frame that raised."""
    while trace is not None and trace.tb_next is not None:
        trace = trace.tb_next
    return None if trace is None else trace.tb_frame
