"""`/v1/responses/compact`: a conversation made shorter, for the client to go on with.

What the user said stays as it is; one item behind it has a summary of everything, written by the served model. It is
opaque to clients as the API wants it, not secret. In a later request's input it is what the model has said so far.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Iterator, Sequence
from itertools import chain
from typing import TYPE_CHECKING, Any, TypeVar

import msgspec

from dovetail.errors import RequestError
from dovetail_server import errors
from dovetail_server.openai import response_objects as ro
from dovetail_server.openai.chat import ChatRequest
from dovetail_server.openai.responses import CompactRequest
from dovetail_server.responses import translate
from dovetail_server.responses.items import Item, decode_items, encode_reasoning, item_id, messages_of
from dovetail_server.responses.job import joined
from dovetail_server.responses.references import items_before, items_of
from dovetail_server.serving import chat
from dovetail_server.serving.common import check_not_aborted, response_usage
from dovetail_server.serving.prompts import Prompts
from dovetail_server.serving.translate import OVERFLOW, chat_request, fields_named

if TYPE_CHECKING:
    from dovetail.processing.processor import Processor
    from dovetail_server.responses.references import Answer
    from dovetail_server.serving.context import ServingContext

T = TypeVar("T")
encode = msgspec.json.encode
MAX_SUMMARY = 2048
"""Tokens of a summary, thinking included: it takes the place of what may fill the context."""
ASK = (
    "Summarize this conversation for yourself: you will go on with it from this summary and my messages alone. Keep "
    "every decision, fact, name, number, open question and the state of the work. Write the summary and nothing else."
)


def read_prompt(text: Processor, request: CompactRequest, compacted_id: str, found: Answer) -> Prompts:
    """Make the prompt that asks for the summary; CPU work.

    Args:
        text: Tokenizer, template and parsers.
        request: Checked by its schema.
        compacted_id: The identifier of the reply.
        found: What it refers to.

    Returns:
        The prompt, with the items that stay. No prompt, where there is no conversation.

    Raises:
        RequestError: It cannot be read, or does not fit the context.
    """
    kept: list[bytes] = []
    num = 0

    def conversation() -> Iterator[Item]:
        nonlocal num
        for item in chain(items_before(found), items_of(request.input or None, compacted_id, found)):
            num += 1
            if item["type"] == "message" and item["role"] == "user":
                kept.append(encode(item))
            yield item

    messages = messages_of(conversation(), request.instructions)
    if not num:
        return Prompts(prompts=[], items=joined(kept))
    made = summary_request(messages, compacted_id, lambda asked: chat.read_prompt(text, asked))
    return Prompts(prompts=made.prompts, tail=made.tail, items=joined(kept))


async def compact(state: ServingContext, prompts: Prompts, model: str, compacted_id: str) -> ro.CompactedResponse:
    """Return what is left of a conversation.

    Raises:
        ServiceError: The server cannot do it now, or the model wrote no summary.
    """
    summary, usage = "", ro.NO_USAGE
    if prompts.prompts:
        summary, usage = await summarize(state, prompts, model, compacted_id)
    last: Item = {"type": "compaction", "id": item_id(compacted_id, "compaction", "o", 0)}
    last["encrypted_content"] = encode_reasoning(summary)
    output = [*decode_items(prompts.items), last]
    return ro.CompactedResponse(id=compacted_id, created_at=int(time.time()), output=output, usage=usage)


async def summarize(state: ServingContext, prompts: Prompts, model: str, rid: str) -> tuple[str, ro.ResponseUsage]:
    """Have the model write the summary; returns it with what it took."""

    def prepare() -> chat.ChatJob:
        return summary_request((), rid, lambda asked: chat.prepare(state, asked, model, prompts))

    job = await asyncio.to_thread(prepare)
    async for _ in job.generation.steps(whole=True):
        pass  # the choice's output holds it
    choice = job.generation.choices[0]
    check_not_aborted(choice)
    summary = (choice.output.content or "").strip()
    if not summary:
        text = "the model wrote no summary of this conversation; go on with its items, or with truncation: auto"
        raise errors.ServiceError(text, code="no_summary", status=500)
    return summary, response_usage(choice)


def summary_request(messages: Sequence[dict[str, Any]], rid: str, use: Callable[[ChatRequest], T]) -> T:
    """Use the chat request that gives the summary; its length is the context's where that is less."""
    fields = {"messages": [*messages, {"role": "user", "content": ASK}], "rid": rid}
    with fields_named(translate.NAMES):
        try:
            return use(chat_request({**fields, "max_completion_tokens": MAX_SUMMARY}))
        except RequestError as error:
            if error.code != OVERFLOW or error.param != "max_completion_tokens":
                raise
        return use(chat_request(fields))
