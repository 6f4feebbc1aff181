"""What all routes of the gateway share."""

from __future__ import annotations

import logging
import socket
import struct
from collections.abc import Sequence
from typing import TYPE_CHECKING

import aiohttp
import uvicorn
from starlette.types import Scope

from dovetail.base.supervisor import Supervisor
from dovetail_server.apis.guarded import watch
from dovetail_server.apis.loaded import named_apis
from dovetail_server.gateway.fleet import Fleet
from dovetail_server.gateway.placement import Placement
from dovetail_server.http.auth import Keys
from dovetail_server.relay.places import Places
from dovetail_server.serving.hooks import ApiHooks
from dovetail_server.settings.serve import ServeSettings
from dovetail_server.tenants.tenant import Tenant

if TYPE_CHECKING:
    from dovetail_server.gateway.child import Child

logger = logging.getLogger("dovetail.server")
LINGER_NOT = struct.pack("ii", 1, 0)
CONNECT_S = 5.0


class GatewayState:
    """One per gateway. Used from its event loop only."""

    def __init__(self, settings: ServeSettings, fleet: Fleet, tasks: Supervisor) -> None:
        """Open the session in which workers are asked; on the event loop."""
        self.settings = settings
        self.fleet = fleet
        self.tasks = tasks
        self.keys = Keys.of(settings, counts=False)
        self.hooks = ApiHooks()
        self.num_held_bytes = 0
        """Bytes of request bodies in memory, …"""
        self.held_by: dict[Tenant, int] = {}
        """… and whose they are."""
        self.num_kept_bytes = 0
        """Of the journals of all streams, and of the replies that are held."""
        self.apis = named_apis(settings)
        watch(self.apis)
        self.places = Places(self.apis)
        """What may be done with the routes of the workers."""
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
        self.server: uvicorn.Server | None = None
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

    def cut_off(self, scope: Scope) -> None:
        """Close the connection of a request; what is still to be sent on it is dropped, by the kernel too."""
        for connection in [] if self.server is None else list(self.server.server_state.connections):
            transport = connection.transport
            if transport is not None and getattr(connection, "client", None) == scope.get("client"):
                transport.get_extra_info("socket").setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, LINGER_NOT)
                transport.abort()
