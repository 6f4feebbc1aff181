"""WebSockets on a connection: uvicorn's protocol, whose messages count as request bodies do.

The library is an extra (`dovetail-llm[websocket]`); this module is imported where it is installed only.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from uvicorn.protocols.websockets.websockets_sansio_impl import WebSocketsSansIOProtocol

from dovetail_server.errors.catalogue import ServiceError
from dovetail_server.http.held import HeldBytes

PROTOCOL = "dovetail.websocket"
"""In the scope: the protocol, which counts what arrives in its `held`."""
TRY_AGAIN_LATER = 1013


class BoundedWebSocket(WebSocketsSansIOProtocol):
    """Counts what has come of a message before anybody has read it, and ends the connection where there is no room."""

    held: HeldBytes | None = None
    """What the connection has in memory, from the moment that it is accepted until its application ends."""
    on_lost: Callable[[], None] | None = None
    """Called once, at the end: the connection is one of those that the server may have."""
    _num_raw = 0
    """Bytes of frames that have come since the last whole message."""

    def handle_connect(self, event: Any) -> None:
        """Begin the application, which finds the protocol in its scope."""
        super().handle_connect(event)
        if hasattr(self, "scope"):
            scope: Any = self.scope  # which may have further keys
            scope[PROTOCOL] = self

    def data_received(self, data: bytes) -> None:
        """Count what comes, and pass it on."""
        if self.held is not None:
            try:
                self.held.check(len(data))
            except ServiceError as error:
                self._end(error)
                return
            self.held.take(len(data))
            self._num_raw += len(data)
        super().data_received(data)

    def send_receive_event_to_app(self) -> None:
        """Hand a whole message on: from here on its own bytes count, not those of its frames."""
        num = sum(map(len, self.frames))
        super().send_receive_event_to_app()
        if self.held is not None:
            self.held.take(num - min(self._num_raw, self.held.num))
        self._num_raw = 0

    def connection_lost(self, exc: Exception | None) -> None:
        """Give the connection back."""
        super().connection_lost(exc)
        if self.on_lost is not None:
            self.on_lost()
            self.on_lost = None

    def _end(self, error: ServiceError) -> None:
        if not self.transport.is_closing():
            self.conn.send_close(TRY_AGAIN_LATER, error.code)
            self.transport.write(b"".join(self.conn.data_to_send()))
            self.transport.close()
