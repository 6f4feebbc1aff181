"""What reading requests needs of its server: what serving needs, and the processes that read large bodies."""

from __future__ import annotations

import asyncio
import logging
from abc import abstractmethod
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, TypeVar

from dovetail.base.process_limits import num_cores
from dovetail.contracts.api import Api, Route
from dovetail.engine.client import EngineClient
from dovetail.text.inline import InlineCostError
from dovetail_server.http.auth import CALLER
from dovetail_server.media.cache import ImageCache
from dovetail_server.media.decode import NO_PILLOW, has_pillow
from dovetail_server.media.folder import MediaFolder
from dovetail_server.media.rules import MediaRules
from dovetail_server.reading.pool import BodyPool
from dovetail_server.reading.quick import QuickRequests
from dovetail_server.reading.threads import num_threads
from dovetail_server.reading.together import Together
from dovetail_server.reading.turns import Turns
from dovetail_server.reading.wire import WorkerStart
from dovetail_server.schema.unknown import UnknownFields
from dovetail_server.serving.context import ServingContext
from dovetail_server.serving.hooks import ApiHooks
from dovetail_server.settings.serve import MAX_IMAGES, ServeSettings
from dovetail_server.supervision.supervisor import Supervisor

if TYPE_CHECKING:
    from dovetail.processing.images import Message, PreparedImage
    from dovetail.processing.processor import Processor
    from dovetail_server.apis.responses.conversations import ConversationStore
    from dovetail_server.apis.responses.store import ResponseStore

logger = logging.getLogger("dovetail.server")
T = TypeVar("T")
MAX_PREPARING = 2
"""Requests that threads prepare at a time. Each holds Python's lock for most of it, so more of them gain nothing, and
the event loop would wait for every one of them, up to 5 ms each."""
ROUND_S = 0.01
"""Time that preparing short requests may take in a round of the event loop: 256 of them at once took 0.2 s."""
MOST_THREADS = 8
"""That prepare short requests of one round: a third of it holds Python's lock, so a few are enough."""

LEAST_PROCESSES, MOST_PROCESSES = 2, 8


def num_processes(asked: int | None) -> int:
    """Return how many processes read bodies: as asked for, or one for every four cores within bounds."""
    return max(LEAST_PROCESSES, min(MOST_PROCESSES, num_cores() // 4)) if asked is None else asked


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
        self.bodies = BodyPool(num_processes(settings.body_processes), settings.body_cpu_limit)
        """Reads large bodies, and whatever a checkpoint's template or tokenizer may take long for."""
        self._preparing = Turns(MAX_PREPARING)
        self.parsing = Together(1, ROUND_S)
        """Of short bodies, which the event loop does itself: threads would only wait for one another."""
        self.quick = QuickRequests()
        self.together = Together(min(num_cores(), MOST_THREADS), ROUND_S)
        self.media: MediaFolder | None = None
        """Where images lie while requests need them; None where the model sees none."""
        self.image_cache: ImageCache | None = None
        """Those that were decoded lately; None where none are kept."""
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
        media = None if processor is None else self._media_rules(text)
        self.bodies.ready_with(
            None
            if processor is None
            else WorkerStart(
                processor=processor,
                served=self.served,
                num_threads=num_threads(),
                num_cores=num_cores(),
                media=media,
                no_images=text.template.no_images,
            )
        )
        if self.bodies.is_on:
            text.keep_inline()

    @property
    def max_images(self) -> int:
        """Images that a request may have, if the model sees any."""
        return self.settings.limit_mm_per_prompt.get("image", MAX_IMAGES)

    @property
    def max_patches(self) -> int | None:
        """Patches that an image may have; None: what the model's processor makes of it."""
        return min(filter(None, (self.settings.max_image_patches, self.info.timed_patches)), default=None)

    async def in_thread(self, work: Callable[..., T], *args: object) -> T:
        """Run what takes a while for one request in a thread, when it is its caller's turn, and return its result."""
        async with self._preparing.turn(CALLER.get().owner, is_background=False):
            return await asyncio.to_thread(work, *args)

    def _media_rules(self, text: Processor) -> MediaRules | None:
        """Return what images may be, and have them loaded by other processes; None where there can be none."""
        settings, why = self.settings, self.settings.no_decoder
        if settings.processor is None:
            text.template.no_images = why or "this server was started with --processor none"
        if text.images is None:
            return None
        if not why and not has_pillow():
            why = NO_PILLOW
            logger.warning("The model sees images, and requests with one are refused: %s.", why)
        if why:
            text.template.no_images, text.images = why, None
            return None
        self.media = self.media or MediaFolder()
        text.template.no_images = ""
        text.load_images = _elsewhere
        keeps = settings.image_cache_bytes > 0
        if keeps and self.image_cache is None:
            self.image_cache = ImageCache(self.media.path, settings.image_cache_bytes)
        self.bodies.load_media(self.media, self.stored_file, self.image_cache)
        local = settings.allowed_local_media_path
        return MediaRules(
            folder=str(self.media.path),
            revision=text.model_revision,
            max_images=self.max_images,
            max_patches=self.max_patches,
            max_tokens=text.limits.context_len,
            domains=settings.allowed_media_domains,
            local_path=None if local is None else str(local),
            keeps=keeps,
        )

    @abstractmethod
    async def stored_file(self, owner: str, file_id: str) -> str:
        """Return the path of an uploaded file that is the owner's.

        Raises:
            RequestError: It is not there, or somebody else's.
            ServiceError: The database or the folder cannot be used.
        """

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


def _elsewhere(parts: Sequence[tuple[Message, str]], salt: str) -> Sequence[PreparedImage]:
    raise InlineCostError("images are decoded in a process of their own")
