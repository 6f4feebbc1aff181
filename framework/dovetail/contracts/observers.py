"""What hook plugins return to be told about requests, load and cache: `RequestObserver`, `StatLogger`, `CacheObserver`.

All are called in the `api` process, never per token, in a thread that each object has of its own: one call at a time,
in the order in which things happened, a few hundredths of a second later. So they may block, but not `await`: a method
that is `async def` is refused. Of an object that falls 10,000 events behind, what comes then is lost, which it is told.
One that raises five times in a row is removed, which the log and `GET /health` say. The server's own `GET /metrics` is
made of these two and of nothing else. Importing this takes no torch.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field


@dataclass(frozen=True, slots=True, kw_only=True)
class HttpStart:
    """The headers of an HTTP request have come. Told to observers that override `http_started` only.

    Attributes:
        number: What to tell it from others by; the server never uses one again.
        request_id: What its reply will carry as `x-request-id`.
        at: When, in seconds since 1970.
        trace: Its headers that carry a trace on, by lower-case name: `traceparent`, `tracestate`, `baggage`.
    """

    number: int
    request_id: str
    at: float
    trace: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class RequestStart:
    """A generation request was admitted.

    Attributes:
        request_id: Its identifier. Its caller may have chosen it, and two callers may choose one: it is a label.
        num_choices: Engine requests that it is made of.
        num_prompt_tokens: Of all its prompts.
        number: What to tell it from others by; the server never uses one again.
        at: When, in seconds since 1970.
        http: The `HttpStart.number` of the HTTP request that it came by; 0 for a line of a batch.
        batch_id: Of the batch that it is a line of; else "".
        operation: `chat`, `text_completion` or `embeddings`.
        model: The first served name.
        params: How it is sampled, as far as its caller or the model says so: `temperature`, `top_p`, `max_tokens`, ….
    """

    request_id: str
    num_choices: int
    num_prompt_tokens: int
    number: int = 0
    at: float = 0.0
    http: int = 0
    batch_id: str = ""
    operation: str = "text_completion"
    model: str = ""
    params: Mapping[str, float | int] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class RequestProgress:
    """Tokens have come: the first of a request, or what came in about a second since it was last told of.

    Attributes:
        request_id: As in `RequestStart`.
        num_tokens: Generated tokens of all choices since the last time.
        first_token_s: From submission to the first token; given once, with the first progress.
        gaps_s: One entry per token but each choice's first: the time since the one before. Do not keep it.
        number: As in `RequestStart`.
    """

    request_id: str
    num_tokens: int
    first_token_s: float | None
    gaps_s: Sequence[float]
    number: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class ChoiceTimes:
    """Where the time of one choice went, in seconds from its request's submission on: one part after the other.

    Attributes:
        queued_s: Until it was first computed; all there was where that never came.
        prefill_s: From there to its first token; None where that never came.
        decode_s: From there to its last token.
        delivery_s: Delay because the client read its tokens slowly.
        grammar_s: Until its grammar was compiled, beside the queue and the prompt; None without one.
        waited_s: Of all this, waiting again after it had to give its pages up.
    """

    queued_s: float
    prefill_s: float | None = None
    decode_s: float = 0.0
    delivery_s: float = 0.0
    grammar_s: float | None = None
    waited_s: float = 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class RequestEnd:
    """A request finished, for any reason.

    Attributes:
        request_id: As in `RequestStart`.
        num_prompt_tokens: As in `RequestStart`.
        num_completion_tokens: Generated tokens that count, of all choices.
        finish_reasons: One per choice; "" for a choice that was cut off (the client left, or an error).
        seconds: From submission to the end.
        num_cached_tokens: Of the prompts' tokens, those that the prefix cache held.
        num_retractions: How often choices gave their pages up and waited again.
        number: As in `RequestStart`.
        body_s: Before the submission, waiting for the HTTP request's body to come.
        prepare_s: Before the submission, all else: reading the body, rendering the prompt, tokenizing it.
        parse_s: Of `seconds`, what detokenizing and parsing the reply took.
        choices: Where their time went, one per choice.
    """

    request_id: str
    num_prompt_tokens: int
    num_completion_tokens: int
    finish_reasons: tuple[str, ...]
    seconds: float
    num_cached_tokens: int = 0
    num_retractions: int = 0
    number: int = 0
    body_s: float = 0.0
    prepare_s: float = 0.0
    parse_s: float = 0.0
    choices: tuple[ChoiceTimes, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class HttpEnd:
    """An HTTP request finished.

    Attributes:
        request_id: What its reply carries as `x-request-id`.
        method: "GET", "POST", …; "other" for what no route takes.
        route: The route's path with its parameters as in the OpenAPI document; "" where there is none.
        status: Of the reply; None where the client left before one began.
        seconds: From its headers to the end of the reply.
        number: As in `HttpStart`.
    """

    request_id: str
    method: str
    route: str
    status: int | None
    seconds: float
    number: int = 0


class RequestObserver:
    """Is told when requests begin, go on and end. Override what you need; new methods arrive with defaults."""

    def http_started(self, request: HttpStart) -> None:
        """An HTTP request begins, of any route; what it submits is told after this, and may end after its reply."""

    def request_started(self, request: RequestStart) -> None:
        """A request was admitted."""

    def request_progressed(self, request: RequestProgress) -> None:
        """Its first token came, or about a second has passed with new ones; the rest comes before `request_ended`."""

    def request_ended(self, request: RequestEnd) -> None:
        """A request finished; called once for each `request_started`, unless events were lost."""

    def http_ended(self, request: HttpEnd) -> None:
        """An HTTP request finished, of any route, rejected ones included."""

    def events_lost(self, num_events: int) -> None:
        """Events were dropped, because this observer was too slow; later ones were not."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadStats:
    """The engine's load at one moment. Tokens unless it says otherwise; `gen_throughput` in tokens per second.

    Of the `num_drafted_tokens` that a speculator guessed and steps verified since the engine started,
    `num_accepted_tokens` were right. `device_used_bytes` of `device_total_bytes` are in use on the first rank's GPU, by
    whatever process; both are 0 where the model runs on the CPU. The vision tower has encoded `num_encoded_images`.
    """

    step: int
    num_running: int
    num_queued: int
    num_used_tokens: int
    num_cached_tokens: int
    max_total_tokens: int
    gen_throughput: float
    num_drafted_tokens: int = 0
    num_accepted_tokens: int = 0
    device_used_bytes: int = 0
    device_total_bytes: int = 0
    num_encoded_images: int = 0


class StatLogger(ABC):
    """Is given the engine's load every `interval_s` seconds."""

    interval_s: float = 10.0

    @abstractmethod
    def log(self, stats: LoadStats) -> None:
        """Take one snapshot. While this takes longer than the interval, no further ones are made."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CacheEvent:
    """Pages that the prefix cache has from now on, or has no more. A page is a number that is used again later.

    Attributes:
        pages: In the order of their tokens.
        token_ids: What they hold, equally many tokens each; None where they are gone. Negative numbers stand for tokens
            of images: equal ones for equal images at equal offsets, in one run of an engine.
        parent: The page before the first; None where they begin a prompt.
        cache_salt: Prefixes of different salts never share a page; "" for none.
    """

    pages: list[int]
    token_ids: list[int] | None = None
    parent: int | None = None
    cache_salt: str = ""


class CacheObserver:
    """Is told what the prefix cache holds. Where there is one, engines report it after each step that changed it."""

    def cache_changed(self, events: Sequence[CacheEvent]) -> None:
        """Pages came and went, in this order."""

    def cache_cleared(self, num_restarts: int) -> None:
        """An engine has begun, whose cache is empty: nothing that was said before holds."""

    def events_lost(self, num_events: int) -> None:
        """Calls were dropped, because this observer was too slow: its view of the cache is wrong."""
