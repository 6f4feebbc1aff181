"""Counts requests and shows the last ones at `GET /x/desk/stats`; every hook that a server calls has a use here."""

import json
import logging
import sys
from collections import deque
from collections.abc import Awaitable, Callable
from dataclasses import asdict, dataclass, field
from typing import Any

from dovetail.contracts import (
    CliCommands,
    HealthCheck,
    LoadStats,
    ProcessContext,
    RequestEnd,
    RequestObserver,
    RequestStart,
    RouteSet,
    StatLogger,
    hookimpl,
)

logger = logging.getLogger("dovetail.desk")
plugin = sys.modules[__name__]


@dataclass
class DeskOptions:
    """Settings: `--desk.keep`, `--desk.max-queued`, `--desk.log-interval`."""

    keep: int = field(default=20, metadata={"help": "How many of the last requests are shown."})
    max_queued: int = field(default=1000, metadata={"help": "Health complains beyond so many waiting requests."})
    log_interval: float = field(default=60.0, metadata={"help": "Seconds between two log lines."})


class Desk(RequestObserver, StatLogger):
    """What is known of the server: counts, the last requests, and the load."""

    def __init__(self, options: DeskOptions) -> None:
        self.options = options
        self.interval_s = options.log_interval
        self.started = self.ended = self.completion_tokens = 0
        self.last: deque[dict[str, Any]] = deque(maxlen=options.keep)
        self.load: LoadStats | None = None

    def request_started(self, request: RequestStart) -> None:
        """Count."""
        self.started += 1

    def request_ended(self, request: RequestEnd) -> None:
        """Count and remember."""
        self.ended += 1
        self.completion_tokens += request.num_completion_tokens
        self.last.append(asdict(request))

    def log(self, stats: LoadStats) -> None:
        """Remember the load and log a line."""
        self.load = stats
        logger.info("desk: %d requests, %d running, %d waiting", self.started, stats.num_running, stats.num_queued)

    def health(self) -> str | None:
        """Complain about a long queue."""
        queued = self.load.num_queued if self.load is not None else 0
        return f"{queued} requests are waiting" if queued > self.options.max_queued else None

    async def show(
        self, scope: Any, receive: Callable[[], Awaitable[Any]], send: Callable[[Any], Awaitable[None]]
    ) -> None:
        """Answer with everything as JSON (an ASGI application)."""
        counts = {"started": self.started, "ended": self.ended, "completion_tokens": self.completion_tokens}
        body = json.dumps({**counts, "load": self.load and asdict(self.load), "last": list(self.last)}).encode()
        headers = [(b"content-type", b"application/json")]
        await send({"type": "http.response.start", "status": 200, "headers": headers})
        await send({"type": "http.response.body", "body": body})


desks: dict[int, Desk] = {}


def desk_of(ctx: ProcessContext) -> Desk:
    """Return the desk of a server; its hooks are all given the same settings object."""
    return desks.setdefault(id(ctx.settings), Desk(ctx.settings))


@hookimpl
def dovetail_settings() -> type:
    """Declare the settings."""
    return DeskOptions


@hookimpl
def dovetail_process_stop(ctx: ProcessContext) -> None:
    """Forget the server."""
    desks.pop(id(ctx.settings), None)


@hookimpl
def dovetail_routes(ctx: ProcessContext) -> RouteSet:
    """Serve `GET /x/desk/stats`."""
    return RouteSet(routes={"/stats": desk_of(ctx).show})


@hookimpl
def dovetail_request_observers(ctx: ProcessContext) -> Desk:
    """Be told about requests."""
    return desk_of(ctx)


@hookimpl
def dovetail_stat_loggers(ctx: ProcessContext) -> Desk:
    """Be given the load."""
    return desk_of(ctx)


@hookimpl
def dovetail_health(ctx: ProcessContext) -> HealthCheck:
    """Take part in `GET /health`."""
    return HealthCheck(name="queue", check=desk_of(ctx).health)


@hookimpl
def dovetail_cli_commands(commands: CliCommands) -> None:
    """Add `dovetail --plugin desk desk-about`."""
    commands.add("desk-about", "dovetail_desk:about", help="Say what the desk shows.")


def about(argv: list[str]) -> int:
    """Print where to look."""
    print("GET /x/desk/stats: counts, load and the last requests")
    return 0
