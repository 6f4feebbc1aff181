"""Ends calls of packages' code that do not end: while one runs on the event loop, no other request is answered.

A thread looks at the calls that run, twice a second. One that lasts for `LIMIT_S` is ended by an exception within it,
which its request reports. One that goes on in spite of several ends the process, if it holds up the event loop: who
started the server starts it again, and knows why. Code that keeps Python's lock, such as a regular expression, keeps
this thread from running, too: then the interpreter itself writes where each thread stands to standard error.

A call costs two entries in a dictionary, and one of a built-in API nothing, as it is not noted.
"""

from __future__ import annotations

import asyncio
import ctypes
import faulthandler
import logging
import os
import sys
import threading
import time
import traceback
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, TypeVar

from dovetail import log
from dovetail.contracts.errors import PluginError

logger = logging.getLogger("dovetail.server")
T = TypeVar("T")
LIMIT_S = 5.0
"""A call takes milliseconds."""
TICK_S = 0.5
MAX_ENDS = 3
"""A call that catches what ends it is ended so often before the process is."""


class _Ended(BaseException):
    """Raised within a call. No `Exception`: the call's own handlers are not meant."""


@dataclass(slots=True, eq=False)
class Call:
    """A call of a package's code that runs."""

    what: str
    is_on_loop: bool
    num_ticks: int = 0
    num_ends: int = 0


class Watch:
    """Calls that run, by thread. One per process."""

    def __init__(self) -> None:
        """Begin without a thread: calls are noted, and not ended."""
        self.limit_s = LIMIT_S
        self._calls: dict[int, Call] = {}
        self._lock = threading.Lock()
        self._thread: threading.Thread | None = None

    def run(self, what: str, call: Callable[..., T], *args: Any) -> T:
        """Call a package's code; `what` it is, for messages.

        Raises:
            PluginError: It did not end.
            Exception: What it raises.
        """
        ident, made = threading.get_ident(), Call(what, asyncio._get_running_loop() is not None)
        outer = self._calls.get(ident)
        self._calls[ident] = made
        try:
            try:
                return call(*args)
            finally:
                self._leave(ident, outer)
                if made.num_ends:  # where it ended by itself, the exception is still on its way
                    time.sleep(0)
        except _Ended as error:
            self._leave(ident, outer)  # once more: it may have come while leaving
            raise PluginError(f"{what} did not end within {self.limit_s:g} s and was ended") from error

    def _leave(self, ident: int, outer: Call | None) -> None:
        with self._lock:
            if outer is None:
                self._calls.pop(ident, None)
            else:
                self._calls[ident] = outer

    def start(self) -> None:
        """End calls from now on; the thread lives as long as the process."""
        if self._thread is None or not self._thread.is_alive():
            self._thread = threading.Thread(target=self._run, name="dovetail-apis", daemon=True)
            self._thread.start()

    def _run(self) -> None:
        while True:
            with suppress(OSError, ValueError, AttributeError):  # standard error may be closed, or no file
                faulthandler.dump_traceback_later(2 * self.limit_s + TICK_S)
            time.sleep(TICK_S)
            for ident, call in list(self._calls.items()):
                call.num_ticks += 1  # ticks are counted, not time: a process that was stopped is not at fault
                if call.num_ticks * TICK_S >= self.limit_s:
                    self._end(ident, call)

    def _end(self, ident: int, call: Call) -> None:
        if call.num_ends >= MAX_ENDS and call.is_on_loop:
            log.complain(
                f"dovetail: error: {call.what} does not end, and no request is answered meanwhile: the server ends"
            )
            os._exit(1)
        frame = sys._current_frames().get(ident)
        stack = "".join(traceback.format_stack(frame)[-5:]) if frame is not None else ""
        with self._lock:
            if self._calls.get(ident) is not call:
                return
            call.num_ticks, call.num_ends = 0, call.num_ends + 1
            ctypes.pythonapi.PyThreadState_SetAsyncExc(ctypes.c_ulong(ident), ctypes.py_object(_Ended))
        logger.error("%s did not end within %g s and is ended; it stood at\n%s", call.what, self.limit_s, stack)


WATCH = Watch()
