"""The HTTP server's life: signals, draining, and the end."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import signal
import socket
import struct
import time
from abc import abstractmethod
from collections.abc import Callable
from functools import partial
from types import FrameType
from typing import Any, Protocol

import uvicorn
from starlette.types import ASGIApp, Scope

from dovetail_server.http.connections import Connections
from dovetail_server.http.protocol import BoundedHttp
from dovetail_server.observe.logs import uvicorn_config
from dovetail_server.settings.serve import ServeSettings
from dovetail_server.state import ServerState
from dovetail_server.supervision.supervisor import LAST_RESORT_S

logger = logging.getLogger("dovetail.server")
LINGER_NOT = struct.pack("ii", 1, 0)
LINGER_S = 2.0
"""So long new requests are refused before the end."""
ACCEPTED_AT_ONCE = 32
"""Connections that a round of the event loop accepts: libuv takes one for each handle. Beside running streams a round
takes milliseconds, so the last of 256 clients that came at once was accepted after one or two seconds."""
LAST_WORDS_S = 5.0
"""Time for replies to leave after their requests were cut off."""


class DrainingServer(uvicorn.Server):
    """Drains at the first signal, and ends the application at a second, where uvicorn leaves it running.

    It accepts many connections in a round of the event loop.
    """

    def __init__(self, app: ASGIApp, state: Any) -> None:
        """Serve `app` whose state is `state`."""
        super().__init__(uvicorn_options(app, state))
        self.state = state
        state.cut_off = self.cut_off
        self._loop: asyncio.AbstractEventLoop | None = None

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        """Listen on each socket with so many handles, which end with the server; remember the loop, for signals."""
        self._loop = asyncio.get_running_loop()
        given = sockets or []
        more = [listener.dup() for listener in given for _ in range(ACCEPTED_AT_ONCE - 1)]
        await super().startup(sockets=[*given, *more])

    async def shutdown(self, sockets: list[object] | None = None) -> None:  # type: ignore[override]
        """Stop serving."""
        await super().shutdown(sockets=sockets)  # type: ignore[arg-type]
        if self.force_exit:
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self.lifespan.shutdown(), LINGER_S)

    def cut_off(self, scope: Scope) -> None:
        """Close the connection of a request; what is still to be sent on it is dropped, by the kernel too."""
        for connection in list(self.server_state.connections):
            transport = connection.transport
            if transport is not None and getattr(connection, "client", None) == scope.get("client"):
                transport.get_extra_info("socket").setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, LINGER_NOT)
                transport.abort()

    @abstractmethod
    async def drain(self, grace_s: float = 0.0) -> None:
        """Serve on for a while, let what is under way finish, cut off the rest, then stop serving."""

    def _drain_soon(self, sig: int, drain_s: float) -> None:
        """Begin from a signal, after which new requests are served for a while: after SIGTERM alone."""
        grace_s = min(self.state.settings.drain_grace, drain_s) if sig == signal.SIGTERM else 0.0
        if self._loop is not None:
            self._loop.call_soon_threadsafe(self._begin_drain, grace_s)

    def _begin_drain(self, grace_s: float = 0.0) -> None:
        self.state.tasks.start("drain", self.drain(grace_s))

    async def _wait_while(self, is_busy: Callable[[], object], limit_s: float) -> None:
        deadline = time.monotonic() + limit_s
        while is_busy() and time.monotonic() < deadline and not self.force_exit:
            await asyncio.sleep(0.02)


class HttpServer(DrainingServer):
    """Drains at the first SIGTERM or SIGINT; a second one ends at once.

    After SIGTERM new requests are still served for `--drain-grace` seconds while health says that none should come:
    whoever routes requests looks at it now and then only.
    """

    state: ServerState

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        """Take a signal; runs between two bytecodes of the main thread."""
        state = self.state
        drain_s = 0.0 if state.is_stopping else state.settings.drain_timeout
        state.tasks.exit_after(drain_s + LAST_RESORT_S)
        if self._loop is None or state.is_stopping or not state.has_started:
            self.force_exit = state.is_stopping and sig in (signal.SIGINT, signal.SIGTERM)
            self.should_exit = True
            return
        state.is_leaving = True
        self._drain_soon(sig, drain_s)

    async def drain(self, grace_s: float = 0.0) -> None:
        """Serve on for a while, let what is under way finish, cut off the rest, then stop serving."""
        state, began = self.state, time.monotonic()
        state.is_leaving = True
        await self._wait_while(lambda: self.server_state.connections, grace_s)
        state.is_draining = True
        state.leaving.set()
        timeout = max(0.0, state.settings.drain_timeout - (time.monotonic() - began))
        if self.is_busy():
            logger.info("Stopping: %d requests get up to %g s to finish.", len(self.server_state.tasks), timeout)
        await self._wait_while(self.is_busy, timeout)
        if state.num_live:
            waited_s = time.monotonic() - began
            logger.warning("Cutting off %d requests after %.1f s.", state.num_live, waited_s)
            for live in list(state.live.values()):
                live.abort()
            await self._wait_while(self.is_busy, LAST_WORDS_S)
        if state.num_live:
            await state.engine.close(wait=False)  # it does not answer: its end is what ends the streams
            await self._wait_while(self.is_busy, LAST_WORDS_S)
        # A router sends its next request on a connection that it holds open: a 503 it retries elsewhere, a connection
        # that breaks it may not.
        await self._wait_while(lambda: self.server_state.connections, LINGER_S)
        self.should_exit = True

    def is_busy(self) -> bool:
        """Whether a request is being answered, or the engine works on one."""
        return bool(self.server_state.tasks or self.state.num_live)


class ServedModels(Protocol):
    """What uvicorn's configuration depends on."""

    @property
    def settings(self) -> ServeSettings:
        """Those of the address."""

    @property
    def has_started(self) -> bool:
        """Whether requests are served: from then on they are logged."""


def websockets() -> Any:
    """Return the protocol of WebSockets, "none" where the library is not installed."""
    try:
        from dovetail_server.http.websocket import BoundedWebSocket
    except ImportError:
        return "none"
    return BoundedWebSocket


def uvicorn_options(app: ASGIApp, state: ServedModels) -> uvicorn.Config:
    """Return uvicorn's configuration."""
    settings = state.settings
    password = settings.ssl_keyfile_password
    return uvicorn.Config(
        app,
        log_config=uvicorn_config(settings.log_level, lambda: state.has_started),
        access_log=not settings.disable_access_log,
        lifespan="on",
        ws=websockets(),
        ws_max_size=settings.max_body_bytes,
        ws_per_message_deflate=False,  # a message of a kilobyte could be one of a megabyte
        server_header=False,
        timeout_graceful_shutdown=int(LAST_WORDS_S),
        timeout_keep_alive=settings.keep_alive_timeout,
        http=partial(  # type: ignore[arg-type]  # uvicorn calls it, as it would the class
            BoundedHttp, open_connections=Connections(settings), header_timeout=settings.header_timeout
        ),
        ssl_certfile=settings.ssl_certfile,
        ssl_keyfile=None if settings.ssl_keyfile is None else str(settings.ssl_keyfile),
        ssl_keyfile_password=None if password is None else password.get_secret_value(),
    )
