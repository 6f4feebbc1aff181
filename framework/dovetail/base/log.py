"""One log format for every process: `[2025-08-16 05:17:45] message`, which dashboards for SGLang already read.

Warnings and errors carry their level after the time; plain information does not. Everything of Dovetail logs below the
logger `dovetail`.

With `--log-format json` every line is one JSON object instead (`dovetail.base.log_json`). The processes that a server
starts find the choice in their environment.
"""

from __future__ import annotations

import logging
import os
import sys
from typing import Literal, TextIO

DATE_FORMAT = "%Y-%m-%d %H:%M:%S"
LEVELS = ("debug", "info", "warning", "error")
FORMAT_VARIABLE = "DOVETAIL_LOG_FORMAT"
"""The environment variable of `--log-format`."""
Format = Literal["text", "json"]


class LineFormatter(logging.Formatter):
    """Put the time in brackets before the message, and the level too where it is not `INFO`."""

    def __init__(self) -> None:
        super().__init__("[%(asctime)s] %(message)s", DATE_FORMAT)

    def formatMessage(self, record: logging.LogRecord) -> str:
        line = super().formatMessage(record)
        if record.levelno == logging.INFO:
            return line
        head, _, rest = line.partition("] ")
        return f"{head}] {record.levelname}: {rest}"


def is_json() -> bool:
    """Whether this process, and those that it starts, log JSON."""
    return os.environ.get(FORMAT_VARIABLE) == "json"


def setup(
    level: str = "info", stream: TextIO | None = None, *, form: Format | None = None, process: str = "server"
) -> logging.Logger:
    """Send the logger `dovetail` to `stream` (standard error by default) in the common format; safe to call again.

    Args:
        level: Of `LEVELS`.
        stream: Where to; JSON goes to standard error alone.
        form: The format. Default: that of the parent process.
        process: What lines of JSON call this process.
    """
    if form == "json":
        os.environ[FORMAT_VARIABLE] = form
    elif form == "text":
        os.environ.pop(FORMAT_VARIABLE, None)
    follow(process)
    handler: logging.Handler
    if is_json():
        from dovetail.base.log_json import JsonHandler

        handler = JsonHandler()
    else:
        handler = logging.StreamHandler(stream if stream is not None else sys.stderr)
        handler.setFormatter(LineFormatter())
    logger = logging.getLogger("dovetail")
    logger.handlers[:] = [handler]
    logger.setLevel(level.upper())
    logger.propagate = False
    return logger


def follow(process: str) -> None:
    """Write in the parent process's format: for processes that log nothing themselves."""
    if is_json():
        from dovetail.base import log_json

        log_json.take_over(process)


def complain(text: str) -> None:
    """Write why a process ends, even before a log is set up."""
    if is_json():
        logging.getLogger("dovetail").error("%s", text)
    else:
        print(text, file=sys.stderr, flush=True)
