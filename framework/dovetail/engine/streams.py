"""What both clients share: which request's tokens go to which iterator."""

from __future__ import annotations

import asyncio
import itertools
from abc import ABC, abstractmethod
from collections.abc import AsyncIterator
from typing import Any

from dovetail.engine.messages import (
    Abort,
    Control,
    ControlReply,
    EngineInfo,
    Failed,
    Finish,
    FromEngine,
    Ready,
    Submit,
    Tick,
    ToEngine,
    TokenDelta,
)
from dovetail.errors import ConfigError, EngineDeadError, EngineError

MAX_WAITING = 1 << 17
"""Most that waits for one reader, in token ids and log probabilities together."""
SLOW_READER = "the reply was read too slowly: too much of it was waiting; read faster, or ask for less"


def merge(first: TokenDelta, then: TokenDelta) -> None:
    """Add a request's next delta to one that nobody has taken yet: the two are as one that brought both."""
    first.ids += then.ids
    if then.logprobs is not None:
        first.logprobs = then.logprobs if first.logprobs is None else first.logprobs + then.logprobs
    if then.prompt_logprobs is not None:
        first.prompt_logprobs = then.prompt_logprobs
    first.prompt_tokens, first.cached_tokens = then.prompt_tokens, then.cached_tokens
    first.num_retractions = then.num_retractions
    first.grammar_step, first.finish = then.grammar_step, then.finish


class Inbox:
    """What waits for one stream's reader, merged into one delta. One reader, on the event loop."""

    __slots__ = ("_error", "_every", "_has_begun", "_is_due", "_reader", "_waiting", "_weight")

    def __init__(self, every: int) -> None:
        """Prepare; `every` as in `EngineClient.submit`."""
        self._every = every
        self._has_begun = False
        self._is_due = False
        self._waiting: TokenDelta | None = None
        self._weight = 0
        self._error: EngineDeadError | None = None
        self._reader: asyncio.Future[None] | None = None

    def put(self, delta: TokenDelta) -> bool:
        """Add a delta, and wake the reader if enough waits for it. False: too much waits."""
        waiting = self._waiting
        if waiting is None:
            self._waiting = waiting = delta
        else:
            merge(waiting, delta)
        self._weight += len(delta.ids)
        if delta.logprobs is not None:
            self._weight += sum([1 + len(row.top) for row in delta.logprobs])
        if not self._has_begun or len(waiting.ids) >= self._every or delta.finish is not None:
            self._has_begun = True
            self._wake()
        return self._weight <= MAX_WAITING

    def drop(self, last: TokenDelta) -> None:
        """Put the last delta in the place of what waits."""
        self._waiting = last
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


class Stream:
    """See `TokenStream`."""

    def __init__(self, client: StreamClient, rid: str, inbox: Inbox) -> None:
        self._client, self._rid, self._inbox = client, rid, inbox
        self._open = True

    def __aiter__(self) -> AsyncIterator[TokenDelta]:
        return self

    async def __anext__(self) -> TokenDelta:
        if not self._open:
            raise StopAsyncIteration
        try:
            delta = await self._inbox.get()
        except EngineDeadError:
            self._leave(finished=True)
            raise
        if delta.finish is not None:
            self._leave(finished=True)
        return delta

    async def aclose(self) -> None:
        """See `TokenStream.aclose`."""
        self._leave(finished=False)

    def __del__(self) -> None:
        self._leave(finished=False)

    def _leave(self, *, finished: bool) -> None:
        if self._open:
            self._open = False
            self._client.leave(self._rid, finished=finished)


class StreamClient(ABC):
    """Everything of an `EngineClient` but the transport; subclasses send, and call `_receive` and `_lost`."""

    def __init__(self) -> None:
        self._info: EngineInfo | None = None
        self._step = 0
        self._dead: str | None = None
        self._started: asyncio.Future[EngineInfo] | None = None
        self._streams: dict[str, Inbox] = {}
        self._replies: dict[int, asyncio.Future[dict[str, Any]]] = {}
        self._ids = itertools.count(1)

    @property
    def info(self) -> EngineInfo:
        """Facts of the engine; available once `start` has returned."""
        if self._info is None:
            raise EngineError("the engine has not been started")
        return self._info

    @property
    def step(self) -> int:
        """The last step counter heard from the engine."""
        return self._step

    @property
    def dead(self) -> str | None:
        """Why the engine is gone, or None while it lives."""
        return self._dead

    @property
    def num_streams(self) -> int:
        """Requests that have not ended."""
        return len(self._streams)

    def submit(self, request: Submit, *, every: int = 1) -> Stream:
        """See `EngineClient.submit`."""
        if self._dead is not None:
            raise EngineDeadError(self._dead)
        if request.rid in self._streams:
            raise EngineError(f"request id {request.rid!r} is in use")
        inbox = self._streams[request.rid] = Inbox(every)
        self._send(request)
        return Stream(self, request.rid, inbox)

    def leave(self, rid: str, *, finished: bool) -> None:
        """A stream has ended or was closed: forget it, and tell the engine if it does not know yet."""
        self._streams.pop(rid, None)
        if not finished and self._dead is None:
            self._send(Abort(rid))

    def abort(self, rid: str) -> None:
        """See `EngineClient.abort`."""
        if rid in self._streams and self._dead is None:
            self._send(Abort(rid))

    async def control(self, op: str) -> dict[str, Any]:
        """See `EngineClient.control`."""
        if self._dead is not None:
            raise EngineDeadError(self._dead)
        number = next(self._ids)
        reply = self._replies[number] = asyncio.get_running_loop().create_future()
        self._send(Control(id=number, op=op))  # type: ignore[arg-type]  # the engine checks it
        try:
            result: dict[str, Any] = await reply
            return result
        finally:
            self._replies.pop(number, None)

    @abstractmethod
    def _send(self, message: ToEngine) -> None:
        """Hand one message to the engine, without waiting."""

    def _receive(self, message: FromEngine) -> None:
        """Take one message from the engine, on the event loop."""
        if isinstance(message, Tick):
            self._step = message.step
            for delta in message.deltas:
                inbox = self._streams.get(delta.rid)
                if inbox is not None and not inbox.put(delta):
                    self._give_up(delta.rid, inbox)
        elif isinstance(message, ControlReply):
            reply = self._replies.get(message.id)
            if reply is not None and not reply.done():
                reply.set_result(message.result)
        elif isinstance(message, Ready):
            self._info = message.info
            if self._started is not None and not self._started.done():
                self._started.set_result(message.info)
        elif isinstance(message, Failed):
            self._lost(message.message, user_error=message.user_error)

    def _give_up(self, rid: str, inbox: Inbox) -> None:
        """End a request whose reader is too far behind: what waits for it is dropped, to be told instead."""
        self.leave(rid, finished=False)
        inbox.drop(TokenDelta(rid=rid, ids=[], finish=Finish("abort", None, SLOW_READER, "slow_reader")))

    def _lost(self, why: str, *, user_error: bool = False) -> None:
        """The engine is gone: end everything that waits for it. The first reason is kept."""
        if self._dead is not None:
            return
        self._dead = why
        if self._started is not None and not self._started.done():
            self._started.set_exception(ConfigError(why) if user_error else EngineError(why))
        for inbox in self._streams.values():
            inbox.fail(EngineDeadError(why))
        for reply in self._replies.values():
            if not reply.done():
                reply.set_exception(EngineDeadError(why))
