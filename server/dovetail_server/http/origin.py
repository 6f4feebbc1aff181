"""What a generation request came by: an HTTP request, or a line of a batch."""

from __future__ import annotations

import itertools
from contextvars import ContextVar
from time import perf_counter

_numbers = itertools.count(1)
DIRECT = "dovetail.send"
"""The key in a connection's scope of its own `send`, around which nothing stands."""


class Origin:
    """Where a request came from. Tasks inherit it; what works for several requests sets it itself."""

    __slots__ = ("batch_id", "began", "body_s", "client", "http", "timeout_s")

    def __init__(self, *, batch_id: str = "", client: str = "") -> None:
        """Begin: an HTTP request of this client (`address:port`), or a line of this batch."""
        self.http = 0 if batch_id else next(_numbers)
        self.batch_id = batch_id
        self.client = client
        self.began = perf_counter()
        self.timeout_s: float | None = None
        """How long the client waits in all, as it says."""
        self.body_s = 0.0
        """What was waited for the client to send its body."""


ORIGIN: ContextVar[Origin | None] = ContextVar("dovetail_origin", default=None)
"""Of what the present task does; None for work of the server's own."""
