"""A time limit for code of plugins: one that hangs at start is named and stopped instead of hanging the server.

In the main thread of a process the limit interrupts whatever Python waits for (a sleep, a lock, a socket). Code that
cannot be interrupted (a C call) ends the process after a grace period, with the same message and exit code 2. In any
other thread nothing can be interrupted safely: there, the log names the plugin.
"""

from __future__ import annotations

import logging
import os
import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from types import FrameType

from dovetail.base import log
from dovetail.contracts.errors import PluginError
from dovetail.plugins.signals import catching_signals

logger = logging.getLogger("dovetail.plugins")

DEFAULT_TIMEOUT_S = 60.0
GRACE_S = 5.0
ADVICE = "fix or disable the plugin, or raise --plugin-timeout"


_local = threading.local()


def running() -> str | None:
    """Return what runs under a time limit in this thread, for messages."""
    return getattr(_local, "what", None)


class PluginTimeout(PluginError):
    """A plugin took longer than it may."""


class Interrupted(BaseException):
    """Raised inside of the plugin's code: no `except Exception` of its own holds it up, and ours let it pass."""


@contextmanager
def time_limit(what: str, timeout_s: float = DEFAULT_TIMEOUT_S, advice: str = ADVICE) -> Iterator[None]:
    """Stop the block after `timeout_s` seconds. What a signal raises in it is `Signalled`.

    Args:
        what: What is running, for the message: "hooks 'acme' of acme 1.0: importing acme_hooks".
        timeout_s: 0 for no limit.
        advice: What to do, for the message.

    Raises:
        PluginTimeout: The time is over.
    """
    outer, _local.what = running(), what
    try:
        with catching_signals(), _limited(what, timeout_s, advice) if timeout_s > 0 else nullcontext():
            yield
    finally:
        _local.what = outer


@contextmanager
def _limited(what: str, timeout_s: float, advice: str) -> Iterator[None]:
    text = f"{what} did not end within {timeout_s:g} s; {advice}"
    is_main = threading.current_thread() is threading.main_thread() and hasattr(signal, "SIGALRM")
    done, over = threading.Event(), threading.Event()
    arguments = (done, over, timeout_s, text, is_main)
    watch = threading.Thread(target=_watch, args=arguments, name="dovetail-guard", daemon=True)

    def interrupt(number: int, frame: FrameType | None) -> None:
        if not over.is_set():  # somebody else's alarm: an outer limit's, or one that was set before
            if callable(before):
                before(number, frame)
        elif not done.is_set():
            raise Interrupted(text)

    before = signal.signal(signal.SIGALRM, interrupt) if is_main else None
    watch.start()
    try:
        try:
            yield
        finally:
            done.set()
    except Interrupted as interruption:
        if interruption.args[0] is not text:
            raise
        raise PluginTimeout(text) from None
    finally:
        watch.join()  # it may be about to send the signal, which must still find our handler
        if is_main:
            signal.signal(signal.SIGALRM, before if before is not None else signal.SIG_DFL)


def _watch(done: threading.Event, over: threading.Event, timeout_s: float, text: str, is_main: bool) -> None:
    if done.wait(timeout_s):
        return
    over.set()
    if not is_main:
        logger.error("%s", text)
        return
    ident = threading.main_thread().ident
    if ident is not None:
        signal.pthread_kill(ident, signal.SIGALRM)
    if not done.wait(GRACE_S):
        log.complain(f"dovetail: error: {text}")
        os._exit(2)
