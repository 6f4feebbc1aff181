"""Ends calls of packages' code that do not end: while one runs on the event loop, no other request is answered.

In the main thread, where the event loop and the processes that read bodies call packages, a timer of signals ends a
call after `LIMIT_S`: also one that sleeps, waits for a socket or runs a regular expression. In other threads a thread
looks at the calls that run, twice a second, and raises an exception within one that lasts so long. A call on the event
loop that goes on in spite of several ends the process: who started the server starts it again, and knows why. Code
that keeps Python's lock keeps this thread from running, too: then the interpreter itself writes where each thread
stands to standard error.

A call costs two entries in a dictionary and two of the timer, and one of a built-in API nothing, as it is not noted.
"""

from __future__ import annotations

import asyncio
import ctypes
import faulthandler
import logging
import os
import signal
import sys
import threading
import time
import traceback
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from types import FrameType
from typing import Any, TypeVar

from dovetail.base import log
from dovetail.contracts.errors import PluginError
from dovetail.text.inline import InlineCostError

logger = logging.getLogger("dovetail.server")
T = TypeVar("T")
LIMIT_S = 3.0
"""A call takes milliseconds."""
TICK_S = 0.5
MAX_ENDS = 3
"""A call that catches what ends it is ended so often before the process is."""
MAIN = threading.main_thread().ident or 0


class Interruption(BaseException):
    """What this server raises within a call. No `Exception`: the call's own handlers are not meant."""


class _Ended(Interruption):
    """A call has had its time."""


@dataclass(slots=True, eq=False)
class PackageCall:
    """A call of a package's code that runs."""

    what: str
    is_on_loop: bool
    is_timed: bool
    num_ticks: int = 0
    num_ends: int = 0
    num_alarms: int = 0


class Watch:
    """Calls that run, by thread. One per process."""

    def __init__(self) -> None:
        """Begin without a thread: calls are noted, and not ended."""
        self.limit_s = LIMIT_S
        self.inline_s = 0.0
        """If set, a call in the main thread that takes so long is given up: another process makes it."""
        self.is_timing = False
        """The main thread's calls are ended by signals."""
        self.give_up: Callable[[str], None] | None = None
        """In a process that reads a body: called with the error's text where a call goes on in spite of `MAX_ENDS`."""
        self._calls: dict[int, PackageCall] = {}
        self._lock = threading.Lock()
        self._thread: threading.Thread | None = None
        self._before: Any = None

    def run(self, what: str, call: Callable[..., T], *args: Any) -> T:
        """Call a package's code; `what` it is, for messages.

        Raises:
            PluginError: It did not end.
            InlineCostError: It took longer than `inline_s`.
            Exception: What it raises.
        """
        ident = threading.get_ident()
        is_timed = self.is_timing and ident == MAIN
        made = PackageCall(what, asyncio._get_running_loop() is not None, is_timed)
        outer = self._calls.get(ident)
        self._calls[ident] = made
        try:
            try:
                if is_timed and outer is None:
                    signal.setitimer(signal.ITIMER_REAL, self.inline_s or TICK_S, TICK_S)
                return call(*args)
            finally:
                if is_timed and outer is None:
                    signal.setitimer(signal.ITIMER_REAL, 0)
                self._leave(ident, outer)
                if made.num_ends:  # where it ended by itself, the exception is still on its way
                    time.sleep(0)
        except _Ended as error:
            self._leave(ident, outer)  # once more: it may have come while leaving
            if is_timed and self.inline_s:
                raise InlineCostError(what) from error
            raise PluginError(f"{what} did not end within {self.limit_s:g} s and was ended") from error

    def _leave(self, ident: int, outer: PackageCall | None) -> None:
        with self._lock:
            if outer is None:
                self._calls.pop(ident, None)
            else:
                self._calls[ident] = outer

    def start_timing(self) -> None:
        """End the main thread's calls by signals from now on, if this is the main thread."""
        if threading.get_ident() == MAIN and not self.is_timing:
            self._before, self.is_timing = signal.signal(signal.SIGALRM, self._alarm), True

    def is_timed_here(self) -> bool:
        """Whether calls in this thread are ended by signals."""
        return self.is_timing and threading.get_ident() == MAIN

    def _alarm(self, number: int, frame: FrameType | None) -> None:
        call = self._calls.get(MAIN)
        if call is None or not call.is_timed:
            if callable(self._before):
                self._before(number, frame)
            return
        call.num_alarms += 1  # as of ticks: a process that was stopped gets one
        if not self.inline_s and call.num_alarms * TICK_S < self.limit_s:
            return
        if not self.inline_s:
            self._log(call, frame)
        call.num_ends += 1
        if call.num_ends > MAX_ENDS and self.give_up is not None:
            self.give_up(f"{call.what} did not end within {self.limit_s:g} s and was ended")
        raise _Ended

    def _log(self, call: PackageCall, frame: FrameType | None) -> None:
        stack = "".join(traceback.format_stack(frame)[-5:]) if frame is not None else ""
        logger.error("%s did not end within %g s and is ended; it stood at\n%s", call.what, self.limit_s, stack)

    def start(self) -> None:
        """End calls from now on; the thread lives as long as the process."""
        if self._thread is None or not self._thread.is_alive():
            self._thread = threading.Thread(target=self._run, name="dovetail-apis", daemon=True)
            self._thread.start()
        self.start_timing()

    def _run(self) -> None:
        while True:
            with suppress(OSError, ValueError, AttributeError):  # standard error may be closed, or no file
                faulthandler.dump_traceback_later(2 * self.limit_s + TICK_S)
            time.sleep(TICK_S)
            for ident, call in list(self._calls.items()):
                call.num_ticks += 1  # ticks are counted, not time: a process that was stopped is not at fault
                if call.num_ticks * TICK_S >= self.limit_s * (MAX_ENDS + 1 if call.is_timed else 1):
                    self._end(ident, call)

    def _end(self, ident: int, call: PackageCall) -> None:
        if call.is_on_loop and (call.is_timed or call.num_ends >= MAX_ENDS):
            log.complain(
                f"dovetail: error: {call.what} does not end, and no request is answered meanwhile: the server ends"
            )
            os._exit(1)
        frame = sys._current_frames().get(ident)
        with self._lock:
            if self._calls.get(ident) is not call:
                return
            self._log(call, frame)
            call.num_ticks, call.num_ends = 0, call.num_ends + 1
            ctypes.pythonapi.PyThreadState_SetAsyncExc(ctypes.c_ulong(ident), ctypes.py_object(_Ended))


WATCH = Watch()
