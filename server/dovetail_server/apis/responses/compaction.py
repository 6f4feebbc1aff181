"""`/v1/responses/compact`: a conversation made shorter, for the client to go on with.

What the user said stays as it is; one item behind it has a summary of everything, written by the served model. It is
opaque to clients as the API wants it, not secret. In a later request's input it is what the model has said so far.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterator
from itertools import chain
from typing import TYPE_CHECKING

import msgspec

from dovetail.contracts.requests import Chat, Request
from dovetail.processing.input import Preparation
from dovetail_server import errors
from dovetail_server.apis.responses import objects as ro
from dovetail_server.apis.responses.items import Item, decode_items, encode_reasoning, item_id, messages_of
from dovetail_server.apis.responses.references import items_before, items_of
from dovetail_server.apis.responses.request import NAMES, ReadItems
from dovetail_server.apis.responses.schema import CompactRequest
from dovetail_server.apis.responses.usage import response_usage
from dovetail_server.serving.common import check_not_aborted
from dovetail_server.serving.job import make_generation

if TYPE_CHECKING:
    from dovetail.processing.processor import Processor
    from dovetail_server.apis.responses.references import ReferencedItems
    from dovetail_server.serving.context import ServingContext

encode = msgspec.json.encode
MAX_SUMMARY = 2048
"""Tokens of a summary, thinking included: it takes the place of what may fill the context."""
ASK = (
    "Summarize this conversation for yourself: you will go on with it from this summary and my messages alone. Keep "
    "every decision, fact, name, number, open question and the state of the work. Write the summary and nothing else."
)


def read_prompt(text: Processor, body: CompactRequest, compacted_id: str, found: ReferencedItems) -> ReadItems:
    """Make the prompt that asks for the summary; CPU work.

    Args:
        text: Tokenizer, template and parsers.
        body: Checked by its schema.
        compacted_id: The identifier of the reply.
        found: What it refers to.

    Returns:
        The request for the summary, none where there is no conversation, and the items that stay.

    Raises:
        RequestError: It cannot be read, or does not fit the context.
    """
    kept: list[bytes] = []
    num = 0

    def conversation() -> Iterator[Item]:
        nonlocal num
        for item in chain(items_before(found), items_of(body.input or None, compacted_id, found)):
            num += 1
            if item["type"] == "message" and item["role"] == "user":
                kept.append(encode(item))
            yield item

    messages = messages_of(conversation(), body.instructions)
    stays = b"[" + b",".join(kept) + b"]"
    if not num:
        return ReadItems(None, stays)
    request = Request(
        prompts=[Chat(messages=[*messages, {"role": "user", "content": ASK}])],
        limit=MAX_SUMMARY,
        clamps=True,
        names=NAMES,
    )
    return ReadItems(Preparation(text, request).rendered(), stays)


async def compact(state: ServingContext, read: ReadItems, compacted_id: str) -> ro.CompactedResponse:
    """Return what is left of a conversation.

    Raises:
        ServiceError: The server cannot do it now, or the model wrote no summary.
    """
    summary, usage = "", ro.NO_USAGE
    if read.request is not None:
        summary, usage = await summarize(state, read.request, compacted_id)
    last: Item = {"type": "compaction", "id": item_id(compacted_id, "compaction", "o", 0)}
    last["encrypted_content"] = encode_reasoning(summary)
    output = [*decode_items(read.items), last]
    return ro.CompactedResponse(id=compacted_id, created_at=int(time.time()), output=output, usage=usage)


async def summarize(state: ServingContext, request: Request, rid: str) -> tuple[str, ro.ResponseUsage]:
    """Have the model write the summary; returns it with what it took."""
    generation = await asyncio.to_thread(make_generation, state, [request], rid, "", is_rendered=True)
    async for _ in generation.steps(whole=True):
        pass  # the choice's output holds it
    choice = generation.choices[0]
    check_not_aborted(choice)
    summary = (choice.output.content or "").strip()
    if not summary:
        text = "the model wrote no summary of this conversation; go on with its items, or with truncation: auto"
        raise errors.ServiceError(text, code="no_summary", status=500)
    return summary, response_usage(choice)
