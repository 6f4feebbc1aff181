"""`Choice`: one reply to one prompt, as it comes from the engine; what writers are given of it."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass, field
from time import perf_counter
from typing import Any

from dovetail.contracts.observers import ChoiceTimes
from dovetail.contracts.output import Event, ToolArgs, ToolEnd, ToolStart
from dovetail.contracts.requests import Ids, Request
from dovetail.grammar.pipeline import StructuredOutputs
from dovetail.grammar.spec.diagnostics import explained
from dovetail.grammar.spec.route import GrammarReport, GrammarRoute
from dovetail.messages import SamplerParams, Submit, Times, TokenDelta, TokenLogprob
from dovetail.processing.constraints import outcome_of
from dovetail.processing.image_parts import ImageIds
from dovetail.sdk.formats.output import ToolCall
from dovetail.text.parsing.stream import OutputStream

NOTHING, NO_PROMPT = Request(prompts=[]), Ids(ids=[])
"""Of a choice that generates nothing."""
CALLS = (ToolStart, ToolArgs, ToolEnd)


class ChoiceClock:
    """Where the time of a choice went: what its engine said, fitted into what was seen here.

    The engine's clock is not compared with ours: it tells how long ago things were when it sent a delta, which is taken
    here at once but where its reader is busy.
    """

    __slots__ = ("_begun", "_ended", "first_at")

    def __init__(self) -> None:
        """Nothing was heard yet."""
        self._begun: Times | None = None
        self.first_at = 0.0
        self._ended: Times | None = None

    def take(self, delta: TokenDelta) -> None:
        """Note what a delta with times says."""
        if self._begun is None or self._begun.first_s is None:
            self._begun, self.first_at = delta.times, perf_counter()
        if delta.finish is not None:
            self._ended = delta.times

    def as_times(self, began: float, ended: float) -> ChoiceTimes:
        """Divide the time from `began` to `ended`, as `perf_counter` counts, into its parts."""
        whole, begun = ended - began, self._begun
        grammar_s = None if begun is None else begun.grammar_s
        waited_s = 0.0 if self._ended is None else self._ended.waited_s
        if begun is None or begun.admitted_s is None:
            return ChoiceTimes(queued_s=whole, grammar_s=grammar_s, waited_s=waited_s)
        queued_s = min(whole, max(0.0, self.first_at - began - (begun.total_s - begun.admitted_s)))
        rest = whole - queued_s
        if begun.first_s is None:  # its prompt was all that was asked for, or it ended there
            return ChoiceTimes(queued_s=queued_s, prefill_s=rest, grammar_s=grammar_s, waited_s=waited_s)
        prefill_s = min(rest, begun.first_s - begun.admitted_s)
        rest -= prefill_s
        decode_s = rest
        if self._ended is not None and self._ended.first_s is not None:  # else another engine ended it
            decode_s = min(rest, self._ended.total_s - self._ended.first_s)
        return ChoiceTimes(
            queued_s=queued_s,
            prefill_s=prefill_s,
            decode_s=decode_s,
            delivery_s=rest - decode_s,
            grammar_s=grammar_s,
            waited_s=waited_s,
        )


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

    @property
    def visible(self) -> Sequence[TokenLogprob]:
        """The rows without the stop token's, which has no text."""
        ends = self.is_last and isinstance(self.choice.matched_stop, int)
        return self.logprobs[:-1] if ends else self.logprobs


@dataclass(slots=True, kw_only=True)
class Choice:
    """One engine request: a choice of a prompt, as writers see it. `output` holds its reply so far."""

    index: int
    submit: Submit
    output: OutputStream
    request: Request = NOTHING
    prompt: Ids = NO_PROMPT
    has_one_call: bool = False
    """The request wants the first call only, whatever the model makes."""
    prompt_index: int = 0
    num_cached: int = 0
    num_retractions: int = 0
    prompt_logprobs: list[TokenLogprob] | None = None
    pooled: bytes | None = None
    """What it asked for in place of a text."""
    abort_code: str | None = None
    explanation: str | None = None
    """Set by the engine where the request is at fault."""
    route: GrammarRoute | None = None
    """How its grammar is enforced."""
    grammar_option: int | None = None
    grammar_ignored: tuple[str, ...] = ()
    grammar_report: GrammarReport | None = None
    """Set when it has ended, if it has a grammar."""
    finished_at: float = 0.0
    clock: ChoiceClock = field(default_factory=ChoiceClock)
    is_dropped: bool = False
    """Nobody wants the output: it only had to exist so that the engine looks at the prompt."""

    @property
    def rid(self) -> str:
        """Its identifier."""
        return self.submit.rid

    @property
    def num_image(self) -> int:
        """Tokens of the prompt that stand for images."""
        return sum(span.num for span in self.submit.media) if self.submit.media else 0

    def release_media(self) -> None:
        """Let the files of its images go: no engine needs them any more."""
        if isinstance(self.prompt, ImageIds) and self.prompt.keeper is not None:
            self.prompt.keeper.close()

    @property
    def first_at(self) -> float:
        """When its first token came."""
        return self.clock.first_at

    @property
    def max_tokens(self) -> int:
        """Most tokens that it may have."""
        return self.submit.params.max_tokens

    @property
    def sampling(self) -> SamplerParams:
        """What its tokens are sampled with."""
        return self.submit.params

    @property
    def num_top(self) -> int:
        """Rivals of each token whose log probabilities are told."""
        return self.submit.params.logprobs or 0

    @property
    def num_reasoning(self) -> int:
        """Tokens of thinking."""
        return self.output.reasoning_tokens

    @property
    def text(self) -> str:
        """The content so far."""
        return "" if self.is_dropped else self.output.text

    @property
    def reasoning(self) -> str | None:
        """The reasoning so far."""
        return None if self.is_dropped else self.output.reasoning

    @property
    def tool_calls(self) -> Sequence[ToolCall]:
        """The calls so far."""
        return self.output.tool_calls[:1] if self.has_one_call else self.output.tool_calls

    @property
    def token_ids(self) -> list[int]:
        """The ids so far that count."""
        return [] if self.is_dropped else self.output.token_ids

    @property
    def text_offsets(self) -> Sequence[int]:
        """Characters before each token."""
        return self.output.text_offsets

    @property
    def structured_output(self) -> dict[str, Any] | None:
        """What came of its grammar."""
        return None if self.grammar_report is None else self.grammar_report.as_dict()

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
        if self.explanation is not None:
            return self.explanation
        return None if self.output.finish is None else self.output.finish.message

    def accept(self, delta: TokenDelta) -> Step:
        """Take an engine delta."""
        self.num_cached = delta.cached_tokens
        self.num_retractions = delta.num_retractions
        self.grammar_option, self.grammar_ignored = delta.grammar_option, delta.grammar_ignored
        if delta.prompt_logprobs is not None:
            self.prompt_logprobs = self._with_first_token(delta.prompt_logprobs)
        self.pooled = delta.pooled
        before = self.output.num_tokens
        events = self.output.feed(delta)
        num_new = self.output.num_tokens - before
        is_last = self.output.finish is not None
        if delta.times is not None:
            self.clock.take(delta)
        if delta.finish is not None:
            self.abort_code = delta.finish.code
        if is_last:
            self.finished_at = perf_counter()
        if self.has_one_call:
            events = [event for event in events if not isinstance(event, CALLS) or event.index == 0]
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

    async def set_grammar_report(self, front: StructuredOutputs) -> None:
        """Say what came of its grammar, now that it has ended, or where the cause stands if it was refused."""
        if self.finish_reason == "abort" and (message := self.abort_message) is not None:
            self.explanation = await asyncio.to_thread(explained, self.route, self.abort_code, message)
        if self.route is None or self.grammar_option is None or self.finish_reason == "abort":
            return
        outcome = outcome_of(self.output, self.grammar_option, self.grammar_ignored, is_dropped=self.is_dropped)
        if outcome.ended and self.route.needs_validation(outcome.option, outcome.left_out):
            self.grammar_report = await asyncio.to_thread(front.report, self.route, outcome)
        else:
            self.grammar_report = front.report(self.route, outcome)

    def _with_first_token(self, rows: list[TokenLogprob]) -> list[TokenLogprob]:
        """Add the prompt's first token, which nothing predicts, where the engine left it out."""
        is_whole = self.submit.params.prompt_logprobs_start > 0 or len(rows) >= self.num_prompt
        return rows if is_whole else [TokenLogprob(self.submit.prompt_ids[0], None, []), *rows]
