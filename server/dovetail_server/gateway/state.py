"""What all routes of the gateway share."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

import aiohttp
from starlette.types import Scope

from dovetail_server.gateway.fleet import Fleet
from dovetail_server.gateway.placement import Placement
from dovetail_server.relay.places import RelayState
from dovetail_server.settings.serve import ServeSettings
from dovetail_server.supervision.supervisor import Supervisor

if TYPE_CHECKING:
    from dovetail_server.gateway.child import Child

CONNECT_S = 5.0


class GatewayState(RelayState):
    """One per gateway. Used from its event loop only."""

    def __init__(self, settings: ServeSettings, fleet: Fleet, tasks: Supervisor) -> None:
        """Open the session in which workers are asked; on the event loop."""
        super().__init__(settings)
        self.fleet = fleet
        self.tasks = tasks
        self.resume_key = None if settings.resume_key is None else settings.resume_key.get_secret_value()
        """With it workers keep journals of their streams."""
        self.has_started = False
        self.is_leaving = False
        """It was told to end."""
        self.session = aiohttp.ClientSession(
            # No limits of its own: those of the connections to this server hold. The replies' pace is the workers'.
            connector=aiohttp.TCPConnector(limit=0, keepalive_timeout=30.0),
            timeout=aiohttp.ClientTimeout(total=None, sock_connect=CONNECT_S),
            auto_decompress=False,
            skip_auto_headers=("user-agent", "accept-encoding", "accept", "content-type"),
        )
        self.placement = Placement(fleet, self.session, tasks)
        self.cut_off: Callable[[Scope], None] = lambda scope: None
        """Closes the connection of a request; the HTTP server has it."""
        self.children: Sequence[Child] = ()
        """The workers' processes, where they are this process's own."""

    @property
    def is_stopping(self) -> bool:
        """Whether health tells routers to go elsewhere."""
        return self.is_leaving

    def health(self) -> str | None:
        """Say why no traffic should come, or None."""
        if not self.has_started:
            return "starting"
        if self.is_leaving:
            return "draining"
        return self.fleet.problem() or self.tasks.problem
