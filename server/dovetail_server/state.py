"""What all routes of one server share: settings, engine, text tools, and whether it may take requests."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import TYPE_CHECKING

from starlette.requests import Request

from dovetail.engine.client import EngineClient
from dovetail.engine.messages import EngineInfo
from dovetail.errors import EngineDeadError, RequestError
from dovetail_server import errors
from dovetail_server.hooks import ApiHooks
from dovetail_server.settings import ServeSettings
from dovetail_server.storage.lazy import LazyStorage

if TYPE_CHECKING:
    from dovetail.plugins import Registry
    from dovetail_server.serving.text import TextTools

HANG_S = 30.0
"""A busy engine whose step counter stands still for so long is not ready."""


class ServerState:
    """One per server. Used from its event loop only."""

    def __init__(self, settings: ServeSettings, engine: EngineClient, hooks: ApiHooks | None = None) -> None:
        """Start without text tools: requests are refused until `ready_with` is called."""
        self.settings = settings
        self.engine = engine
        self.hooks = hooks or ApiHooks()
        self.registry: Registry | None = None
        """All installed plugins with what became of them."""
        self.created = int(time.time())
        self.is_draining = False
        self.num_live = 0
        """Engine requests submitted and not yet finished."""
        self.live_rids: set[str] = set()
        """Identifiers that clients chose, or that replies carry: what `/abort_request` may name."""
        self.storage = LazyStorage(self)
        """Files and batches, opened when first needed."""
        self._text: TextTools | None = None
        self._last_step = -1
        self._last_advance = time.monotonic()

    def ready_with(self, text: TextTools) -> None:
        """Take requests from now on; the engine has started."""
        self._text = text

    @property
    def info(self) -> EngineInfo:
        """Facts of the started engine."""
        return self.engine.info

    @property
    def text(self) -> TextTools:
        """Tokenizer, template and parsers."""
        if self._text is None:
            raise errors.starting()
        return self._text

    @property
    def has_started(self) -> bool:
        """Whether start-up is over."""
        return self._text is not None

    @property
    def served_names(self) -> list[str]:
        """Names that requests may ask for, the first of which replies carry."""
        return self.settings.served_model_name or [self.settings.model_path or "model"]

    @property
    def fingerprint(self) -> str:
        """Changes when replies to one seed may change."""
        from dovetail import __version__

        return f"fp_dovetail_{__version__.replace('.', '_')}_{self.info.dtype}"

    @property
    def max_live(self) -> int:
        """Most engine requests held at once, running and waiting."""
        return self.settings.max_running_requests + self.settings.max_queued_requests

    def check_model(self, name: str | None) -> str:
        """Return the name a reply carries, or raise a 404 that lists the served names."""
        if name is None:
            return self.served_names[0]
        if name not in self.served_names:
            raise errors.model_not_found(name, self.served_names)
        return name

    def check_ready(self) -> None:
        """Raise unless a new request can be served.

        Raises:
            ServiceError: Starting or draining.
            EngineDeadError: The engine is gone.
        """
        if not self.has_started:
            raise errors.starting()
        if self.is_draining:
            raise errors.draining()
        if self.engine.dead is not None:
            raise EngineDeadError(self.engine.dead)

    def admit(self, rids: Sequence[str]) -> None:
        """Count new engine requests; each must be given back with `release`.

        Raises:
            ServiceError: 429, the queue is full.
            RequestError: An identifier is in use.
        """
        if self.num_live + len(rids) > self.max_live:
            raise errors.queue_full(self.max_live)
        taken = next((rid for rid in rids if rid in self.live_rids), None)
        if taken is not None:
            text = f"rid {taken!r} belongs to a running request; choose another or leave it out"
            raise RequestError(text, param="rid", code="duplicate_rid", status=409)
        if self.num_live == 0:
            self._last_advance = time.monotonic()
        self.num_live += len(rids)
        self.live_rids.update(rids)

    def release(self, rids: Sequence[str]) -> None:
        """Undo `admit`."""
        self.num_live -= len(rids)
        self.live_rids.difference_update(rids)

    def why_not_ready(self) -> str | None:
        """Say why the server should get no traffic, or None."""
        if not self.has_started:
            return "starting"
        if self.is_draining:
            return "draining"
        if self.engine.dead is not None:
            return f"engine dead: {self.engine.dead}"
        step, now = self.engine.step, time.monotonic()
        if step != self._last_step or self.num_live == 0:
            self._last_step, self._last_advance = step, now
        if now - self._last_advance > HANG_S:
            return f"engine stuck: no step for {now - self._last_advance:.0f} s"
        if self.storage.problem is not None:
            return f"files and batches: {self.storage.problem}"
        return self.hooks.why_not_healthy()


def get_state(request: Request) -> ServerState:
    """FastAPI dependency: the server's state."""
    state: ServerState = request.app.state.server
    return state


def get_ready_state(request: Request) -> ServerState:
    """FastAPI dependency: the state, for routes that need a working engine."""
    state = get_state(request)
    state.check_ready()
    return state
