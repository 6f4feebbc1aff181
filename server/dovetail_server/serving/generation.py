"""Runs the choices of one HTTP request against the engine and yields what each step brought.

There is one way in and one way out: `Generation.steps` submits, and whatever ends it (the last token, a stop string,
an error, a client that left) aborts what still runs and gives the admission back, once.
"""

from __future__ import annotations

import asyncio
import itertools
import logging
import time
from collections.abc import AsyncGenerator, Callable, Mapping, Sequence
from contextlib import aclosing
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from msgspec.structs import replace

from dovetail.contracts.errors import RequestError
from dovetail.contracts.observers import RequestEnd, RequestStart
from dovetail.contracts.seeds import derive_seed
from dovetail.engine.client import TokenStream
from dovetail.messages import TokenDelta
from dovetail_server.errors import catalogue as errors
from dovetail_server.http.auth import CALLER, NO_CALLER
from dovetail_server.http.journal import JOURNAL, Journal
from dovetail_server.http.origin import ORIGIN
from dovetail_server.observe.token_timer import EVERY, EXACT, TokenTimer
from dovetail_server.serving.choice import Choice, Step

if TYPE_CHECKING:
    from dovetail_server.serving.context import Live, ServingContext
    from dovetail_server.serving.early import EarlyPrefill
    from dovetail_server.tenants.tenant import Tenant

# `--log-requests`: a line when a generation request begins and one when it ends, without its text.

logger = logging.getLogger("dovetail.server")


def log_request(request_id: str, text: str, values: Mapping[str, object]) -> None:
    """Log something of a request, with the client and the hashed key of the present task.

    Args:
        request_id: As its response names it.
        text: What there is to say, a format of `values` in their order.
        values: Fields of the line with `--log-format json`, beside `request_id`, `client` and `key`.
    """
    origin, key = ORIGIN.get(), CALLER.get().tenant.short
    client = "" if origin is None else origin.client or origin.batch_id
    logger.info(
        f"Request %s from %s: {text}.",
        request_id,
        ", ".join(filter(None, (client, key))) or "this process",
        *values.values(),
        extra={"request_id": request_id, "client": client, "key": key, **values},
    )


WHOLE_EVERY = 64
"""Tokens that gather for a reply that is sent whole: enough to be cheap, few enough to be quick work at once."""
AT_ONCE = 64
"""Choices that are submitted, or folded into a reply, before others have their turn on the event loop; and how many of
a request wait in the engine beside those that it can run."""

PARAMS = (
    *("max_tokens", "temperature", "top_p", "top_k", "min_p", "frequency_penalty", "presence_penalty"),
    *("repetition_penalty", "seed"),
)
"""What observers are told of `SamplingParams`."""


@dataclass(slots=True, kw_only=True)
class Generation:
    """All choices of one HTTP request."""

    state: ServingContext
    request_id: str
    choices: Sequence[Choice]
    began: float = field(default_factory=time.perf_counter)
    number: int = field(default_factory=itertools.count(1).__next__)
    """Tells it from others, whatever their callers call them."""
    operation: str = "text_completion"
    """Its name in `RequestStart`."""
    timer: TokenTimer | None = None
    """Set where somebody observes."""
    journal: Journal | None = None
    """Set where a gateway keeps one."""
    tenant: Tenant = NO_CALLER.tenant
    """Whose it is, once it is admitted."""
    num_prompt: int = 0
    """Tokens of all prompts, once it is admitted."""
    is_expired: bool = False
    """The time that its client gave it is over."""
    follows: bool = False
    """It comes behind another one of the same reply, which its journal is of, too."""
    early: EarlyPrefill | None = None
    """What of its prompt is computed before it is submitted."""
    has_next: bool = False
    """Another one comes behind it: what the journal has beyond its end is of that one."""

    async def steps(self, *, whole: bool = False) -> AsyncGenerator[list[Step], None]:
        """Submit everything and yield what comes, several choices' steps together where they come together.

        Each step brings all that has come for its choice since it was last asked for.

        Args:
            whole: Nobody waits for single steps, only for the end: tokens may gather.

        Raises:
            ServiceError: The queue is full.
            EngineDeadError: The engine died.
        """
        self.num_prompt = sum({c.prompt_index: c.num_prompt for c in self.choices}.values())
        admitted: list[Live] = []
        timer = None
        try:
            admitted = self.state.admit([choice.submit.rid for choice in self.choices], self.num_prompt)
            self.tenant = admitted[0].tenant
            if self.early is not None:
                self.early.admitted()
            self._follow_journal()
            timer = self._limit_time(admitted)
            self._report_start()
            async for steps in self._replayed():
                yield steps
            if len(self.choices) == 1:
                choice = self.choices[0]
                if choice.finish_reason:
                    return
                async with aclosing(self._deltas(choice, admitted[0], whole)) as deltas:
                    async for delta in deltas:
                        step = await self._accept(choice, delta)
                        yield [step]
                        if step.is_last:
                            break
            else:
                async with aclosing(self._many(admitted, whole)) as source:
                    async for steps in source:
                        yield steps
            self._log_end()
        finally:
            if timer is not None:
                timer.cancel()
            self.state.release(admitted)
            if self.early is not None:
                self.early.close()
            for choice in self.choices:
                if choice.submit.media:
                    choice.release_media()
            self._report_end()

    def _limit_time(self, admitted: Sequence[Live]) -> asyncio.TimerHandle | None:
        """Have the request aborted when its client's time is over, if it has said how long it waits."""
        origin = ORIGIN.get()
        if origin is None or origin.timeout_s is None:
            return None

        def expire() -> None:
            self.is_expired = True
            for live in admitted:
                live.abort()

        left_s = origin.timeout_s - (time.perf_counter() - origin.began)
        return asyncio.get_running_loop().call_later(max(0.0, left_s), expire)

    def _follow_journal(self) -> None:
        """Let draws follow from the journal's identity, if this is what a journal is kept of."""
        journal = JOURNAL.get()
        if journal is None or not (self.follows or journal.takes_generation()):
            return
        self.journal = journal
        for choice in self.choices:
            if choice.submit.params.seed is None:
                params = replace(choice.submit.params, seed=derive_seed(journal.identity.seed, choice.index))
                choice.submit = replace(choice.submit, params=params)

    async def _replayed(self) -> AsyncGenerator[list[Step], None]:
        """Yield the steps that another server's engine made, and have this one go on behind them.

        Raises:
            RequestError: They are not of this request.
        """
        if self.journal is None or not self.journal.deltas:
            return
        outputs: list[list[int]] = [[] for _ in self.choices]
        size = self.state.info.vocab_size
        places = {choice.index: place for place, choice in enumerate(self.choices)}
        for at, (index, delta) in enumerate(self.journal.deltas):
            if self.has_next and all(choice.finish_reason for choice in self.choices):
                self.journal.deltas = self.journal.deltas[at:]
                return
            if (place := places.get(index)) is None or self.choices[place].finish_reason:
                raise RequestError(f"the journal tells of choice {index}, which does not run", code="invalid_value")
            choice = self.choices[place]
            outputs[place] += delta.ids
            if delta.ids and not 0 <= min(delta.ids) <= max(delta.ids) < size:
                raise RequestError("the journal has a token outside the vocabulary", code="invalid_value")
            if len(outputs[place]) > choice.submit.params.max_tokens:
                raise RequestError("the journal has more tokens than the reply may have", code="invalid_value")
            choice.submit = replace(
                choice.submit,
                again=True,
                output_ids=outputs[place],
                cached_tokens=delta.cached_tokens,
                num_retractions=delta.num_retractions,
                grammar_option=delta.grammar_option,
            )
            step = choice.accept(delta)
            if step.is_last and choice.route is not None:
                await choice.set_grammar_report(self.state.text.grammar)
            yield [step]
        self.journal.deltas = []

    async def finished(self, make: Callable[[], bytes]) -> bytes:
        """Return the reply that `make` builds of the choices, without holding others up."""
        return make() if len(self.choices) <= AT_ONCE else await asyncio.to_thread(make)

    def _deltas(self, choice: Choice, live: Live, whole: bool) -> TokenStream:
        """Submit one choice. Closing what is returned aborts the request if it still runs."""
        every = self.state.settings.stream_interval
        if whole:
            every = 1 if choice.output.may_end_early else WHOLE_EVERY
        return live.runs_as(self.state.engine.submit(choice.submit, every=every))

    async def _accept(self, choice: Choice, delta: TokenDelta) -> Step:
        timer = self.timer
        if self.early is not None and choice.submit.cached_tokens is None:  # else another server has told
            delta.cached_tokens = self.early.num_cached(delta.cached_tokens)
        self.tenant.generated(len(delta.ids))
        is_cut = delta.finish is not None and delta.finish.reason == "abort" and self.state.is_draining
        if self.journal is not None and not is_cut:
            self.journal.note(choice.index, delta)
        if timer is None:
            step = choice.accept(delta)
        elif timer.num_steps > EXACT and timer.num_steps % EVERY:
            step = choice.accept(delta)
            timer.record(choice.index, len(step.ids))
        else:
            began = time.perf_counter()
            step = choice.accept(delta)
            timer.record(choice.index, len(step.ids), began)
        if step.is_last and choice.finish_reason == "abort" and self.is_expired:
            raise errors.expired()
        if step.is_last and choice.finish_reason == "abort" and self.state.is_draining:
            raise errors.draining()
        if step.is_last and choice.route is not None:
            await choice.set_grammar_report(self.state.text.grammar)
        return step

    async def _many(self, admitted: Sequence[Live], whole: bool) -> AsyncGenerator[list[Step], None]:
        """Run the choices side by side: as many as keep the engine busy, so that a round of the loop stays short."""
        taken = asyncio.Event()
        queue: asyncio.Queue[Step | Exception] = asyncio.Queue()
        pairs = [pair for pair in zip(self.choices, admitted, strict=True) if not pair[0].finish_reason]
        waiting = iter(pairs)
        loop, left = asyncio.get_running_loop(), AT_ONCE

        def refill() -> None:
            nonlocal left
            left = AT_ONCE

        async def run_some() -> None:
            nonlocal left
            try:
                for choice, live in waiting:
                    while not left:
                        await asyncio.sleep(0)
                    left -= 1
                    if not left:
                        loop.call_soon(refill)
                    await self._pump(choice, self._deltas(choice, live, whole), queue, taken)
            except Exception as error:
                # Whatever it is, the request's own task is to raise it.
                queue.put_nowait(error)

        count = min(len(pairs), self.state.engine.info.max_running_requests + AT_ONCE)
        tasks = [asyncio.create_task(run_some()) for _ in range(count)]
        try:
            open_choices = len(pairs)
            while open_choices:
                items = [await queue.get()]
                while not queue.empty():
                    items.append(queue.get_nowait())
                steps = []
                for item in items:
                    if isinstance(item, Exception):
                        raise item
                    open_choices -= item.is_last
                    steps.append(item)
                yield steps
                taken.set()
                taken.clear()
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    async def _pump(
        self, choice: Choice, stream: TokenStream, queue: asyncio.Queue[Step | Exception], taken: asyncio.Event
    ) -> None:
        """Put a choice's steps into the queue, one or two at a time: more of it gathers in its stream."""
        async with aclosing(stream) as deltas:
            async for delta in deltas:
                step = await self._accept(choice, delta)
                queue.put_nowait(step)
                if step.is_last:
                    return
                await taken.wait()

    def _report_end(self) -> None:
        if self.timer is not None:
            self.timer.flush()
            now, origin = time.perf_counter(), ORIGIN.get()
            body_s = 0.0 if origin is None else origin.body_s
            self.state.hooks.observers.notify(
                "request_ended",
                RequestEnd(
                    request_id=self.request_id,
                    number=self.number,
                    num_prompt_tokens=self.num_prompt,
                    num_completion_tokens=sum(choice.num_completion for choice in self.choices),
                    finish_reasons=tuple(choice.finish_reason for choice in self.choices),
                    seconds=now - self.began,
                    body_s=body_s,
                    prepare_s=0.0 if origin is None else max(0.0, self.began - origin.began - body_s),
                    parse_s=self.timer.parse_s,
                    choices=tuple(c.clock.as_times(self.began, c.finished_at or now) for c in self.choices),
                    num_cached_tokens=sum({c.prompt_index: c.num_cached for c in self.choices}.values()),
                    num_retractions=sum(choice.num_retractions for choice in self.choices),
                ),
            )

    def _params(self) -> dict[str, float | int]:
        params = self.choices[0].submit.params
        return {name: value for name in PARAMS if (value := getattr(params, name)) is not None}

    def _report_start(self) -> None:
        observers = self.state.hooks.observers
        if observers.of_requests:
            origin = ORIGIN.get()
            began = RequestStart(
                request_id=self.request_id,
                number=self.number,
                num_choices=len(self.choices),
                num_prompt_tokens=self.num_prompt,
                at=time.time() - (time.perf_counter() - self.began),
                http=0 if origin is None else origin.http,
                batch_id="" if origin is None else origin.batch_id,
                operation=self.operation,
                model=self.state.served_names[0],
                params=self._params(),
            )
            self.timer = TokenTimer(observers, self.request_id, self.number, self.began)
            observers.notify("request_started", began)
        if self.state.settings.log_requests:
            values = {"prompt_tokens": self.num_prompt, "choices": len(self.choices)}
            log_request(self.request_id, "%d prompt tokens, %d choices", values)

    def _log_end(self) -> None:
        if self.state.settings.log_requests:
            reasons = ",".join(choice.finish_reason for choice in self.choices)
            num_completion = sum(choice.num_completion for choice in self.choices)
            took = time.perf_counter() - self.began
            values = {"tokens": num_completion, "seconds": took, "finish_reason": reasons}
            log_request(self.request_id, "%d tokens in %.3f s, %s", values)
