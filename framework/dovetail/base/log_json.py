"""Log lines as JSON: one object a line for everything written to standard error.

    {"time": "2026-11-22T20:15:01.123Z", "level": "info", "logger": "dovetail.server", "process": "server", "pid": 7,
     "message": "…"}

Tracebacks are one text under `exception`; what a logger was given as `extra` follows under its own names. Warnings of
Python, uncaught exceptions of any thread, other libraries' logs, and plain text printed to standard error
are objects too, the last with the logger `stderr`. What C code writes there by itself is beyond reach.

No library: python-json-logger formats records of `logging` alone, which is a quarter of this file; the rest is what
reaches standard error in other ways.
"""

from __future__ import annotations

import atexit
import io
import json
import logging
import os
import sys
import threading
import time
from types import TracebackType
from typing import Any

PRINTED = "stderr"
"""The logger that printed lines name."""
KNOWN = frozenset({*vars(logging.makeLogRecord({})), "message", "asctime", "taskName", "color_message"})
"""What every record has; all else was given as `extra`."""
NUM_ACCESS_ARGS = 5


class JsonFormatter(logging.Formatter):
    """One record as one line."""

    def __init__(self, process: str) -> None:
        """Format for a process of this name."""
        super().__init__()
        self.process = process

    def format(self, record: logging.LogRecord) -> str:
        """Return the object of a record."""
        fields = self.fields(record.created, record.levelname, record.name, record.getMessage().strip())
        if record.name == "uvicorn.access" and isinstance(record.args, tuple) and len(record.args) == NUM_ACCESS_ARGS:
            names = ("client", "method", "path", "http_version", "status")
            fields.update(zip(names, record.args, strict=True))
        if record.exc_info:
            fields["exception"] = self.formatException(record.exc_info)
        elif record.exc_text:
            fields["exception"] = record.exc_text
        if record.stack_info:
            fields["stack"] = record.stack_info
        for name, value in vars(record).items():
            if name not in KNOWN:
                fields.setdefault(name, value)
        try:
            return json.dumps(fields, default=str, allow_nan=False)
        except (TypeError, ValueError):  # keys or numbers that JSON has no word for
            return json.dumps(
                {name: value if isinstance(value, str) else repr(value) for name, value in fields.items()}
            )

    def fields(self, at: float, level: str, logger: str, message: str) -> dict[str, Any]:
        """Return what every line has."""
        whole = time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(at))
        return {
            "time": f"{whole}.{int(at % 1 * 1000):03d}Z",
            "level": level.lower(),
            "logger": logger,
            "process": self.process,
            "pid": os.getpid(),
            "message": message,
        }


class JsonHandler(logging.Handler):
    """Writes lines past whatever turns printed text into objects."""

    def emit(self, record: logging.LogRecord) -> None:
        """Write a record."""
        try:
            _write(_formatter.format(record))
        except Exception:
            self.handleError(record)  # logging's way: it prints, and each line of that is an object


class Printed(io.TextIOBase):
    """Stands in for standard error: each line that is printed there becomes an object."""

    encoding = "utf-8"

    def __init__(self) -> None:
        """Nothing is printed yet."""
        self._rest = ""
        self._lock = threading.RLock()

    def write(self, text: str) -> int:
        """Take text; its whole lines are written."""
        with self._lock:
            *lines, self._rest = (self._rest + text).split("\n")
            for line in lines:
                self._say(line)
        return len(text)

    def flush(self) -> None:
        """Write nothing: a line may still go on."""

    def finish(self) -> None:
        """Write what has not ended with its line."""
        with self._lock:
            rest, self._rest = self._rest, ""
            self._say(rest)

    def fileno(self) -> int:
        """Return the descriptor, for code that starts processes or writes there without Python."""
        return _DESCRIPTOR

    def writable(self) -> bool:
        """Say yes."""
        return True

    @staticmethod
    def _say(line: str) -> None:
        shown = line.rsplit("\r", 1)[-1].strip()  # of a progress bar its last state
        if shown:
            _write(json.dumps(_formatter.fields(time.time(), "INFO", PRINTED, shown)))


_DESCRIPTOR = 2
_formatter = JsonFormatter("server")


def take_over(process: str) -> None:
    """From now on all that this process writes to standard error is JSON; safe to call again."""
    _formatter.process = process
    if isinstance(sys.stderr, Printed):
        return
    sys.stderr = printed = Printed()
    atexit.register(printed.finish)
    logging.getLogger().handlers[:] = [JsonHandler()]
    logging.captureWarnings(True)
    sys.excepthook = _uncaught
    threading.excepthook = _uncaught_in_thread
    sys.unraisablehook = _unraisable


def _write(line: str) -> None:
    """Write a line at once, so that those of other processes do not come between."""
    data = memoryview(line.encode() + b"\n")
    while data:
        data = data[os.write(_DESCRIPTOR, data) :]


def _uncaught(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
    logging.getLogger("dovetail").critical("uncaught %s: %s", kind.__name__, error, exc_info=(kind, error, trace))


def _uncaught_in_thread(args: threading.ExceptHookArgs) -> None:
    if not issubclass(args.exc_type, SystemExit):
        who = "a thread" if args.thread is None else f"thread {args.thread.name}"
        _report(args, f"uncaught {args.exc_type.__name__} in {who}")


def _unraisable(args: sys.UnraisableHookArgs) -> None:
    _report(args, args.err_msg or "an exception was ignored")


def _report(args: threading.ExceptHookArgs | sys.UnraisableHookArgs, what: str) -> None:
    error = args.exc_value or args.exc_type()
    exc_info = (args.exc_type, error, args.exc_traceback)
    logging.getLogger("dovetail").error("%s: %s", what, error, exc_info=exc_info)
