"""`/v1/messages`: from a request to the chat job that answers it, its reply, and its stream."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Callable, Sequence
from contextlib import aclosing
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeVar

import msgspec

from dovetail.errors import RequestError
from dovetail_server import errors
from dovetail_server.anthropic import translate
from dovetail_server.anthropic.blocks import BlockBuilder
from dovetail_server.anthropic.errors import error_body, status_of
from dovetail_server.anthropic.schema import (
    CountTokensRequest,
    DeltaUsage,
    MessageReply,
    MessagesRequest,
    MessageUsage,
    StopReason,
    ThinkingTokens,
    TokenCount,
)
from dovetail_server.openai.chat import ChatRequest
from dovetail_server.serving import chat
from dovetail_server.serving.common import check_not_aborted, report_field, usage_of
from dovetail_server.serving.generation import Choice
from dovetail_server.serving.prompts import Prompts
from dovetail_server.serving.sse import Chunks
from dovetail_server.serving.translate import OVERFLOW, chat_request, fields_named, prompt_tokens
from dovetail_server.storage.paths import new_id

if TYPE_CHECKING:
    from dovetail.processing.processor import Processor
    from dovetail_server.serving.context import ServingContext

T = TypeVar("T")
U = TypeVar("U", bound=DeltaUsage)
encode = msgspec.json.Encoder().encode


@dataclass(slots=True, kw_only=True)
class MessagesJob:
    """A prepared request.

    Attributes:
        message_id: The reply's.
        chat: The job that generates.
        is_clamped: The context ends before `max_tokens`.
        omits: The thinking is sent in its signature only.
    """

    message_id: str
    chat: chat.ChatJob
    is_clamped: bool
    omits: bool

    @property
    def choice(self) -> Choice:
        """The only choice."""
        return self.chat.generation.choices[0]

    def usage(self, kind: type[U]) -> U:
        """Return the tokens so far."""
        usage = usage_of([self.choice])
        cached = usage.prompt_tokens_details.cached_tokens
        return kind(
            input_tokens=usage.prompt_tokens - cached,
            cache_read_input_tokens=cached,
            output_tokens=usage.completion_tokens,
            output_tokens_details=ThinkingTokens(usage.reasoning_tokens),
        )

    def ending(self) -> tuple[StopReason, str | None]:
        """Return why it ended, and at which stop sequence."""
        reason, matched = self.choice.finish_reason, self.choice.matched_stop
        if isinstance(matched, str):
            return "stop_sequence", matched
        if reason == "length":
            return "model_context_window_exceeded" if self.is_clamped else "max_tokens", None
        return "tool_use" if reason == "tool_calls" else "end_turn", None


def read_prompt(text: Processor, request: MessagesRequest) -> Prompts:
    """Check, translate, render and tokenize a conversation.

    Raises:
        RequestError: The request cannot be served as it is.
    """
    translate.check_generation(request)
    return _clamped(text, request, new_id("msg_"), lambda asked: chat.read_prompt(text, asked))[0]


def _clamped(
    text: Processor, request: MessagesRequest, message_id: str, use: Callable[[ChatRequest], T]
) -> tuple[T, bool]:
    """Use the chat request that gives a message; where the context ends before `max_tokens`, one up to its end.

    Returns:
        What `use` made of it, and whether the context ends before.
    """

    def attempt(*, fills_context: bool) -> T:
        with fields_named(translate.NAMES):
            can_think = text.reasoning is not None
            return use(translate.to_chat(request, message_id, can_think=can_think, fills_context=fills_context))

    try:
        return attempt(fills_context=False), False
    except RequestError as error:
        if error.code != OVERFLOW or error.param != "max_tokens":
            raise
        return attempt(fills_context=True), True


def prepare(state: ServingContext, request: MessagesRequest, model: str, prompts: Prompts | None = None) -> MessagesJob:
    """Check, translate, render and tokenize; CPU work, see `serving/prepare.py`.

    Args:
        state: The server's.
        request: Checked by its schema.
        model: The name that the reply carries.
        prompts: Of `read_prompt`, where that has been done; the request is then without what it was made of.

    Raises:
        RequestError: The request cannot be served as it is.
    """
    translate.check_generation(request)
    message_id = new_id("msg_")
    job, is_clamped = _clamped(
        state.text, request, message_id, lambda asked: chat.prepare(state, asked, model, prompts)
    )
    omits = request.thinking is not None and request.thinking.display == "omitted"
    return MessagesJob(message_id=message_id, chat=job, is_clamped=is_clamped, omits=omits)


def count(text: Processor, request: CountTokensRequest) -> bytes:
    """Count the tokens of a prompt as `prepare` would make it, and return the reply; CPU work.

    One beyond the context is counted, too.

    Raises:
        RequestError: The prompt cannot be made, or is too big to look at.
    """
    translate.check(request)
    with fields_named(translate.NAMES):
        fields = translate.prompt_fields(request, can_think=text.reasoning is not None)
        request.messages.clear()  # each of a hundred thousand takes as much again as what it became
        return encode(TokenCount(prompt_tokens(chat_request(fields), text)))


async def reply(job: MessagesJob) -> bytes:
    """Run to the end and return the message."""
    builder = BlockBuilder(job.omits)
    async with aclosing(job.chat.generation.steps(whole=True)) as batches:
        async for steps in batches:
            for step in steps:
                builder.take(job.chat.view.events(step.events))
    check_not_aborted(job.choice)
    builder.finish()
    reason, sequence = job.ending()
    return encode(message(job, builder.blocks, reason, sequence))


def message(job: MessagesJob, blocks: Sequence[Any], reason: StopReason | None, sequence: str | None) -> MessageReply:
    """Return a message as it is now."""
    return MessageReply(
        id=job.message_id,
        model=job.chat.model,
        content=list(blocks),
        stop_reason=reason,
        stop_sequence=sequence,
        usage=job.usage(MessageUsage),
        structured_output=report_field(job.choice, "input_schema"),
    )


async def stream(job: MessagesJob) -> Chunks:
    """Yield the stream's events."""
    source = events(job)
    try:
        async for batch in source:
            yield b"".join([written(event) for event in batch])
    finally:
        await source.aclose()


def final_error_event(error: Exception, request_id: str | None) -> bytes:
    """Return how a stream ends after an error."""
    status, detail, _ = errors.describe(error)
    return b"event: error\ndata: %b\n\n" % encode(error_body(status_of(status, detail.code), detail, request_id))


async def events(job: MessagesJob) -> AsyncGenerator[list[dict[str, Any]], None]:
    """Run and yield the stream's events, those of one engine step together."""
    builder = BlockBuilder(job.omits)
    is_first = True
    async with aclosing(job.chat.generation.steps()) as batches:
        async for steps in batches:
            told: list[dict[str, Any]] = []
            if is_first:
                told = [{"type": "message_start", "message": message(job, (), None, None)}, {"type": "ping"}]
                is_first = False
            for step in steps:
                if step.is_last:
                    check_not_aborted(job.choice)
                told += builder.take(job.chat.view.events(step.events))
            if told:
                yield told
    reason, sequence = job.ending()
    report = report_field(job.choice, "input_schema")
    yield [
        *builder.finish(),
        {
            "type": "message_delta",
            "delta": {"stop_reason": reason, "stop_sequence": sequence},
            "usage": job.usage(DeltaUsage),
            **({} if isinstance(report, msgspec.UnsetType) else {"structured_output": report}),
        },
        {"type": "message_stop"},
    ]


def written(event: dict[str, Any]) -> bytes:
    """Return an event as it is sent."""
    return b"event: %b\ndata: %b\n\n" % (event["type"].encode(), encode(event))
