"""What all routes of one server share: what serving and reading need, metrics, and where files are kept."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import TYPE_CHECKING, Annotated

from fastapi import Depends
from starlette.requests import Request

from dovetail import __version__
from dovetail.contracts.api import Api, ServerFacts
from dovetail.engine.client import EngineClient
from dovetail.plugins.records import PluginState
from dovetail_server.apis.guarded import watch
from dovetail_server.apis.loaded import of_packages, owners_of
from dovetail_server.apis.responses.keeper import Memory
from dovetail_server.apis.routes import BUILT_IN
from dovetail_server.batches.lazy import LazyStorage
from dovetail_server.metrics.exposition import Metrics
from dovetail_server.observe.slow_log import SlowLog
from dovetail_server.reading.context import ReadingContext
from dovetail_server.serving.hooks import ApiHooks
from dovetail_server.settings.serve import ServeSettings
from dovetail_server.supervision.supervisor import Supervisor
from dovetail_server.tenants.tenant import Tenant

if TYPE_CHECKING:
    from dovetail.plugins import Registry
    from dovetail.processing.processor import Processor
    from dovetail_server.apis.responses.conversations import ConversationStore
    from dovetail_server.apis.responses.store import ResponseStore
    from dovetail_server.batches.service import StorageService


class ServerState(ReadingContext):
    """One per server. Used from its event loop only."""

    def __init__(
        self,
        settings: ServeSettings,
        engine: EngineClient,
        hooks: ApiHooks | None = None,
        tasks: Supervisor | None = None,
        apis: Sequence[Api] = BUILT_IN,
    ) -> None:
        """Start without text tools: requests are refused until `ready_with` is called."""
        super().__init__(settings, engine, hooks, tasks)
        self.apis = apis
        """Those whose routes generate here."""
        self.routes = of_packages(apis)
        self.owners = owners_of(apis)
        self.metrics = Metrics(
            settings.metrics_style,
            self.served_names[0],
            self.tasks.crashes,
            restarts=lambda: self.engine.num_restarts,
            engine_pid=lambda: self.engine.pid,
            keys=self.keys,
            unknown_fields=self.unknown_fields.counted,
        )
        self.hooks.observers.add("dovetail_request_observers", "GET /metrics", self.metrics.tally)
        self.hooks.observers.add("dovetail_stat_loggers", "GET /metrics", self.metrics.load)
        if settings.log_slow_requests:
            self.hooks.observers.add(
                "dovetail_request_observers", "--log-slow-requests", SlowLog(settings.log_slow_requests)
            )
        self.registry: Registry | None = None
        """All installed plugins with what became of them."""
        self.created = int(time.time())
        self.num_held_bytes = 0
        """Bytes of request bodies in memory, …"""
        self.held_by: dict[Tenant, int] = {}
        """… and whose they are."""
        self.remembered = Memory(settings.max_queued_bytes // 4)
        """Last responses of WebSockets, where no store has them."""
        self.storage = LazyStorage(settings, self.tasks, self._open_service)
        """Files and batches, opened when first needed."""

    def ready_with(self, text: Processor) -> None:
        """Take requests from now on; the engine has started."""
        super().ready_with(text)
        watch(self.apis)
        self.metrics.cache = (self.info.page_size, self.info.max_total_tokens)

    def close_children(self) -> None:
        """End the processes that read bodies and judge texts, also those that are still starting."""
        self.bodies.close()
        if self.media is not None:
            self.media.close()
        if self.has_started:
            self.text.grammar.close()

    async def stored_conversations(self) -> ConversationStore:
        """Return where conversations are kept.

        Raises:
            ServiceError: The database or the folder cannot be used.
        """
        return (await self.storage.get()).conversations

    async def stored_file(self, owner: str, file_id: str) -> str:
        """Return the path of an uploaded file that is the owner's.

        Raises:
            RequestError: It is not there, or somebody else's.
            ServiceError: The database or the folder cannot be used.
        """
        files = (await self.storage.get()).files
        return str(files.layout.file((await files.get(file_id, owner))["id"]))

    async def stored_responses(self) -> ResponseStore:
        """Return where responses are kept.

        Raises:
            ServiceError: The database or the folder cannot be used.
        """
        return (await self.storage.get()).responses

    def facts(self) -> ServerFacts:
        """Return what APIs may show of the server; the engine has started."""
        info, text = self.info, self.text
        packed = () if self.registry is None else self.registry.of_kind("quantization")
        return ServerFacts(
            version=__version__,
            models=tuple(self.served_names),
            created=self.created,
            architecture=info.architecture,
            dtype=info.dtype,
            weight_bytes=info.weight_bytes,
            context_len=info.context_len,
            vocab_size=info.vocab_size,
            quantization=next((record.name for record in packed if record.state == PluginState.ACTIVE), ""),
            template=text.template.source,
            calls_tools=text.tools is not None,
            thinks=text.reasoning is not None,
            sees=not text.template.no_images,
        )

    def _open_service(self) -> StorageService:
        """Import, create and migrate: only here, so that a server without files loads no database."""
        from dovetail_server.batches.service import StorageService

        return StorageService.prepare(self)

    async def health(self) -> str | None:
        """Say why the server should get no traffic, or None."""
        self.storage.retry()
        return self.why_not_ready()

    def why_not_ready(self) -> str | None:
        """As `health`, without asking anybody."""
        if not self.has_started:
            return "starting"
        if self.is_stopping:
            return "draining"
        if self.engine.dead is not None:
            return f"engine dead: {self.engine.dead}"
        if self.engine.restarting is not None:
            return f"engine restarting: {self.engine.restarting}"
        if self.storage.problem is not None:
            return f"files and batches: {self.storage.problem}"
        if self.tasks.problem is not None:
            return self.tasks.problem
        if (problem := self.bodies.problem()) is not None:
            return problem
        return self.hooks.why_not_healthy()


async def get_state(request: Request) -> ServerState:
    """FastAPI dependency: the server's state. `async`, as all of these, because FastAPI gives others a thread each."""
    state: ServerState = request.app.state.server
    return state


async def get_ready_state(request: Request) -> ServerState:
    """FastAPI dependency: the state, for routes that need a working engine."""
    state = await get_state(request)
    state.check_ready()
    return state


async def get_free_state(request: Request) -> ServerState:
    """FastAPI dependency: as `get_ready_state`, and there is room for a request."""
    state: ServerState = request.app.state.server
    state.check_ready()
    state.check_room()
    return state


State = Annotated[ServerState, Depends(get_state)]
ReadyState = Annotated[ServerState, Depends(get_ready_state)]
