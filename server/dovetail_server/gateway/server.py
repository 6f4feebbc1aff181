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

from dovetail.base.supervisor import LAST_RESORT_S
from dovetail_server.gateway.state import GatewayState
from dovetail_server.start.lifecycle import ForcedServer, uvicorn_options

logger = logging.getLogger("dovetail.server")
LINGER_S = 2.0


class GatewayServer(ForcedServer):
    """Drains at the first SIGTERM or SIGINT, and ends at once at a second; SIGHUP starts the workers anew, in turn.

    Its workers end after it has drained: until then each of them serves what it has.
    """

    def __init__(self, app: ASGIApp, state: GatewayState, renew: Callable[[], None] | None) -> None:
        """Serve `app`; `renew` is called at SIGHUP."""
        super().__init__(uvicorn_options(app, state))
        self.state = state
        self.renew = renew
        self._loop: asyncio.AbstractEventLoop | None = None
        state.server = self

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        """Take SIGHUP over, too."""
        self._loop = asyncio.get_running_loop()
        if self.renew is not None:
            self._loop.add_signal_handler(signal.SIGHUP, self.renew)
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
        grace_s = min(state.settings.drain_grace, drain_s) if sig == signal.SIGTERM else 0.0
        self._loop.call_soon_threadsafe(self._begin_drain, grace_s)

    def _begin_drain(self, grace_s: float) -> None:
        self.state.tasks.start("drain", self.drain(grace_s))

    async def drain(self, grace_s: float) -> None:
        """Serve on for a while, let what is under way finish, then stop serving."""
        began, limit_s = time.monotonic(), self.state.settings.drain_timeout
        await self._wait(lambda: bool(self.server_state.connections), grace_s)
        if num := len(self.server_state.tasks):
            left_s = max(0.0, limit_s - (time.monotonic() - began))
            logger.info("Stopping: %d requests get up to %g s to finish.", num, left_s)
            await self._wait(lambda: bool(self.server_state.tasks), left_s)
            if num := len(self.server_state.tasks):
                logger.warning("Cutting off %d requests after %.1f s.", num, time.monotonic() - began)
        await self._wait(lambda: bool(self.server_state.connections), LINGER_S)
        self.should_exit = True

    async def _wait(self, is_busy: Callable[[], bool], limit_s: float) -> None:
        deadline = time.monotonic() + limit_s
        while is_busy() and time.monotonic() < deadline and not self.force_exit:
            await asyncio.sleep(0.02)
