"""What serving a request needs of its server: settings, engine, text tools, and who may still come in."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from starlette.types import Scope

from dovetail import __version__
from dovetail.contracts.errors import EngineDeadError, RequestError
from dovetail.engine.client import EngineClient, TokenStream
from dovetail.messages import EngineInfo
from dovetail_server.errors import catalogue as errors
from dovetail_server.http.auth import CALLER, Keys
from dovetail_server.http.journal import JOURNAL
from dovetail_server.http.origin import ORIGIN
from dovetail_server.schema.tags import OPENAI
from dovetail_server.serving.hooks import ApiHooks
from dovetail_server.serving.served import Served
from dovetail_server.settings.serve import ServeSettings
from dovetail_server.supervision.supervisor import Supervisor
from dovetail_server.tenants.tenant import Tenant, share_of

if TYPE_CHECKING:
    from dovetail.processing.processor import Processor

POOLS_QUEUED = 8
"""Prompt tokens that may run and wait where `--max-queued-tokens` is not given, in sizes of the KV cache; where nothing
is cached, of all that can run at once."""


@dataclass(slots=True, eq=False)
class Live:
    """An engine request that has not finished: whose it is, what it is called, and the prompt tokens it counts for."""

    tenant: Tenant
    rid: str
    num_tokens: int
    is_aborted: bool = False
    _stream: TokenStream | None = None

    @property
    def owner(self) -> str:
        """The name of whose it is."""
        return self.tenant.owner

    def runs_as(self, stream: TokenStream) -> TokenStream:
        """Note the stream of its tokens, and return it."""
        self._stream = stream
        if self.is_aborted:
            stream.abort()
        return stream

    def abort(self) -> None:
        """Abort it: its stream ends with a delta that says so."""
        self.is_aborted = True
        if self._stream is not None:
            self._stream.abort()


def _is_paced() -> bool:
    """Whether a key's limits hold for the present work: lines of batches run where there is room for them."""
    origin = ORIGIN.get()
    return origin is None or not origin.batch_id


class ServingContext:
    """One per server. Used from its event loop only. What reads bodies and what keeps files add to it."""

    def __init__(
        self,
        settings: ServeSettings,
        engine: EngineClient,
        hooks: ApiHooks | None = None,
        tasks: Supervisor | None = None,
    ) -> None:
        """Start without text tools: requests are refused until `ready_with` is called."""
        self.settings = settings
        self.engine = engine
        self.hooks = hooks or ApiHooks()
        self.tasks = tasks or Supervisor()
        """All background work of this process."""
        self.is_leaving = False
        """A signal has come; new requests are still served for a while."""
        self.is_draining = False
        self.leaving = asyncio.Event()
        """Set with it, for connections that wait for their client."""
        self.num_live = 0
        """Engine requests submitted and not yet finished."""
        self.num_live_tokens = 0
        """Prompt tokens of these."""
        self.keys = Keys.of(settings)
        """Who may come in, and what each may use."""
        self.live_tenants: set[Tenant] = set()
        """Those who have engine requests here."""
        self.live: dict[tuple[str, str], Live] = {}
        """By owner and by the identifier that it chose, or that its reply carries: what `/abort_request` may name."""
        self.cut_off: Callable[[Scope], None] = lambda scope: None
        """Closes the connection of a request at once, whatever it has not taken yet; set by the HTTP server."""
        self.served = Served(settings.served_model_name or [settings.model_path or "model"], settings.model_aliases)
        """The names that requests may ask for, listed or not."""
        self.fingerprint = ""
        """Changes when replies to one seed may change."""
        self._text: Processor | None = None

    def ready_with(self, text: Processor) -> None:
        """Take requests from now on; the engine has started."""
        self._text = text
        self.fingerprint = f"fp_dovetail_{__version__.replace('.', '_')}_{self.info.dtype}"

    @property
    def info(self) -> EngineInfo:
        """Facts of the started engine."""
        return self.engine.info

    @property
    def text(self) -> Processor:
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
        """The names that are listed, the first of which replies carry."""
        return self.served.names

    @property
    def max_live(self) -> int:
        """Most engine requests held at once, running and waiting."""
        return self.settings.max_running_requests + self.settings.max_queued_requests

    @property
    def max_live_tokens(self) -> int:
        """Most prompt tokens held at once."""
        info = self.info
        room = info.max_total_tokens or info.max_running_requests * info.context_len
        return self.settings.max_queued_tokens or POOLS_QUEUED * room

    def check_model(self, name: str | None, tag: str = OPENAI) -> str:
        """Return the name a reply carries, or raise a 404 that lists the served names: see `Served.name`."""
        return self.served.name(name, tag)

    @property
    def is_stopping(self) -> bool:
        """Whether a signal to stop has come: whoever asks is sent elsewhere."""
        return self.is_leaving or self.is_draining

    def check_ready(self) -> None:
        """Raise unless a new request can be served.

        Raises:
            ServiceError: Starting or draining.
            EngineDeadError: The engine is gone for good. While it is started again, requests wait.
        """
        if self._text is None:
            raise errors.starting()
        if self.is_draining:
            raise errors.draining()
        if self.engine.dead is not None:
            raise EngineDeadError(self.engine.dead)

    def check_choices(self, num_choices: int, param: str = "n", what: str = "prompts times n") -> None:
        """Refuse what would not fit if it were alone, before anything is made of it.

        Raises:
            RequestError: So many choices of one request can never be generated here.
        """
        if num_choices > self.max_live:
            text = f"{what} is {num_choices}; at most {self.max_live} fit into this server's queue"
            raise RequestError(text, param=param, code="invalid_value")

    def check_generated(self, num_choices: int) -> None:
        """As `check_choices`, of choices that are generated: the present caller's key may have a bound of its own."""
        self.check_choices(num_choices)
        tenant = CALLER.get().tenant
        if tenant.is_limited and _is_paced():
            tenant.check_choices(num_choices)

    def check_room(self, num_requests: int = 1, num_tokens: int = 1, *, is_counted: bool = True) -> None:
        """Raise where so much more of the present caller's does not fit. A request that is alone always fits.

        Each key has its share of the queue, by weight, even if others have filled it: so all together hold less than
        twice what one alone may. A stream that another server began always fits: its client has been let in there.

        Args:
            num_requests: Of the engine.
            num_tokens: Of their prompts.
            is_counted: See `Tenant.check`.

        Raises:
            ServiceError: 429, the queue is full, or the caller's key has come to its limits.
        """
        if (journal := JOURNAL.get()) is not None and journal.is_resumed:
            return
        tenant = CALLER.get().tenant
        if tenant.is_limited and _is_paced():
            tenant.check(num_requests, num_tokens, is_counted=is_counted)
        most = self.max_live
        is_full = self.num_live + num_requests > most
        if is_full and tenant.num_live + num_requests > share_of(tenant, self.live_tenants) * most:
            raise errors.queue_full(most)
        is_full = tenant.num_live > 0 and self.num_live_tokens + num_tokens > (most := self.max_live_tokens)
        if is_full and tenant.num_live_tokens + num_tokens > share_of(tenant, self.live_tenants) * most:
            raise errors.queue_full_tokens(most)

    def admit(self, rids: Sequence[str], num_tokens: int = 0) -> list[Live]:
        """Count new engine requests of the present caller; each must be given back with `release`.

        Args:
            rids: Their identifiers, all different.
            num_tokens: Prompt tokens of all of them.

        Raises:
            ServiceError: 429, the queue is full.
            RequestError: The caller uses an identifier already; what others use is their own affair.
        """
        self.check_room(len(rids), num_tokens)
        tenant = CALLER.get().tenant
        owner = tenant.owner
        taken = [rid for rid in rids if (owner, rid) in self.live]
        if taken:
            text = f"rid {taken[0]!r} belongs to a running request of yours; choose another or leave it out"
            raise RequestError(text, param="rid", code="duplicate_rid", status=409)
        self.num_live += len(rids)
        self.num_live_tokens += num_tokens
        tenant.began(len(rids), num_tokens)
        self.live_tenants.add(tenant)
        admitted = [Live(tenant, rid, 0) for rid in rids]
        for live in admitted[:1]:
            live.num_tokens = num_tokens  # counted once, with the first
        self.live.update(((owner, live.rid), live) for live in admitted)
        return admitted

    def release(self, admitted: Sequence[Live]) -> None:
        """Undo `admit`."""
        self.num_live -= len(admitted)
        for live in admitted:
            self.num_live_tokens -= live.num_tokens
            live.tenant.ended(1, live.num_tokens)
            if not live.tenant.num_live:
                self.live_tenants.discard(live.tenant)
            del self.live[live.owner, live.rid]
