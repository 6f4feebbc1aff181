"""Log set-up of the HTTP process: the common format, with uvicorn's access lines in the form the peers print."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

from dovetail import log


class SkipEarlyProbes(logging.Filter):
    """Drops access lines of requests that came before the server was ready: scripts ask ten times a second."""

    def __init__(self, is_ready: Callable[[], bool]) -> None:
        super().__init__()
        self.is_ready = is_ready

    def filter(self, record: logging.LogRecord) -> bool:
        """Keep a line once the server is ready."""
        return self.is_ready()


def uvicorn_config(level: str, is_ready: Callable[[], bool]) -> dict[str, Any]:
    """Return uvicorn's `log_config`: its own lines, and access lines once ready, behind the common time prefix."""
    prefix = "[%(asctime)s] %(levelprefix)s "
    formatters = {
        "default": {
            "()": "uvicorn.logging.DefaultFormatter",
            "fmt": prefix + "%(message)s",
            "datefmt": log.DATE_FORMAT,
            "use_colors": False,
        },
        "access": {
            "()": "uvicorn.logging.AccessFormatter",
            "fmt": prefix + '%(client_addr)s - "%(request_line)s" %(status_code)s',
            "datefmt": log.DATE_FORMAT,
            "use_colors": False,
        },
    }
    handlers: dict[str, dict[str, Any]] = {
        name: {"class": "logging.StreamHandler", "formatter": name, "stream": "ext://sys.stderr"} for name in formatters
    }
    handlers["access"]["filters"] = ["skip_early_probes"]
    quiet = "warning" if level == "info" else level  # uvicorn's own start-up chatter is replaced by the phase table
    return {
        "version": 1,
        "disable_existing_loggers": False,
        "formatters": formatters,
        "filters": {"skip_early_probes": {"()": SkipEarlyProbes, "is_ready": is_ready}},
        "handlers": handlers,
        "loggers": {
            "uvicorn": {"handlers": ["default"], "level": quiet.upper(), "propagate": False},
            "uvicorn.access": {"handlers": ["access"], "level": level.upper(), "propagate": False},
        },
    }
