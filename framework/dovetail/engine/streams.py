"""What both clients share: which request's tokens go to which iterator.

A client numbers its requests: what comes from the engine is addressed by that number, which is never used again. The
identifiers that callers choose are labels.
"""

from __future__ import annotations

import asyncio
import itertools
import secrets
from abc import ABC, abstractmethod
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from typing import Any

import msgspec

from dovetail.contracts.errors import ConfigError, EngineDeadError, EngineError
from dovetail.contracts.seeds import derive_seed
from dovetail.engine.client import CacheWatch
from dovetail.messages import (
    Abort,
    Admitted,
    CacheChanged,
    Control,
    ControlReply,
    EngineFailed,
    EngineInfo,
    Finish,
    FromEngine,
    ProfileSpec,
    Ready,
    StepDeltas,
    Submit,
    ToEngine,
    TokenDelta,
)

# `RequestEntry`: what a client keeps of a request until its end: the request, what came, and what waits for a reader.
#
# The engine may die and be started again. What it knew of a request is then made again from here: the request and the
# tokens that came are all that the rest depends on.

MAX_WAITING = 1 << 17
"""Most that waits for one reader, in token ids and log probabilities together."""


def merge(first: TokenDelta, then: TokenDelta) -> None:
    """Merge a request's next delta into one that has not been read yet."""
    first.ids += then.ids
    if then.logprobs is not None:
        first.logprobs = first.logprobs or []
        first.logprobs += then.logprobs
    if then.prompt_logprobs is not None:
        first.prompt_logprobs = then.prompt_logprobs
    if then.pooled is not None:
        first.pooled = then.pooled
    first.prompt_tokens, first.cached_tokens = then.prompt_tokens, then.cached_tokens
    first.num_retractions = then.num_retractions
    first.grammar_option, first.grammar_ignored = then.grammar_option, then.grammar_ignored
    first.times = then.times or first.times
    first.finish = then.finish


@dataclass(slots=True, eq=False)
class RequestEntry:
    """One request. What waits for its reader is merged into one delta. One reader, on the event loop.

    Attributes:
        submit: As it was last sent, or is to be sent; its handle is the address of what comes.
        every: As in `EngineClient.submit`.
        number: In order of submission.
        output: All ids that came.
        is_sent: The engine has it.
        is_admitted: The engine said that it takes part in steps.
        is_aborted: A caller asked for its end.
        has_ended: Its last delta came.
        place: How many ids had come when the engine last died while it took part; -1 if none did.
        num_crashes: Deaths in a row that found it at this place.
        num_trials: How many of these came while it was tried alone.
        is_poison_candidate: It may have caused them.
    """

    submit: Submit
    every: int
    number: int = field(init=False)
    output: list[int] = field(init=False)
    is_sent: bool = False
    is_admitted: bool = False
    is_aborted: bool = False
    has_ended: bool = False
    place: int = -1
    num_crashes: int = 0
    num_trials: int = 0
    is_poison_candidate: bool = False
    _facts: TokenDelta | None = None
    _has_begun: bool = False
    _is_due: bool = False
    _waiting: TokenDelta | None = None
    _weight: int = 0
    _error: EngineDeadError | None = None
    _reader: asyncio.Future[None] | None = None

    def __post_init__(self) -> None:
        self.number, self.output = self.submit.handle, self.submit.output_ids[:]

    def put(self, delta: TokenDelta) -> bool:
        """Add a delta, and wake the reader if enough waits for it. False: too much waits."""
        waiting = self._waiting
        self.output += delta.ids
        self._facts = delta
        if waiting is None:
            self._waiting = waiting = delta
        else:
            merge(waiting, delta)
        self._weight += len(delta.ids)
        if delta.logprobs is not None:
            self._weight += sum([1 + len(row.top) + len(row.named) for row in delta.logprobs])
        if not self._has_begun or len(waiting.ids) >= self.every or delta.finish is not None:
            self.has_ended = delta.finish is not None
            self._has_begun = True
            self._wake()
        return self._weight <= MAX_WAITING

    def resumed(self, handle: int) -> Submit:
        """Return the request that goes on behind what has come, in an engine that knows nothing of it."""
        facts = self._facts
        known: dict[str, Any] = {}
        if facts is not None:
            known = {name: getattr(facts, name) for name in ("cached_tokens", "num_retractions", "grammar_option")}
            known["output_ids"] = self.output[:]
        return msgspec.structs.replace(self.submit, handle=handle, again=True, **known)

    def end(self, finish: Finish) -> None:
        """End it without an engine; what waits for the reader comes first."""
        facts = self._facts
        last = TokenDelta(handle=self.submit.handle, ids=[], prompt_tokens=len(self.submit.prompt_ids), finish=finish)
        if facts is not None:
            last.cached_tokens, last.num_retractions = facts.cached_tokens, facts.num_retractions
            last.grammar_option, last.grammar_ignored = facts.grammar_option, facts.grammar_ignored
        self.put(last)

    def drop(self, finish: Finish) -> None:
        """End it with nothing but this, in the place of what waits."""
        self._waiting, self.has_ended = TokenDelta(handle=self.submit.handle, ids=[], finish=finish), True
        self._wake()

    def fail(self, error: EngineDeadError) -> None:
        """Let the reader have what waits, and then the error."""
        self._error = error
        self._wake()

    async def get(self) -> TokenDelta:
        """Wait for what is new. Cancelling loses nothing.

        Raises:
            EngineDeadError: The engine died.
        """
        while not self._is_due:
            self._reader = asyncio.get_running_loop().create_future()
            try:
                await self._reader
            finally:
                self._reader = None
        delta = self._waiting
        if delta is None:
            raise self._error or EngineDeadError("the stream is over")
        self._waiting, self._weight, self._is_due = None, 0, self._error is not None
        return delta

    def _wake(self) -> None:
        self._is_due = True
        reader = self._reader
        if reader is not None and not reader.done():
            reader.set_result(None)


ABORTED = Finish("abort", None, "aborted")
CLOSED = "the engine was closed"
PREFILL_HANDLES = 1 << 48
"""Requests that sample nothing are numbered from here: a seed follows from a request's number, and must not depend on
how many of these came before."""
SLOW_READER = "the reply was read too slowly: too much of it was waiting; read faster, or ask for less"


class EngineTokenStream:
    """See `TokenStream`."""

    def __init__(self, client: StreamClient, entry: RequestEntry) -> None:
        self._client, self._entry = client, entry
        self._open = True

    def __aiter__(self) -> AsyncIterator[TokenDelta]:
        return self

    async def __anext__(self) -> TokenDelta:
        if not self._open:
            raise StopAsyncIteration
        try:
            delta = await self._entry.get()
        except EngineDeadError:
            self._leave(finished=True)
            raise
        if delta.finish is not None:
            self._leave(finished=True)
        return delta

    def abort(self) -> None:
        """See `TokenStream.abort`."""
        if self._open:
            self._client.abort(self._entry)

    async def aclose(self) -> None:
        """See `TokenStream.aclose`."""
        self._leave(finished=False)

    def __del__(self) -> None:
        self._leave(finished=False)

    def _leave(self, *, finished: bool) -> None:
        if self._open:
            self._open = False
            self._client.close_stream(self._entry, finished=finished)


class StreamClient(ABC):
    """Everything of an `EngineClient` but the transport; subclasses send, and call `receive` and `engine_died`."""

    def __init__(self, *, seed: int | None = None) -> None:
        """Nothing is submitted yet; `seed` seeds requests without a seed. Default: a random one."""
        self._seed = secrets.randbits(63) if seed is None else seed
        self._info: EngineInfo | None = None
        self.step = 0
        """The last step counter heard from the engine."""
        self.dead: str | None = None
        """Why the engine is gone, or None while it lives."""
        self.started: asyncio.Future[EngineInfo] | None = None
        self.entries: dict[int, RequestEntry] = {}
        self._handles = itertools.count(1)
        self._prefill_handles = itertools.count(PREFILL_HANDLES)
        self.replies: dict[int, tuple[Control, asyncio.Future[dict[str, Any]]]] = {}
        self._ids = itertools.count(1)
        self.cache_watch: CacheWatch | None = None
        self._num_engines = 0

    @property
    def info(self) -> EngineInfo:
        """Facts of the engine; available once `start` has returned."""
        if self._info is None:
            raise EngineError("the engine has not been started")
        return self._info

    @property
    def restarting(self) -> str | None:
        """Why the engine is being started again, or None."""
        return None

    @property
    def num_restarts(self) -> int:
        """How often the engine was started again."""
        return 0

    @property
    def num_unanswered(self) -> int:
        """See `EngineClient.num_unanswered`."""
        return sum(not (entry.output or entry.has_ended) for entry in self.entries.values())

    def submit(self, request: Submit, *, every: int = 1) -> EngineTokenStream:
        """See `EngineClient.submit`."""
        if self.dead is not None:
            raise EngineDeadError(self.dead)
        handle = next(self._prefill_handles if request.prefill_only else self._handles)
        params = request.params
        if params.seed is None:
            params = msgspec.structs.replace(params, seed=derive_seed(self._seed, handle))
        entry = RequestEntry(msgspec.structs.replace(request, handle=handle, params=params), every)
        self.entries[handle] = entry
        self.dispatch(entry)
        return EngineTokenStream(self, entry)

    def close_stream(self, entry: RequestEntry, *, finished: bool) -> None:
        """A stream has ended or was closed: forget it, and tell the engine if it does not know yet."""
        self.entries.pop(entry.submit.handle, None)
        if not finished and self.dead is None and entry.is_sent and not entry.has_ended:
            self.send_to_engine(Abort(entry.submit.handle))

    def abort(self, entry: RequestEntry) -> None:
        """Abort a request; its stream ends with a delta that says so."""
        if self.dead is not None or entry.has_ended:
            return
        entry.is_aborted = True
        if entry.is_sent:
            self.send_to_engine(Abort(entry.submit.handle))
        else:
            entry.end(ABORTED)

    def dispatch(self, entry: RequestEntry) -> None:
        """Send a request to the engine."""
        entry.is_sent = True
        self.send_to_engine(entry.submit)

    def renumber(self, entry: RequestEntry) -> None:
        """Give a request that an engine had another handle: later messages of that engine for it are ignored."""
        del self.entries[entry.submit.handle]
        entry.submit = entry.resumed(next(self._handles))
        entry.is_sent = entry.is_admitted = False
        self.entries[entry.submit.handle] = entry

    async def control(self, op: str, profile: ProfileSpec | None = None, *, after: int = 0) -> dict[str, Any]:
        """See `EngineClient.control`."""
        if self.dead is not None:
            raise EngineDeadError(self.dead)
        number = next(self._ids)
        reply: asyncio.Future[dict[str, Any]] = asyncio.get_running_loop().create_future()
        command = Control(id=number, op=op, profile=profile, after=after)  # type: ignore[arg-type]  # the engine checks it
        self.replies[number] = command, reply
        self.send_to_engine(command)
        try:
            result: dict[str, Any] = await reply
            return result
        finally:
            self.replies.pop(number, None)

    @abstractmethod
    def send_to_engine(self, message: ToEngine) -> None:
        """Hand one message to the engine, without waiting."""

    def receive(self, message: FromEngine) -> None:
        """Take one message from the engine, on the event loop."""
        if isinstance(message, StepDeltas):
            self.step = message.step
            for delta in message.deltas:
                entry = self.entries.get(delta.handle)
                if entry is not None and not entry.put(delta):
                    self.close_stream(entry, finished=False)
                    entry.drop(Finish("abort", None, SLOW_READER, "slow_reader"))
        elif isinstance(message, CacheChanged):
            if self.cache_watch is not None:
                self.cache_watch.changed(message.events)
        elif isinstance(message, Admitted):
            for handle in message.handles:
                if (entry := self.entries.get(handle)) is not None:
                    entry.is_admitted = True
        elif isinstance(message, ControlReply):
            waiting = self.replies.get(message.id)
            if waiting is not None and not waiting[1].done():
                waiting[1].set_result(message.result)
        elif isinstance(message, Ready):
            if self.cache_watch is not None:
                self.cache_watch.cleared(self._num_engines)
            self._num_engines += 1
            self._info = message.info
            if self.started is not None and not self.started.done():
                self.started.set_result(message.info)
        elif isinstance(message, EngineFailed):
            self.engine_died(message.message, user_error=message.user_error)

    def engine_died(self, why: str, *, user_error: bool = False) -> None:
        """The engine is gone: end everything that waits for it. The first reason is kept."""
        if self.dead is not None:
            return
        self.dead = why
        if self.started is not None and not self.started.done():
            self.started.set_exception(ConfigError(why) if user_error else EngineError(why))
        for entry in self.entries.values():
            entry.fail(EngineDeadError(why))
        for _, reply in self.replies.values():
            if not reply.done():
                reply.set_exception(EngineDeadError(why))
