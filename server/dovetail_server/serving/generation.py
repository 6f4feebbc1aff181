"""Runs the choices of one HTTP request against the engine and yields what each step brought.

There is one way in and one way out: `Generation.steps` submits, and whatever ends it (the last token, a stop string,
an error, a client that left) aborts what still runs and gives the admission back, once.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import AsyncGenerator, AsyncIterator, Sequence
from contextlib import aclosing
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from dovetail.contracts.observers import RequestEnd, RequestStart
from dovetail.contracts.reasoning import Event
from dovetail.engine.messages import Submit, TokenDelta, TokenLogprob
from dovetail.grammar.front import GrammarFront
from dovetail.grammar.route import GrammarReport, Route
from dovetail.text.stream import OutputStream
from dovetail_server.pace import Pace

if TYPE_CHECKING:
    from dovetail_server.state import ServerState

logger = logging.getLogger("dovetail.server")


@dataclass(slots=True, kw_only=True)
class Step:
    """What one engine delta brought to one choice. `is_last` is set once per choice."""

    choice: Choice
    events: list[Event]
    ids: list[int]
    """New ids that count; those after a stop string do not."""
    logprobs: Sequence[TokenLogprob]
    """One row per entry of `ids`, or empty."""
    is_last: bool


@dataclass(slots=True, kw_only=True)
class Choice:
    """One engine request: a choice of a prompt. `output` holds its reply so far."""

    index: int
    submit: Submit
    output: OutputStream
    prompt_index: int = 0
    num_cached: int = 0
    num_retractions: int = 0
    prompt_logprobs: list[TokenLogprob] | None = None
    abort_code: str | None = None
    route: Route | None = None
    """How its grammar is enforced."""
    grammar_step: int | None = None
    grammar_report: GrammarReport | None = None
    """Set when it has ended, if it has a grammar."""
    """Set by the engine where the request is at fault."""
    finished_at: float = 0.0
    is_dropped: bool = False
    """Nobody wants the output: it only had to exist so that the engine looks at the prompt."""

    @property
    def num_prompt(self) -> int:
        """Tokens of the prompt."""
        return len(self.submit.prompt_ids)

    @property
    def num_completion(self) -> int:
        """Generated tokens that count."""
        return 0 if self.is_dropped else self.output.num_tokens

    @property
    def finish_reason(self) -> str:
        """`stop`, `length`, `tool_calls` or `abort`; empty while running."""
        if self.is_dropped and self.output.finish is not None and self.output.finish.reason != "abort":
            return "length"
        return self.output.finish.reason if self.output.finish is not None else ""

    @property
    def matched_stop(self) -> int | str | None:
        """The stop token id or string that ended it."""
        return None if self.output.finish is None or self.is_dropped else self.output.finish.matched

    @property
    def abort_message(self) -> str | None:
        """Why the engine gave up."""
        return None if self.output.finish is None else self.output.finish.message

    def accept(self, delta: TokenDelta) -> Step:
        """Take an engine delta."""
        self.num_cached = delta.cached_tokens
        self.num_retractions = delta.num_retractions
        self.grammar_step = delta.grammar_step
        if delta.prompt_logprobs is not None:
            self.prompt_logprobs = self._with_first_token(delta.prompt_logprobs)
        before = self.output.num_tokens
        events = self.output.feed(delta)
        num_new = self.output.num_tokens - before
        is_last = self.output.finish is not None
        if delta.finish is not None:
            self.abort_code = delta.finish.code
        if is_last:
            self.finished_at = time.perf_counter()
        return Step(
            choice=self,
            events=[] if self.is_dropped else events,
            ids=[] if self.is_dropped else delta.ids[:num_new],
            logprobs=() if self.is_dropped else (delta.logprobs or ())[:num_new],
            is_last=is_last,
        )

    @property
    def grammar_param(self) -> str | None:
        """The request's field that the grammar came from."""
        return None if self.route is None else self.route.param

    async def judge(self, front: GrammarFront) -> None:
        """Say what came of its grammar, now that it has ended."""
        if self.route is None or self.grammar_step is None or self.finish_reason == "abort":
            return
        ended = self.finish_reason in ("stop", "tool_calls") and not isinstance(self.matched_stop, str)
        if ended and self.route.needs_validation(self.grammar_step):
            work = asyncio.to_thread(front.report, self.route, self.grammar_step, self.output.text, ended=True)
            self.grammar_report = await work
        else:
            self.grammar_report = front.report(self.route, self.grammar_step, "", ended=ended)

    def _with_first_token(self, rows: list[TokenLogprob]) -> list[TokenLogprob]:
        """Add the prompt's first token, which nothing predicts, where the engine left it out."""
        is_whole = self.submit.params.prompt_logprobs_start > 0 or len(rows) >= self.num_prompt
        return rows if is_whole else [TokenLogprob(self.submit.prompt_ids[0], None, []), *rows]

    def visible(self, step: Step) -> Sequence[TokenLogprob]:
        """Return a step's rows without the stop token, which has no text."""
        ends = step.is_last and isinstance(self.matched_stop, int)
        return step.logprobs[:-1] if ends else step.logprobs


@dataclass(slots=True, kw_only=True)
class Generation:
    """All choices of one HTTP request."""

    state: ServerState
    request_id: str
    choices: Sequence[Choice]
    began: float = field(default_factory=time.perf_counter)
    pace: Pace | None = None
    """Set where somebody observes."""

    async def steps(self) -> AsyncGenerator[list[Step], None]:
        """Submit everything and yield what comes, several choices' steps together where they come together.

        Raises:
            ServiceError: The queue is full.
            EngineDeadError: The engine died.
        """
        rids = [choice.submit.rid for choice in self.choices]
        self.state.admit(rids, self._num_prompt())
        try:
            self._tell_start()
            source = self._one() if len(self.choices) == 1 else self._many()
            async with aclosing(source) as steps:
                async for step in steps:
                    yield step
            self._log_end()
        finally:
            self.state.release(rids)
            self._tell_end()

    async def _one(self) -> AsyncGenerator[list[Step], None]:
        async with aclosing(self._run(self.choices[0])) as steps:
            async for step in steps:
                yield [step]

    async def _many(self) -> AsyncGenerator[list[Step], None]:
        queue: asyncio.Queue[Step | BaseException] = asyncio.Queue()
        tasks = [asyncio.create_task(self._pump(choice, queue)) for choice in self.choices]
        try:
            open_choices = len(tasks)
            while open_choices:
                items = [await queue.get()]
                while not queue.empty():
                    items.append(queue.get_nowait())
                steps = []
                for item in items:
                    if isinstance(item, BaseException):
                        raise item
                    open_choices -= item.is_last
                    steps.append(item)
                yield steps
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    async def _pump(self, choice: Choice, queue: asyncio.Queue[Step | BaseException]) -> None:
        try:
            async with aclosing(self._run(choice)) as steps:
                async for step in steps:
                    queue.put_nowait(step)
        except Exception as error:
            queue.put_nowait(error)

    async def _run(self, choice: Choice) -> AsyncGenerator[Step, None]:
        """Submit one choice. Leaving closes the engine's iterator, which aborts the request if it still runs."""
        deltas = self.state.engine.submit(choice.submit)
        try:
            async for delta in deltas:
                step = choice.accept(delta)
                if self.pace is not None:
                    self.pace.took(choice.index, len(step.ids))
                if step.is_last and choice.route is not None:
                    await choice.judge(self.state.text.grammar)
                yield step
                if step.is_last:
                    return
        finally:
            await close(deltas)

    def _tell_end(self) -> None:
        if self.pace is not None:
            self.pace.tell()
        if self.state.hooks.observers:
            self.state.hooks.observers.ended(
                RequestEnd(
                    request_id=self.request_id,
                    num_prompt_tokens=self._num_prompt(),
                    num_completion_tokens=sum(choice.num_completion for choice in self.choices),
                    finish_reasons=tuple(choice.finish_reason for choice in self.choices),
                    seconds=time.perf_counter() - self.began,
                    num_cached_tokens=sum({c.prompt_index: c.num_cached for c in self.choices}.values()),
                    num_retractions=sum(choice.num_retractions for choice in self.choices),
                )
            )

    def _num_prompt(self) -> int:
        return sum({c.prompt_index: c.num_prompt for c in self.choices}.values())

    def _tell_start(self) -> None:
        if self.state.hooks.observers:
            self.pace = Pace(self.state.hooks.observers, self.request_id, self.began)
            self.state.hooks.observers.started(
                RequestStart(
                    request_id=self.request_id,
                    num_choices=len(self.choices),
                    num_prompt_tokens=self._num_prompt(),
                )
            )
        if self.state.settings.log_requests:
            text = "Request %s: %d prompt tokens, %d choices."
            logger.info(text, self.request_id, self._num_prompt(), len(self.choices))

    def _log_end(self) -> None:
        if self.state.settings.log_requests:
            reasons = ",".join(choice.finish_reason for choice in self.choices)
            num_completion = sum(choice.num_completion for choice in self.choices)
            took = time.perf_counter() - self.began
            logger.info("Request %s: %d tokens in %.3f s, %s.", self.request_id, num_completion, took, reasons)


async def close(iterator: AsyncIterator[Any]) -> None:
    """Close an async iterator where it can be closed."""
    aclose = getattr(iterator, "aclose", None)
    if aclose is not None:
        await aclose()
