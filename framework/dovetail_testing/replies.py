"""Replies without an engine: what a server would give a writer of an API, cut into steps at any places."""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from itertools import cycle
from typing import Any

from dovetail.contracts.output import ContentDelta, Event, ReasoningDelta, ToolArgs, ToolEnd, ToolStart
from dovetail.contracts.replies import Reply, TokenLogprob, TopLogprob
from dovetail.contracts.requests import Ids, Request
from dovetail.messages import SamplerParams
from dovetail_testing.parsers import BytesTokenizer

BEGAN = 1000.0
WORDS = ("Sun", "day", " is", ' a "quoted"', "\nline", " 🜁", "\\", "é", " {}", " end")


class ReplyBytes(BytesTokenizer):
    """A tokenizer of bytes that names tokens, too."""

    def token_text(self, token_id: int) -> str:
        """Return a token's text; a cut character is U+FFFD."""
        return self.token_bytes(token_id).decode(errors="replace")


@dataclass(slots=True)
class ReplyCall:
    """A tool call as far as it has come."""

    id: str
    name: str
    arguments: str = ""


@dataclass(kw_only=True)
class FakeChoice:
    """A choice that follows a script: see `ChoiceView`."""

    index: int
    request: Request
    prompt_index: int = 0
    prompt: Ids = field(default_factory=lambda: Ids(ids=[1, 2, 3], tail=""))
    num_cached: int = 1
    num_retractions: int = 0
    prompt_logprobs: list[TokenLogprob] | None = None
    first_at: float = 0.0
    finished_at: float = 0.0
    is_dropped: bool = False
    max_tokens: int = 100
    rid: str = "reply-1"
    text: str = ""
    reasoning: str | None = None
    finish_reason: str = ""
    matched_stop: int | str | None = None
    abort_message: str | None = None
    structured_output: dict[str, Any] | None = None
    num_reasoning: int = 0
    num_image: int = 0
    token_ids: list[int] = field(default_factory=list)
    text_offsets: list[int] = field(default_factory=list)
    tool_calls: list[ReplyCall] = field(default_factory=list)

    @property
    def sampling(self) -> SamplerParams:
        """What its tokens are sampled with."""
        return SamplerParams(max_tokens=self.max_tokens)

    @property
    def num_top(self) -> int:
        """Rivals of each token."""
        return self.request.logprobs or 0

    @property
    def num_prompt(self) -> int:
        """Tokens of the prompt."""
        return len(self.prompt.ids)

    @property
    def num_completion(self) -> int:
        """Tokens so far."""
        return len(self.token_ids)

    def take(self, event: Event | None, row: TokenLogprob) -> None:
        """Go on by a token, and by what became certain with it."""
        self.token_ids.append(row.token_id)
        self.text_offsets.append(len(self.text))
        match event:
            case ContentDelta():
                self.text += event.text
            case ReasoningDelta():
                self.reasoning = (self.reasoning or "") + event.text
                self.num_reasoning += event.num_tokens
            case ToolStart():
                self.tool_calls.append(ReplyCall(event.id, event.name))
            case ToolArgs():
                self.tool_calls[event.index].arguments += event.json


@dataclass(slots=True, kw_only=True)
class FakeStep:
    """What a step brought to a choice: see `StepView`."""

    choice: FakeChoice
    events: list[Event]
    ids: list[int]
    logprobs: list[TokenLogprob]
    is_last: bool

    @property
    def visible(self) -> Sequence[TokenLogprob]:
        """All rows: no stop token ends a script."""
        return self.logprobs


Tick = tuple[Event | None, TokenLogprob]


def script(choice: FakeChoice, seed: int) -> list[Tick]:
    """Make up what a choice says, token by token: thinking, content and, where there are tools, calls."""
    if choice.is_dropped:
        return []
    rng, tools = random.Random(seed + choice.index), choice.request.tools
    events: list[Event | None] = [ReasoningDelta(rng.choice(WORDS), 1) for _ in range(rng.randrange(4))]
    events += [ContentDelta(rng.choice(WORDS)) for _ in range(rng.randrange(1, 8))]
    for at in range(rng.randrange(3) if tools is not None and tools.tools else 0):
        events += [ToolStart(at, f"call_{at}", "f"), ToolArgs(at, '{"a": '), ToolArgs(at, '"\\u00e9"}'), ToolEnd(at)]
    for _ in range(rng.randrange(3)):
        events.insert(rng.randrange(len(events) + 1), None)  # a token whose text is not certain yet
    return [(event, _row(rng, choice.num_top)) for event in events]


def _row(rng: random.Random, num_top: int) -> TokenLogprob:
    top = [TopLogprob(rng.randrange(128), -rng.random()) for _ in range(max(0, num_top))]
    return TokenLogprob(rng.randrange(128), -rng.random(), top)


def reply_of(requests: Sequence[Request]) -> Reply:
    """Return a reply in which nothing has been said."""
    choices: list[FakeChoice] = []
    num_prompts = 0
    for request in requests:
        for _ in request.prompts:
            for _ in range(request.candidates or request.n):
                dropped = request.limit == 0
                choices.append(
                    FakeChoice(index=len(choices), request=request, prompt_index=num_prompts, is_dropped=dropped)
                )
            num_prompts += 1
    return Reply(
        id="reply-1",
        model=requests[0].model or "model",
        created=1_700_000_000,
        began=BEGAN,
        fingerprint="fp",
        requests=requests,
        choices=choices,
        tokenizer=ReplyBytes(),
    )


def play(reply: Reply, seed: int, sizes: Sequence[int], *, merges: bool = False) -> Iterator[list[FakeStep]]:
    """Yield a script's steps as a server gives them to a writer: choices have gone on before it sees the steps.

    Args:
        reply: As `reply_of` made it.
        seed: Of the script.
        sizes: Tokens of each choice in a group, from group to group, again and again.
        merges: The tokens of a group are one step of the choice; else each is a step.
    """
    choices = [choice for choice in reply.choices if isinstance(choice, FakeChoice)]
    left = {at: script(choice, seed) for at, choice in enumerate(choices)}
    for size in cycle(sizes):
        group: list[FakeStep] = []
        for _ in range(1 if merges else size):
            for at in list(left):
                num = size if merges else 1
                ticks, left[at] = left[at][:num], left[at][num:]
                group.append(_step(choices[at], ticks, is_last=not left[at]))
                if not left[at]:
                    del left[at]
        yield group
        if not left:
            return


def _step(choice: FakeChoice, ticks: Sequence[Tick], *, is_last: bool) -> FakeStep:
    for event, row in ticks:
        choice.take(event, row)
    if is_last:
        choice.first_at, choice.finished_at = choice.first_at or BEGAN + 0.25, BEGAN + 1.5
        choice.finish_reason = "tool_calls" if choice.tool_calls else ("stop", "length")[choice.num_completion % 2]
    rows = [row for _, row in ticks] if choice.request.logprobs is not None else []
    events = [event for event, _ in ticks if event is not None]
    return FakeStep(
        choice=choice, events=events, ids=[row.token_id for _, row in ticks], logprobs=rows, is_last=is_last
    )
