"""`/v1/responses/compact`: a conversation made shorter, for the client to go on with.

What the user said stays as it is; one item behind it has a summary of everything, written by the served model. It is
opaque to clients as the API wants it, not secret. In a later request's input it is what the model has said so far.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from dovetail.errors import RequestError
from dovetail_server import errors
from dovetail_server.openai import response_objects as ro
from dovetail_server.openai.responses import CompactRequest, ResponsesRequest
from dovetail_server.responses import translate
from dovetail_server.responses.entry import gather, open_store
from dovetail_server.responses.items import Item, encode_reasoning, item_id, messages_of, new_response_id
from dovetail_server.serving import chat
from dovetail_server.serving.common import check_not_aborted, response_usage
from dovetail_server.serving.translate import OVERFLOW, chat_request, fields_named

if TYPE_CHECKING:
    from dovetail_server.state import ServerState

MAX_SUMMARY = 2048
"""Tokens of a summary, thinking included: it takes the place of what may fill the context."""
ASK = (
    "Summarize this conversation for yourself: you will go on with it from this summary and my messages alone. Keep "
    "every decision, fact, name, number, open question and the state of the work. Write the summary and nothing else."
)


async def compact(state: ServerState, request: CompactRequest, owner: str) -> ro.CompactedResponse:
    """Return what is left of a conversation.

    Raises:
        RequestError: It cannot be read, or does not fit the context.
        ServiceError: The server cannot do it now, or the model wrote no summary.
    """
    model = state.check_model(request.model)
    given = {name: getattr(request, name) for name in request.model_fields_set}
    asked = ResponsesRequest.model_construct(**given, store=False)  # all of it was validated, which takes time
    compacted_id = new_response_id()
    before, items = await gather(await open_store(state, asked), asked, owner, compacted_id)
    conversation = [*before, *(items if request.input else ())]
    messages = messages_of(conversation, request.instructions)
    summary, usage = "", ro.NO_USAGE
    if conversation:
        summary, usage = await summarize(state, messages, model, compacted_id)
    kept = [item for item in conversation if item["type"] == "message" and item["role"] == "user"]
    last: Item = {"type": "compaction", "id": item_id(compacted_id, "compaction", "o", 0)}
    last["encrypted_content"] = encode_reasoning(summary)
    return ro.CompactedResponse(id=compacted_id, created_at=int(time.time()), output=[*kept, last], usage=usage)


async def summarize(
    state: ServerState, messages: Sequence[dict[str, Any]], model: str, rid: str
) -> tuple[str, ro.ResponseUsage]:
    """Have the model write the summary; returns it with what it took."""
    job = await asyncio.to_thread(prepare, state, messages, model, rid)
    async for _ in job.generation.steps(whole=True):
        pass  # the choice's output holds it
    choice = job.generation.choices[0]
    check_not_aborted(choice)
    summary = (choice.output.content or "").strip()
    if not summary:
        text = "the model wrote no summary of this conversation; go on with its items, or with truncation: auto"
        raise errors.ServiceError(text, code="no_summary", status=500)
    return summary, response_usage(choice)


def prepare(state: ServerState, messages: Sequence[dict[str, Any]], model: str, rid: str) -> chat.ChatJob:
    """Make the request that gives the summary; CPU work, called in a worker thread."""
    fields = {"messages": [*messages, {"role": "user", "content": ASK}], "rid": rid}
    with fields_named(translate.NAMES):
        try:
            return chat.prepare(state, chat_request({**fields, "max_completion_tokens": MAX_SUMMARY}), model)
        except RequestError as error:
            if error.code != OVERFLOW or error.param != "max_completion_tokens":
                raise
        return chat.prepare(state, chat_request(fields), model)
