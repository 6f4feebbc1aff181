"""`/v1/conversations`: requests and replies, as OpenAI has them."""

from __future__ import annotations

from typing import Annotated, Any, Literal

import msgspec

from dovetail.contracts.errors import RequestError
from dovetail_server.apis.responses.item_schema import Item
from dovetail_server.schema.common import Metadata, RequestModel
from dovetail_server.schema.fail_fast import PlainList

MAX_AT_ONCE = 20
"""Items of a request, as at OpenAI."""
NewItems = Annotated[list[dict[str, Any]], PlainList(Item, most=MAX_AT_ONCE)]


class ConversationRequest(RequestModel):
    """Body of `POST /v1/conversations`."""

    items: NewItems | None = None
    metadata: Metadata | None = None


class ConversationUpdate(RequestModel):
    """Body of `POST /v1/conversations/{id}`: what stands in the place of its metadata."""

    metadata: Metadata | None


class ConversationItems(RequestModel):
    """Body of `POST /v1/conversations/{id}/items`."""

    items: NewItems


class ConversationObject(msgspec.Struct, frozen=True, kw_only=True):
    """A conversation."""

    id: str
    object: Literal["conversation"] = "conversation"
    created_at: int
    metadata: dict[str, str]


class ConversationDeleted(msgspec.Struct, frozen=True, kw_only=True):
    """Response of `DELETE /v1/conversations/{id}`; its items are gone, too."""

    id: str
    object: Literal["conversation.deleted"] = "conversation.deleted"
    deleted: bool = True


def missing(conversation_id: str, param: str = "conversation_id") -> RequestError:
    """Return the 404 of a conversation."""
    text = f"no conversation {conversation_id!r} here: it was deleted, or has been given up as too old"
    return RequestError(text, param=param, code="conversation_not_found", status=404)


def missing_item(item_id: str, conversation_id: str, param: str = "item_id") -> RequestError:
    """Return the 404 of an item."""
    text = f"no item {item_id!r} in the conversation {conversation_id!r}"
    return RequestError(text, param=param, code="item_not_found", status=404)
