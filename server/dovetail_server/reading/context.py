"""What reading requests needs of its server: what serving needs, and the processes that read large bodies."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Mapping
from typing import TYPE_CHECKING

from dovetail.contracts.api import Api, Route
from dovetail.engine.client import EngineClient
from dovetail.supervisor import Supervisor
from dovetail.text.tokenizer.threads import num_threads
from dovetail_server.hooks import ApiHooks
from dovetail_server.reading.pool import BodyPool
from dovetail_server.reading.wire import WorkerStart
from dovetail_server.schema.unknown import UnknownFields
from dovetail_server.serving.context import ServingContext
from dovetail_server.settings import ServeSettings

if TYPE_CHECKING:
    from dovetail.processing.processor import Processor
    from dovetail_server.apis.responses.conversations import ConversationStore
    from dovetail_server.apis.responses.store import ResponseStore


class ReadingContext(ServingContext):
    """One per server. Used from its event loop only."""

    def __init__(
        self,
        settings: ServeSettings,
        engine: EngineClient,
        hooks: ApiHooks | None = None,
        tasks: Supervisor | None = None,
    ) -> None:
        """Start without processes: all bodies are read here until `ready_with` is called."""
        super().__init__(settings, engine, hooks, tasks)
        self.bodies = BodyPool(settings.body_processes, settings.body_cpu_limit)
        """Reads large bodies, and whatever a checkpoint's template or tokenizer may take long for."""
        self.unknown_fields = UnknownFields()
        """What `--unknown-fields warn` has left out of bodies."""
        self.routes: Mapping[str, Route] = {}
        """Those of packages' APIs that generate, by path."""
        self.owners: Mapping[str, Api] = {}
        """Of them, those whose errors have the words of their API."""
        self.slow_until: dict[str, float] = {}
        """Of them, those whose bodies another process reads until then, as `time.monotonic` counts."""

    def ready_with(self, text: Processor) -> None:
        """Take requests from now on; the engine has started."""
        super().ready_with(text)
        processor = text.start_elsewhere()
        self.bodies.ready_with(
            None
            if processor is None
            else WorkerStart(processor=processor, served=self.served, num_threads=num_threads())
        )
        if self.bodies.is_on:
            text.keep_inline()

    @abstractmethod
    async def stored_conversations(self) -> ConversationStore:
        """Return where conversations are kept.

        Raises:
            ServiceError: The database or the folder cannot be used.
        """

    @abstractmethod
    async def stored_responses(self) -> ResponseStore:
        """Return where responses are kept.

        Raises:
            ServiceError: The database or the folder cannot be used.
        """
