"""`/v1/responses`: from a request to the chat job that answers it, and its events."""

from __future__ import annotations

import logging
import time
from collections.abc import AsyncGenerator, Iterable, Iterator, Sequence
from contextlib import aclosing
from dataclasses import dataclass
from itertools import chain
from typing import TYPE_CHECKING, Literal

import msgspec
from msgspec.structs import replace

from dovetail.contracts.requests import Request
from dovetail.processing.input import Preparation
from dovetail_server import errors
from dovetail_server.apis.responses import objects as ro
from dovetail_server.apis.responses import translate
from dovetail_server.apis.responses.builder import OutputBuilder
from dovetail_server.apis.responses.items import Item, messages_of
from dovetail_server.apis.responses.references import Answer, items_before, items_of
from dovetail_server.apis.responses.schema import (
    CompactRequest,
    InputTokensRequest,
    ResponsesRequest,
)
from dovetail_server.apis.responses.usage import response_usage
from dovetail_server.schema.reports import report_field
from dovetail_server.serving.choice import Choice
from dovetail_server.serving.common import check_not_aborted
from dovetail_server.serving.generation import Generation
from dovetail_server.serving.job import make_generation
from dovetail_server.serving.sse import Chunks

if TYPE_CHECKING:
    from dovetail.processing.processor import Processor
    from dovetail_server.apis.responses.keeper import ResponseRecorder
    from dovetail_server.serving.context import ServingContext

logger = logging.getLogger("dovetail.server")
encoder = msgspec.json.Encoder()
encode = encoder.encode
Events = AsyncGenerator[Sequence[ro.StreamEvent], None]
ENDS: dict[str, type[ro.LifeEvent]] = {
    "completed": ro.Completed,
    "incomplete": ro.Incomplete,
    "failed": ro.Failed,
    "cancelled": ro.Failed,
}


@dataclass(slots=True, kw_only=True)
class ResponsesJob:
    """A prepared request.

    Attributes:
        generation: What generates.
        model: The name that the reply carries.
        head: The response before it began.
        items: The request's own input as it is stored, JSON.
        keeper: Keeps the response when it has ended, or None.
    """

    request: ResponsesRequest
    generation: Generation
    model: str
    head: ro.ResponseObject
    items: bytes
    keeper: ResponseRecorder | None = None

    @property
    def choice(self) -> Choice:
        """The only choice."""
        return self.generation.choices[0]

    def builder(self) -> OutputBuilder:
        """Make what writes the output."""
        state = self.generation.state
        return OutputBuilder(
            response_id=self.head.id,
            tokenizer=state.text.tokenizer,
            summarises=translate.summary_of(self.request) is not None,
            encrypts=translate.ENCRYPTED in (self.request.include or ()),
            num_top=self.choice.num_top if translate.wants_logprobs(self.request) else None,
        )


def written_down(items: Iterable[Item], rows: bytearray) -> Iterator[Item]:
    """Pass items on, and add each to a list of JSON: as such they take a third of the memory."""
    rows += b"["
    for at, item in enumerate(items):
        if at:
            rows += b","
        encoder.encode_into(item, rows, -1)
        yield item
    rows += b"]"


def joined(rows: list[bytes]) -> bytes:
    """Return rows of JSON as one list."""
    return b"[" + b",".join(rows) + b"]"


@dataclass(frozen=True, slots=True)
class ReadItems:
    """What was read of a body with items: a request whose prompt is token ids, or none, and items to keep, JSON."""

    request: Request | None
    items: bytes


def read_prompt(text: Processor, body: ResponsesRequest, response_id: str, found: Answer) -> ReadItems:
    """Check, translate, render and tokenize a conversation; CPU work.

    Args:
        text: Tokenizer, template and parsers.
        body: Checked by its schema.
        response_id: The response's.
        found: What it refers to.

    Raises:
        RequestError: The request cannot be served as it is.
    """
    translate.check(body)
    rows = bytearray()
    own = written_down(items_of(body.input, response_id, found), rows)
    messages = messages_of(chain(items_before(found), own), body.instructions)
    request = Preparation(text, translate.to_request(body, messages)).rendered()
    return ReadItems(request, bytes(rows))


def count(text: Processor, body: InputTokensRequest, response_id: str, found: Answer) -> bytes:
    """Count the tokens of a response's prompt, nothing left out, and return the reply; CPU work.

    Args:
        text: See `read_prompt`.
        body: See `read_prompt`.
        response_id: See `read_prompt`.
        found: See `read_prompt`.

    Raises:
        RequestError: The prompt cannot be made, or is too big to look at.
    """
    asked = as_response(body)
    translate.check(asked)
    items = chain(items_before(found), items_of(asked.input, response_id, found))
    request = translate.to_request(asked, messages_of(items, asked.instructions))
    return encode(ro.InputTokens(input_tokens=Preparation(text, request).count()))


def as_response(request: InputTokensRequest | CompactRequest) -> ResponsesRequest:
    """Return the request that would be answered; all of it has been validated, which takes time."""
    fields = {name: getattr(request, name) for name in request.model_fields_set}
    return ResponsesRequest.model_construct(**fields, store=False)


def prepare(
    state: ServingContext,
    body: ResponsesRequest,
    model: str,
    *,
    response_id: str,
    read: ReadItems,
    keeper: ResponseRecorder | None = None,
) -> ResponsesJob:
    """Put a job together.

    Args:
        state: The server's.
        body: Checked by its schema and `translate.check`; its input is not looked at any more.
        model: The name that the reply carries.
        response_id: The response's.
        read: Of `read_prompt`.
        keeper: See `ResponsesJob`.

    Raises:
        RequestError: The request cannot be served as it is.
    """
    if read.request is None:
        raise ValueError("a response needs a request")
    request = replace(read.request, priority=body.priority or 0)  # a line of a batch has another than it says
    generation = make_generation(state, [request], response_id, "", is_rendered=True)
    head = translate.echo(body, response_id, model, generation.choices[0].submit.params, stores=keeper is not None)
    return ResponsesJob(request=body, generation=generation, model=model, head=head, items=read.items, keeper=keeper)


async def events(job: ResponsesJob, *, whole: bool = False) -> Events:
    """Run and yield what a stream tells, that of one engine step together; the last event has the whole response.

    Args:
        job: What to run.
        whole: Only the last event is wanted.

    Raises:
        RequestError: Somebody aborted it.
        ServiceError: The queue is full, or the engine gave it up.
    """
    builder = job.builder()
    source = job.generation.steps(whole=whole)
    is_first = True
    async with aclosing(source) as batches:
        async for steps in batches:
            told = opening(job) if is_first else []
            is_first = False
            for step in steps:
                if step.is_last:
                    check_not_aborted(job.choice)
                told += builder.take(step.events, step.visible)
            if told:
                yield told
    is_cut = job.choice.finish_reason == "length"
    yield [*builder.finish("incomplete" if is_cut else "completed"), await ending(job, builder, is_cut=is_cut)]


def opening(job: ResponsesJob) -> list[ro.StreamEvent]:
    """Return the first events."""
    told: list[ro.StreamEvent] = [ro.Created(response=job.head)]
    if job.head.status == "queued":
        told.append(ro.Queued(response=job.head))
    return [*told, ro.LifeEvent(response=replace(job.head, status="in_progress"))]


async def ending(job: ResponsesJob, builder: OutputBuilder, *, is_cut: bool) -> ro.StreamEvent:
    """Put the response together, keep it, and return the last event."""
    response = replace(
        job.head,
        status="incomplete" if is_cut else "completed",
        completed_at=None if is_cut else int(time.time()),
        incomplete_details=ro.IncompleteDetails("max_output_tokens") if is_cut else None,
        output=builder.items,
        usage=response_usage(job.choice),
        structured_output=report_field(job.choice, "parameters"),
    )
    return ENDS[response.status](response=await kept(job, response))


async def kept(job: ResponsesJob, response: ro.ResponseObject) -> ro.ResponseObject:
    """Keep a response that has ended; one that cannot be kept is given out all the same, and says `store: false`."""
    if job.keeper is None:
        return response
    try:
        await job.keeper.finish(response, job.items)
    except errors.ServiceError as error:
        logger.warning("Response %s could not be stored: %s", response.id, error)
        return replace(response, store=False)
    return response


async def reply(job: ResponsesJob) -> bytes:
    """Run to the end and return the response."""
    last: ro.StreamEvent | None = None
    async with aclosing(events(job, whole=True)) as told:
        async for batch in told:
            last = batch[-1]
    if not isinstance(last, ro.LifeEvent):
        raise RuntimeError("a response ended without its last event")
    return encode(last.response)


async def stream(job: ResponsesJob) -> Chunks:
    """Yield the stream's events. What goes wrong after the first is told by `response.failed`."""
    number = 0
    source = guarded(job)
    try:
        async for batch in source:
            yield b"".join([written(event, number + at) for at, event in enumerate(batch)])
            number += len(batch)
    finally:
        await source.aclose()


def final_error_event(error: Exception) -> bytes:
    """Return how a stream ends after an error before its first event, where the status is gone already."""
    _, detail, _ = errors.describe(error)
    return written(ro.ErrorEvent(code=detail.code, message=detail.message, param=detail.param), 0)


async def guarded(job: ResponsesJob) -> Events:
    """Pass events on; an error after the first becomes the last event."""
    started = False
    source = events(job)
    try:
        async for batch in source:
            started = True
            yield batch
    except Exception as error:
        if not started:
            raise
        yield [await failing(job, error)]
    finally:
        await source.aclose()


async def failing(job: ResponsesJob, error: Exception) -> ro.StreamEvent:
    """Return the event of a response that failed, after keeping it."""
    status, detail, _ = errors.describe(error)
    found = ro.ResponseError(code=error_code(status, detail.code), message=detail.message)
    response = replace(job.head, status="failed", error=found, usage=response_usage(job.choice))
    return ro.Failed(response=await kept(job, response))


def error_code(status: int, code: str | None) -> Literal["server_error", "rate_limit_exceeded", "invalid_prompt"]:
    """Return OpenAI's word for an error of this HTTP status and code."""
    if status == 429:
        return "rate_limit_exceeded"
    return "server_error" if status >= 500 or code == "request_aborted" else "invalid_prompt"


def written(event: ro.StreamEvent, number: int) -> bytes:
    """Return an event as it is sent."""
    event.sequence_number = number
    kind = event.__struct_config__.tag
    return b"event: %b\ndata: %b\n\n" % (str(kind).encode(), encode(event))
