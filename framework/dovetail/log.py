"""One log format for every process: `[2025-08-16 05:17:45] message`, which dashboards of the peers already read.

Warnings and errors carry their level after the time; plain information does not. Everything of Dovetail logs below the
logger `dovetail`.
"""

from __future__ import annotations

import logging
import sys
from typing import TextIO

DATE_FORMAT = "%Y-%m-%d %H:%M:%S"
LEVELS = ("debug", "info", "warning", "error")


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


def setup(level: str = "info", stream: TextIO | None = None) -> logging.Logger:
    """Send the logger `dovetail` to `stream` (standard error by default) in the common format; safe to call again."""
    logger = logging.getLogger("dovetail")
    handler = logging.StreamHandler(stream if stream is not None else sys.stderr)
    handler.setFormatter(LineFormatter())
    logger.handlers[:] = [handler]
    logger.setLevel(level.upper())
    logger.propagate = False
    return logger
