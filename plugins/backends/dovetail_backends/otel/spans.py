"""Spans of requests, made by an observer of what the server tells it.

    POST /v1/chat/completions        the HTTP request, in the trace of its `traceparent`
    ├ prepare                        reading the body, rendering the prompt, tokenizing it
    └ chat MODEL                     the generation, with the attributes of the GenAI conventions
      ├ queue, grammar, prefill      of each choice
      ├ decode, delivery
      └ parsing                      drawn in one piece: its parts are spread over the reply

A line of a batch is a trace of its own. Attributes: https://opentelemetry.io/docs/specs/semconv/gen-ai/ and `…/http/`;
`gen_ai.latency.*` are those that vLLM writes.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator
from dataclasses import dataclass
from importlib.metadata import version
from typing import TypeVar

from opentelemetry.context import Context
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.trace import NonRecordingSpan, Span, SpanKind, Status, StatusCode, set_span_in_context
from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

from dovetail.contracts import ChoiceTimes, HttpEnd, HttpStart, RequestEnd, RequestObserver, RequestStart

MAX_OPEN = 20_000
"""Requests that are remembered; an end that never comes, because it was lost, must not be waited for."""
MAX_CHOICES = 16
"""Choices of one request whose parts are drawn."""
MIN_DELIVERY_S = 0.001
QUIET = frozenset({"GET", "HEAD", "OPTIONS"})
"""Methods of probes and scrapes: drawn only in a trace that somebody else began."""
REQUEST = {"max_tokens", "temperature", "top_p", "top_k", "frequency_penalty", "presence_penalty", "seed"}
"""Parameters that the conventions have a name for."""
SERVER_ERROR = 500
Value = TypeVar("Value")


@dataclass(frozen=True, slots=True)
class Http:
    """An HTTP request that has begun. `span` is what its generations hang below, ended or not."""

    span: Span
    at: float
    is_traced: bool


@dataclass(frozen=True, slots=True)
class RequestSpan:
    """A part of a request: when it began, in seconds since 1970, and how long it took."""

    name: str
    at: float
    seconds: float
    attributes: dict[str, bool | int | float]


class Tracer(RequestObserver):
    """Draws spans, in the thread in which it is told. All times come from the server, none is taken here."""

    def __init__(self, provider: TracerProvider) -> None:
        """Draw into a provider."""
        self._tracer = provider.get_tracer("dovetail", version("dovetail-llm"))
        self._propagator = TraceContextTextMapPropagator()
        self._http: OrderedDict[int, Http] = OrderedDict()
        self._open: OrderedDict[int, tuple[Span, RequestStart]] = OrderedDict()

    def http_started(self, request: HttpStart) -> None:
        """Begin the span of an HTTP request."""
        parent = self._propagator.extract(request.trace, context=Context())
        span = self._tracer.start_span(
            "HTTP",
            context=parent,
            kind=SpanKind.SERVER,
            start_time=_ns(request.at),
            attributes={"dovetail.request_id": request.request_id},
        )
        _keep(self._http, request.number, Http(span, request.at, "traceparent" in request.trace))

    def http_ended(self, request: HttpEnd) -> None:
        """End it, unless it is a probe's. What it submitted may go on."""
        http = self._http.get(request.number)
        if http is None:
            return
        if request.method in QUIET and not http.is_traced:
            del self._http[request.number]
            return
        span = http.span
        span.update_name(f"{request.method} {request.route}".strip())
        span.set_attribute("http.request.method", request.method)
        if request.route:
            span.set_attribute("http.route", request.route)
        if request.status is None:
            span.set_attribute("error.type", "client_left")
        else:
            span.set_attribute("http.response.status_code", request.status)
        if request.status is not None and request.status >= SERVER_ERROR:
            span.set_attribute("error.type", str(request.status))
            span.set_status(Status(StatusCode.ERROR))
        span.end(_ns(http.at + request.seconds))
        self._http[request.number] = Http(NonRecordingSpan(span.get_span_context()), http.at, http.is_traced)

    def request_started(self, request: RequestStart) -> None:
        """Begin the span of a generation."""
        http = self._http.get(request.http)
        attributes: dict[str, str | int | float] = {
            "gen_ai.operation.name": request.operation,
            "gen_ai.provider.name": "dovetail",
            "gen_ai.request.model": request.model,
            "gen_ai.response.model": request.model,
            "gen_ai.response.id": request.request_id,
        }
        for name, value in request.params.items():
            attributes[f"{'gen_ai' if name in REQUEST else 'dovetail'}.request.{name}"] = value
        if request.num_choices > 1:
            attributes["gen_ai.request.choice.count"] = request.num_choices
        if request.batch_id:
            attributes["dovetail.batch_id"] = request.batch_id
        span = self._tracer.start_span(
            f"{request.operation} {request.model}",
            context=Context() if http is None else set_span_in_context(http.span, Context()),
            kind=SpanKind.INTERNAL if http is not None else SpanKind.SERVER,
            start_time=_ns(request.at),
            attributes=attributes,
        )
        _keep(self._open, request.number, (span, request))

    def request_ended(self, request: RequestEnd) -> None:
        """End it, with its parts."""
        span, start = self._open.pop(request.number, (None, None))
        if span is None or start is None:
            return
        http = self._http.get(start.http)
        if http is not None and span.is_recording():
            before_s = request.body_s + request.prepare_s
            piece = RequestSpan("prepare", start.at - before_s, before_s, {"dovetail.body_seconds": request.body_s})
            self._draw(set_span_in_context(http.span, Context()), piece)
        below = set_span_in_context(span, Context())
        if span.is_recording():
            for piece in _pieces(start, request):
                self._draw(below, piece)
        self._describe(span, request)
        span.end(_ns(start.at + request.seconds))

    def _draw(self, parent: Context, piece: RequestSpan) -> None:
        span = self._tracer.start_span(
            piece.name, context=parent, start_time=_ns(piece.at), attributes=piece.attributes
        )
        span.end(_ns(piece.at + piece.seconds))

    def _describe(self, span: Span, request: RequestEnd) -> None:
        span.set_attributes(
            {
                "gen_ai.usage.input_tokens": request.num_prompt_tokens,
                "gen_ai.usage.output_tokens": request.num_completion_tokens,
                "gen_ai.usage.cache_read.input_tokens": request.num_cached_tokens,
                "gen_ai.response.finish_reasons": [reason for reason in request.finish_reasons[:MAX_CHOICES] if reason],
                "gen_ai.latency.e2e": request.seconds,
                "dovetail.retractions": request.num_retractions,
            }
        )
        if request.choices:
            first = min(request.choices, key=_to_first)
            span.set_attribute("gen_ai.latency.time_in_queue", first.queued_s)
            if first.prefill_s is not None:
                span.set_attribute("gen_ai.latency.time_in_model_prefill", first.prefill_s)
                span.set_attribute("gen_ai.latency.time_to_first_token", first.queued_s + first.prefill_s)
                span.set_attribute("gen_ai.latency.time_in_model_decode", max(c.decode_s for c in request.choices))
        if "abort" in request.finish_reasons:
            span.set_attribute("error.type", "abort")
            span.set_status(Status(StatusCode.ERROR))
        elif "" in request.finish_reasons:
            span.set_attribute("error.type", "cut_off")


def _pieces(start: RequestStart, end: RequestEnd) -> Iterator[RequestSpan]:
    """What a generation is made of, one choice after the other."""
    for index, choice in enumerate(end.choices[:MAX_CHOICES]):
        which: dict[str, bool | int | float] = {"dovetail.choice": index}
        at = start.at
        yield RequestSpan("queue", at, choice.queued_s, {**which, "dovetail.waited_again_seconds": choice.waited_s})
        if choice.grammar_s is not None:
            yield RequestSpan("grammar", at, choice.grammar_s, which)
        at += choice.queued_s
        if choice.prefill_s is None:
            continue
        yield RequestSpan("prefill", at, choice.prefill_s, which)
        at += choice.prefill_s
        if choice.decode_s:
            yield RequestSpan("decode", at, choice.decode_s, which)
        if choice.delivery_s > MIN_DELIVERY_S:
            yield RequestSpan("delivery", at + choice.decode_s, choice.delivery_s, which)
    if end.parse_s and end.choices:
        first = min(_to_first(choice) for choice in end.choices)
        yield RequestSpan("parsing", start.at + first, end.parse_s, {"dovetail.summed": True})


def _to_first(choice: ChoiceTimes) -> float:
    return choice.queued_s + (choice.prefill_s or 0.0)


def _keep(known: OrderedDict[int, Value], number: int, value: Value) -> None:
    known[number] = value
    if len(known) > MAX_OPEN:
        known.popitem(last=False)


def _ns(at: float) -> int:
    return int(at * 1e9)
