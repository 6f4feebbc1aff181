"""Log set-up of the HTTP process: the common format, with uvicorn's access lines in the form the peers print."""

from __future__ import annotations

import asyncio
import logging
import re
from collections.abc import Callable
from typing import Any

from dovetail.base import log
from dovetail.base.log_json import NUM_ACCESS_ARGS

SHOWN = frozenset(
    (
        *("after", "after_id", "before_id", "include", "include_obfuscation", "limit", "model", "order", "purpose"),
        *("starting_after", "stream"),
    )
)
"""Query parameters whose values are logged: those of this server's own routes. Others may be anybody's secret."""
HIDDEN = "***"
STATIC = re.compile(r"^[^?]*/(?:playground|docs)/")
"""Paths of files: those of the playground and of Swagger UI."""


def without_secrets(target: str) -> str:
    """Return a request's target with the values of unknown query parameters hidden, and what has no name."""
    path, mark, query = target.partition("?")
    return path + mark + "&".join(_hidden(part) for part in query.split("&"))


def _hidden(part: str) -> str:
    name, equals, _ = part.partition("=")
    return part if name in SHOWN or not part else f"{name}={HIDDEN}" if equals else HIDDEN


class HideSecrets(logging.Filter):
    """Takes secrets out of the targets that uvicorn logs; some clients send keys as `?api_key=`."""

    def filter(self, record: logging.LogRecord) -> bool:
        """Change the record, whoever handles it."""
        if isinstance(record.args, tuple):
            record.args = tuple(without_secrets(a) if isinstance(a, str) and "?" in a else a for a in record.args)
        return True


class SkipCancelled(logging.Filter):
    """Drops tracebacks of requests that the server's own end cut off: uvicorn takes each for a fault of the program."""

    def filter(self, record: logging.LogRecord) -> bool:
        """Keep what is no cancellation."""
        return not (record.exc_info and isinstance(record.exc_info[1], asyncio.CancelledError))


class SkipRefusedUpgrades(logging.Filter):
    """Drops uvicorn's error after each WebSocket that was refused with a reply, whose access line says it."""

    def filter(self, record: logging.LogRecord) -> bool:
        """Keep everything else."""
        return record.msg != "ASGI callable returned without completing handshake."


class SkipStatic(logging.Filter):
    """Drops access lines of the page's and the documentation's files that were sent: a page load is fifty of them."""

    def filter(self, record: logging.LogRecord) -> bool:
        """Keep what failed, and all other paths."""
        if not isinstance(record.args, tuple) or len(record.args) != NUM_ACCESS_ARGS:
            return True
        _, _, path, _, status = record.args
        return not (isinstance(status, int) and status < 400 and STATIC.search(str(path)))


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
    if log.is_json():
        handlers = {name: {"class": "dovetail.base.log_json.JsonHandler"} for name in formatters}
    handlers["access"]["filters"] = ["skip_early_probes", "skip_static"]
    quiet = "warning" if level == "info" else level  # uvicorn's own start-up chatter is replaced by the phase table
    return {
        "version": 1,
        "disable_existing_loggers": False,
        "formatters": formatters,
        "filters": {
            "skip_early_probes": {"()": SkipEarlyProbes, "is_ready": is_ready},
            "hide_secrets": {"()": HideSecrets},
            "skip_static": {"()": SkipStatic},
            "skip_cancelled": {"()": SkipCancelled},
            "skip_refused_upgrades": {"()": SkipRefusedUpgrades},
        },
        "handlers": handlers,
        "loggers": {
            "uvicorn": {"handlers": ["default"], "level": quiet.upper(), "propagate": False},
            "uvicorn.error": {"filters": ["hide_secrets", "skip_cancelled", "skip_refused_upgrades"]},
            "uvicorn.access": {
                "handlers": ["access"],
                "filters": ["hide_secrets"],
                "level": level.upper(),
                "propagate": False,
            },
        },
    }
