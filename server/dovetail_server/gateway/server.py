"""The gateway's HTTP server: signals, draining, and the end."""

from __future__ import annotations

import asyncio
import logging
import signal
import socket
import time
from collections.abc import Callable
from types import FrameType

from starlette.types import ASGIApp

from dovetail_server.gateway.state import GatewayState
from dovetail_server.start.lifecycle import LINGER_S, DrainingServer
from dovetail_server.supervision.supervisor import LAST_RESORT_S

logger = logging.getLogger("dovetail.server")


class GatewayServer(DrainingServer):
    """Drains at the first SIGTERM or SIGINT, and ends at once at a second; SIGHUP starts the workers anew, in turn.

    Its workers end after it has drained: until then each of them serves what it has.
    """

    state: GatewayState

    def __init__(self, app: ASGIApp, state: GatewayState, renew: Callable[[], None] | None) -> None:
        """Serve `app`; `renew` is called at SIGHUP."""
        super().__init__(app, state)
        self.renew = renew

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        """Take SIGHUP over, too."""
        if self.renew is not None:
            asyncio.get_running_loop().add_signal_handler(signal.SIGHUP, self.renew)
        await super().startup(sockets)

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        """Take a signal; runs between two bytecodes of the main thread."""
        state = self.state
        is_second = state.is_leaving
        drain_s = 0.0 if is_second else state.settings.drain_timeout
        state.tasks.exit_after(2 * drain_s + LAST_RESORT_S)
        state.is_leaving = True
        if self._loop is None or is_second or not state.has_started:
            self.force_exit = is_second
            self.should_exit = True
            return
        self._drain_soon(sig, drain_s)

    async def drain(self, grace_s: float = 0.0) -> None:
        """Serve on for a while, let what is under way finish, then stop serving."""
        began, limit_s = time.monotonic(), self.state.settings.drain_timeout
        await self._wait_while(lambda: self.server_state.connections, grace_s)
        if num := len(self.server_state.tasks):
            left_s = max(0.0, limit_s - (time.monotonic() - began))
            logger.info("Stopping: %d requests get up to %g s to finish.", num, left_s)
            await self._wait_while(lambda: self.server_state.tasks, left_s)
            if num := len(self.server_state.tasks):
                logger.warning("Cutting off %d requests after %.1f s.", num, time.monotonic() - began)
        await self._wait_while(lambda: self.server_state.connections, LINGER_S)
        self.should_exit = True
