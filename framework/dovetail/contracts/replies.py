"""A reply as data: what a request's choices come to, step by step, and the `Writer` that an API makes of it.

A writer gets the contracts' events (`ContentDelta`, `ToolStart`, …) with what belongs to their tokens, and returns
bytes. It decides nothing: who may run, how a stream is resumed and what becomes of an error is the server's.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, NamedTuple, Protocol

import msgspec

from dovetail.contracts.output import Event, TokenizerView
from dovetail.contracts.requests import Ids, Request


class TopLogprob(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """One candidate token."""

    token_id: int
    logprob: float


class TokenLogprob(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """A token's natural-log probability and its most likely rivals, best first."""

    token_id: int
    logprob: float | None
    """None for the first prompt token, which nothing predicts."""
    top: list[TopLogprob]
    named: list[TopLogprob] = []
    """Those of the tokens that the request names, in its order."""


class ReplyTokenizer(TokenizerView, Protocol):
    """The model's tokenizer, for writers."""

    def token_text(self, token_id: int) -> str:
        """Return a token's text; a cut character is U+FFFD."""
        ...


class CallView(Protocol):
    """A tool call: `arguments` is JSON text, as the model wrote it."""

    @property
    def id(self) -> str: ...
    @property
    def name(self) -> str: ...
    @property
    def arguments(self) -> str: ...


class SamplingView(Protocol):
    """What tokens are sampled with: the request's values, or the model's own where it has none."""

    @property
    def temperature(self) -> float: ...
    @property
    def top_p(self) -> float: ...
    @property
    def top_k(self) -> int: ...
    @property
    def min_p(self) -> float: ...
    @property
    def frequency_penalty(self) -> float: ...
    @property
    def presence_penalty(self) -> float: ...
    @property
    def repetition_penalty(self) -> float: ...


class ChoiceView(Protocol):
    """One choice of a reply, as far as it has come. `is_dropped`: only the prompt was to be read; nothing is said."""

    index: int
    prompt_index: int
    request: Request
    prompt: Ids
    num_cached: int
    num_retractions: int
    prompt_logprobs: list[TokenLogprob] | None
    finished_at: float
    is_dropped: bool

    @property
    def rid(self) -> str:
        """Its identifier."""
        ...

    @property
    def first_at(self) -> float:
        """When its first token came, as `time.perf_counter` counts; 0.0 before, as `finished_at` before its end."""
        ...

    @property
    def num_image(self) -> int:
        """Tokens of the prompt that stand for images."""
        ...

    @property
    def max_tokens(self) -> int:
        """Most tokens that it may have."""
        ...

    @property
    def sampling(self) -> SamplingView:
        """See `SamplingView`."""
        ...

    @property
    def num_top(self) -> int:
        """Rivals of each token whose log probabilities are told."""
        ...

    @property
    def num_prompt(self) -> int:
        """Tokens of the prompt."""
        ...

    @property
    def num_completion(self) -> int:
        """Generated tokens that count."""
        ...

    @property
    def num_reasoning(self) -> int:
        """Of them, those of thinking."""
        ...

    @property
    def text(self) -> str:
        """The content so far; "" if there is none."""
        ...

    @property
    def reasoning(self) -> str | None:
        """The reasoning so far; None if there is none."""
        ...

    @property
    def tool_calls(self) -> Sequence[CallView]:
        """The calls so far."""
        ...

    @property
    def token_ids(self) -> list[int]:
        """The generated ids that count."""
        ...

    @property
    def text_offsets(self) -> Sequence[int]:
        """With `Request.tracks_offsets`, for each token the number of characters before it. It grows."""
        ...

    @property
    def finish_reason(self) -> str:
        """`stop`, `length`, `tool_calls` or `abort`; empty while it runs."""
        ...

    @property
    def matched_stop(self) -> int | str | None:
        """The stop token's id or the stop string that ended it."""
        ...

    @property
    def abort_message(self) -> str | None:
        """Why the choice was aborted."""
        ...

    @property
    def structured_output(self) -> dict[str, Any] | None:
        """What came of its grammar, once it has ended: backend, enforcement, ignored, valid and perhaps tools."""
        ...


class StepView(Protocol):
    """What a step brought to one choice."""

    @property
    def choice(self) -> ChoiceView: ...
    @property
    def events(self) -> Sequence[Event]:
        """What became certain of its text."""
        ...

    @property
    def ids(self) -> list[int]:
        """New ids that count."""
        ...

    @property
    def logprobs(self) -> Sequence[TokenLogprob]:
        """A row for each of `ids`; none where they are not asked for."""
        ...

    @property
    def visible(self) -> Sequence[TokenLogprob]:
        """The same without a stop token's, which has no text."""
        ...

    @property
    def is_last(self) -> bool:
        """Set once for each choice."""
        ...


class Tokens(NamedTuple):
    """Tokens of a reply, all choices together; a prompt counts once."""

    prompt: int
    completion: int
    cached: int
    reasoning: int
    image: int = 0


@dataclass(slots=True, kw_only=True)
class Reply:
    """A reply to one HTTP request, or to a line of a batch.

    Attributes:
        id: Its identifier.
        model: The model's name, as the request has it, or the first.
        created: Seconds since 1970.
        began: When it began, as `time.perf_counter` counts.
        fingerprint: Of the server, its model and settings.
        requests: What it answers: one, but for batches of several that want different things.
        choices: In order, those of a prompt together.
        tokenizer: The model's.
        sends_usage: What the operator has streams do where a request does not say: end with the tokens used.
        is_kept: `Writer.whole` will be asked for a stream, too, to store it. The server sets it to False where storing
            failed, and then asks for `close`, or for `whole` again.
    """

    id: str
    model: str
    created: int
    began: float
    fingerprint: str
    requests: Sequence[Request]
    choices: Sequence[ChoiceView]
    tokenizer: ReplyTokenizer
    sends_usage: bool = False
    is_kept: bool = False

    @property
    def tokens(self) -> Tokens:
        """Tokens so far."""
        firsts = {choice.prompt_index: choice for choice in reversed(self.choices)}.values()
        return Tokens(
            prompt=sum(choice.num_prompt for choice in firsts),
            completion=sum(choice.num_completion for choice in self.choices),
            cached=sum(choice.num_cached for choice in firsts),
            reasoning=sum(choice.num_reasoning for choice in self.choices),
            image=sum([choice.num_image for choice in firsts]),
        )


class Failure(NamedTuple):
    """An error as clients receive it: the HTTP status, a kind such as `server_error`, and what there is to say."""

    status: int
    message: str
    kind: str
    param: str | None = None
    code: str | None = None


class Writer(ABC):
    """Writes one reply in the words of an API: as a stream, or whole. Called from one thread at a time."""

    media_type: ClassVar[str] = "text/event-stream"
    """Of a stream; a whole reply is JSON."""

    keep_alive: ClassVar[bytes] = b": keep-alive\n\n"
    """What a stream that has nothing to say sends now and then; empty for nothing."""

    reports_aborts: ClassVar[bool] = False
    """A choice that is given up behind its first token is told as such; else it ends the stream with an error."""

    def __init__(self, reply: Reply) -> None:
        """Begin: nothing has been generated."""
        self.reply = reply

    def open(self) -> bytes:
        """Return what a stream begins with, once the engine has begun."""
        return b""

    @abstractmethod
    def step(self, steps: Sequence[StepView]) -> bytes:
        """Return what a stream says of steps that came together."""

    def close(self) -> bytes:
        """Return what a stream ends with, when all choices have ended."""
        return b""

    def take(self, steps: Sequence[StepView]) -> None:
        """Note the steps of a reply that is sent whole; what their choices hold is there at the end anyway."""
        return

    @abstractmethod
    def whole(self) -> bytes:
        """Return the whole reply, JSON; all choices have ended."""

    def fail(self, failure: Failure) -> bool:
        """Note that a reply has failed of which something has been sent.

        Returns:
            Whether `close` reports it, and `whole` has the failed reply, which is stored. Else the stream ends with
            what `failed` returns, and nothing is stored.
        """
        return False

    @classmethod
    @abstractmethod
    def failed(cls, failure: Failure, request_id: str | None) -> bytes:
        """Return how a stream ends that has begun and cannot go on: on a gateway, nobody has a writer any more.

        Args:
            failure: Why.
            request_id: Of the HTTP request.
        """
