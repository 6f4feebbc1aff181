"""Prompts of `/v1/responses`: of a response, or of the summary that comes before it or in its place."""

from __future__ import annotations

from itertools import chain
from typing import TYPE_CHECKING

import msgspec
from msgspec.structs import replace

from dovetail.contracts.errors import RequestError
from dovetail.contracts.requests import Chat, JsonObject, Request
from dovetail.processing.input import Preparation
from dovetail.processing.refusals import TOO_LONG
from dovetail_server.apis.responses import compaction
from dovetail_server.apis.responses import request as responses
from dovetail_server.apis.responses.item_schema import item_kind
from dovetail_server.apis.responses.items import decode_items, messages_of, stays
from dovetail_server.apis.responses.references import items_before
from dovetail_server.apis.responses.schema import CompactRequest, ResponsesRequest

if TYPE_CHECKING:
    from dovetail.processing.processor import Processor
    from dovetail_server.apis.responses.references import ReferencedItems

encode = msgspec.json.encode


def read_prompt(
    text: Processor, body: ResponsesRequest, response_id: str, found: ReferencedItems
) -> responses.ReadItems:
    """Check, translate, render and tokenize a conversation; CPU work.

    Args:
        text: Tokenizer, template and parsers.
        body: Checked by its schema.
        response_id: The response's.
        found: What it refers to.

    Raises:
        RequestError: The request cannot be served as it is.
    """
    rows = bytearray()
    is_trigger, threshold = ends_in_trigger(body), threshold_of(body, text.limits.context_len)
    request = responses.read(body, response_id, found, rows)
    if is_trigger:
        summary_request = compaction.summary_request(request, messages_of_chat(request), compaction.MAX_SUMMARY)
        return responses.ReadItems(
            Preparation(text, summary_request).rendered(), bytes(rows), compaction.encode_plan(compaction.Plan())
        )
    if threshold is None:
        return responses.ReadItems(Preparation(text, request).rendered(), bytes(rows))
    return read_beyond(text, request, bytes(rows), found, threshold, body.instructions)


def read_compact(
    text: Processor, body: CompactRequest, compacted_id: str, found: ReferencedItems
) -> responses.ReadItems:
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
    if not body.input and not found.turns:
        return responses.ReadItems(None, b"[]")
    rows = bytearray()
    asked = responses.as_response(body).model_copy(update={"input": body.input or []})
    request = responses.read(asked, compacted_id, found, rows)
    made = compaction.summary_request(request, messages_of_chat(request), compaction.MAX_SUMMARY)
    items = compaction.effective(chain(items_before(found), decode_items(rows)))
    stay = [item for item in items if stays(item)]
    return responses.ReadItems(Preparation(text, made).rendered(), encode(stay))


def read_beyond(
    text: Processor, request: Request, rows: bytes, found: ReferencedItems, threshold: int, instructions: str | None
) -> responses.ReadItems:
    """Make a response's prompt, or where it has more tokens than `threshold` the one that asks for a summary; CPU work.

    Where the summary's own prompt does not fit the context, an earlier part of the conversation is summed up.

    Args:
        text: Tokenizer, template and parsers.
        request: The response's, not rendered.
        rows: Its own items, JSON.
        found: What it refers to.
        threshold: See above.
        instructions: The body's.

    Raises:
        RequestError: The request cannot be served as it is.
    """
    whole = replace(request, prompts=[replace(p, drops_turns=False) for p in request.prompts if isinstance(p, Chat)])
    made: Request | None = None
    try:
        made = Preparation(text, whole).rendered()
        num = sum(len(prompt.ids) for prompt in Preparation(text, made).prompts)
    except RequestError as error:
        if error.code != TOO_LONG:
            raise
        num = Preparation(text, whole).count()
    if num > threshold:
        items = compaction.effective(chain(items_before(found), decode_items(rows)))
        tools = [] if request.tools is None else request.tools.tools
        for old, plan in compaction.plans_of(items, num, threshold, len(instructions or "") + len(encode(tools))):
            ask = compaction.summary_request(request, messages_of(old, instructions), plan.limit)
            try:
                return responses.ReadItems(Preparation(text, ask).rendered(), rows, compaction.encode_plan(plan))
            except RequestError as error:
                if error.code != TOO_LONG:
                    raise
    return responses.ReadItems(made or Preparation(text, request).rendered(), rows)


def messages_of_chat(request: Request) -> list[JsonObject]:
    """Return the conversation of a request that has not been rendered."""
    return [message for prompt in request.prompts if isinstance(prompt, Chat) for message in prompt.messages]


def ends_in_trigger(body: ResponsesRequest) -> bool:
    """Whether the conversation is to be compacted, and not to be answered.

    Raises:
        RequestError: The item that says so is not the last, and what came of it does not follow.
    """
    kinds = [item_kind(item) for item in body.input] if isinstance(body.input, list) else []
    for at, kind in enumerate(kinds[:-1]):
        if kind == "compaction_trigger" and kinds[at + 1] != "compaction":
            text = f"input[{at}] is a compaction_trigger, which must be the last item, or have its compaction behind it"
            raise RequestError(text, param=f"input[{at}]", code="invalid_value")
    return kinds[-1:] == ["compaction_trigger"]


def may_compact(body: ResponsesRequest) -> bool:
    """Whether a body may have to be compacted before it is answered, or in place of that.

    Raises:
        RequestError: See `ends_in_trigger`.
    """
    return bool(body.context_management) or ends_in_trigger(body)


def threshold_of(body: ResponsesRequest, context_len: int) -> int | None:
    """Return the tokens beyond which the conversation is compacted; None for never."""
    if not body.context_management:
        return None
    return body.context_management[0].compact_threshold or context_len * 3 // 4
