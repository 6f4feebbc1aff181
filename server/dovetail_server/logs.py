"""Log set-up of the HTTP process: the common format, with uvicorn's access lines in the form the peers print."""

from __future__ import annotations

from typing import Any

from dovetail import log


def uvicorn_config(level: str) -> dict[str, Any]:
    """Return uvicorn's `log_config`: its own lines and access lines behind the common time prefix."""
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
    handlers = {
        name: {"class": "logging.StreamHandler", "formatter": name, "stream": "ext://sys.stderr"} for name in formatters
    }
    quiet = "warning" if level == "info" else level  # uvicorn's own start-up chatter is replaced by the phase table
    return {
        "version": 1,
        "disable_existing_loggers": False,
        "formatters": formatters,
        "handlers": handlers,
        "loggers": {
            "uvicorn": {"handlers": ["default"], "level": quiet.upper(), "propagate": False},
            "uvicorn.access": {"handlers": ["access"], "level": level.upper(), "propagate": False},
        },
    }
