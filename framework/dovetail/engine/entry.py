"""`RequestEntry`: what a client keeps of a request until its end: the request, what came, and what waits for a reader.

The engine may die and be started again. What it knew of a request is then made again from here: the request and the
tokens that came are all that the rest depends on.
"""

from __future__ import annotations

import asyncio

import msgspec

from dovetail.contracts.errors import EngineDeadError
from dovetail.messages import Finish, Submit, TokenDelta

MAX_WAITING = 1 << 17
"""Most that waits for one reader, in token ids and log probabilities together."""


def merge(first: TokenDelta, then: TokenDelta) -> None:
    """Merge a request's next delta into one that has not been read yet."""
    first.ids += then.ids
    if then.logprobs is not None:
        first.logprobs = then.logprobs if first.logprobs is None else first.logprobs + then.logprobs
    if then.prompt_logprobs is not None:
        first.prompt_logprobs = then.prompt_logprobs
    if then.pooled is not None:
        first.pooled = then.pooled
    first.prompt_tokens, first.cached_tokens = then.prompt_tokens, then.cached_tokens
    first.num_retractions = then.num_retractions
    first.grammar_option, first.grammar_ignored = then.grammar_option, then.grammar_ignored
    if then.times is not None:
        first.times = then.times
    first.finish = then.finish


class RequestEntry:
    """One request. What waits for its reader is merged into one delta. One reader, on the event loop.

    Attributes:
        number: In order of submission.
        submit: As it was last sent, or is to be sent; its handle is the address of what comes.
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

    __slots__ = (
        "_error",
        "_every",
        "_facts",
        "_has_begun",
        "_is_due",
        "_reader",
        "_waiting",
        "_weight",
        "has_ended",
        "is_aborted",
        "is_admitted",
        "is_poison_candidate",
        "is_sent",
        "num_crashes",
        "num_trials",
        "number",
        "output",
        "place",
        "submit",
    )

    def __init__(self, submit: Submit, every: int) -> None:
        """Prepare; `every` as in `EngineClient.submit`."""
        self.number = submit.handle
        self.submit = submit
        self.output: list[int] = submit.output_ids[:]
        self.is_sent = self.is_admitted = self.is_aborted = self.has_ended = False
        self.place, self.num_crashes, self.num_trials = -1, 0, 0
        self.is_poison_candidate = False
        self._facts: TokenDelta | None = None
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
        self.output += delta.ids
        self._facts = delta
        if waiting is None:
            self._waiting = waiting = delta
        else:
            merge(waiting, delta)
        self._weight += len(delta.ids)
        if delta.logprobs is not None:
            self._weight += sum([1 + len(row.top) + len(row.named) for row in delta.logprobs])
        if not self._has_begun or len(waiting.ids) >= self._every or delta.finish is not None:
            self.has_ended = delta.finish is not None
            self._has_begun = True
            self._wake()
        return self._weight <= MAX_WAITING

    def resumed(self, handle: int) -> Submit:
        """Return the request that goes on behind what has come, in an engine that knows nothing of it."""
        facts = self._facts
        if facts is None:
            return msgspec.structs.replace(self.submit, handle=handle, again=True)
        return msgspec.structs.replace(
            self.submit,
            handle=handle,
            again=True,
            output_ids=self.output[:],
            cached_tokens=facts.cached_tokens,
            num_retractions=facts.num_retractions,
            grammar_option=facts.grammar_option,
        )

    def end(self, finish: Finish) -> None:
        """End it without an engine; what waits for the reader comes first."""
        facts = self._facts
        last = TokenDelta(handle=self.submit.handle, ids=[], prompt_tokens=len(self.submit.prompt_ids), finish=finish)
        if facts is not None:
            last.cached_tokens, last.num_retractions = facts.cached_tokens, facts.num_retractions
            last.grammar_option, last.grammar_ignored = facts.grammar_option, facts.grammar_ignored
        self.put(last)

    def drop(self, last: TokenDelta) -> None:
        """Put the last delta in the place of what waits."""
        self._waiting, self.has_ended = last, True
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
