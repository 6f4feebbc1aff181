"""`/v1/conversations`: items that responses go on with, and are added to."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Any, Literal

import msgspec
from fastapi import APIRouter, Depends, Path, Query
from starlette.requests import Request
from starlette.responses import Response

from dovetail.contracts.errors import RequestError
from dovetail_server.apis.responses.items import Item, decode_item, images_in, input_items, new_response_id
from dovetail_server.apis.responses.objects import ItemList
from dovetail_server.apis.responses.schema import (
    ConversationDeleted,
    ConversationItems,
    ConversationObject,
    ConversationRequest,
    ConversationUpdate,
    missing,
)
from dovetail_server.errors import catalogue as errors
from dovetail_server.openapi.document import json_route
from dovetail_server.reading.request import json_body
from dovetail_server.routes.files import PLAIN_ID, json_reply, owner_of
from dovetail_server.routes.responses import Include
from dovetail_server.state import ServerState, State

if TYPE_CHECKING:
    from sqlalchemy.engine import RowMapping

    from dovetail_server.apis.responses.conversations import ConversationStore

router = APIRouter(tags=["responses"])
ConversationId = Annotated[str, Path(min_length=1, max_length=64, pattern=PLAIN_ID)]
ItemId = Annotated[str, Path(min_length=1, max_length=128)]
PATH = "/v1/conversations/{conversation_id}"


async def store_of(state: ServerState, conversation_id: str) -> ConversationStore:
    """Return where conversations are kept.

    Raises:
        RequestError: 404, this server keeps none; its database is not made for the question.
    """
    if state.settings.max_stored_responses == 0:
        raise missing(conversation_id)
    return (await state.storage.get()).conversations


def shown(row: RowMapping) -> Response:
    """Return a conversation as it is shown."""
    metadata = msgspec.json.decode(row["metadata"])
    return json_reply(ConversationObject(id=row["id"], created_at=int(row["created_at"]), metadata=metadata))


def read_items(given: list[dict[str, Any]] | None, no_images: str) -> list[Item]:
    """Return a client's items as they are kept.

    Args:
        given: The items.
        no_images: Why there can be no images; empty where there can.

    Raises:
        RequestError: One cannot be read, or stands for another.
    """
    found = list(input_items(given or [], new_response_id(), "items"))
    if no_images and (image := next(images_in(found), None)) is not None:
        text = f"{image.param}: an image cannot be read here: {no_images}; send text"
        raise RequestError(text, param=image.param, code="unsupported")
    for at, item in enumerate(found):
        if item["type"] == "item_reference":
            why = "send the item itself"
            raise errors.unsupported(f"items[{at}].type 'item_reference'", why)
    return found


@json_route(router, "/v1/conversations", body=ConversationRequest, reply=ConversationObject)
async def create_conversation(
    request: Request,
    body: Annotated[ConversationRequest, Depends(json_body(ConversationRequest))],
    state: State,
) -> Response:
    """Begin a conversation, empty or with items."""
    if state.settings.max_stored_responses == 0:
        text = "this server stores no conversations (--max-stored-responses 0); send the items with each response"
        raise RequestError(text, code="unsupported_route")
    first = read_items(body.items, state.text.template.no_images)
    store = (await state.storage.get()).conversations
    return shown(await store.create(owner_of(request), body.metadata or {}, first))


@json_route(router, PATH, reply=ConversationObject, methods=("GET",))
async def get_conversation(request: Request, conversation_id: ConversationId, state: State) -> Response:
    """Show a conversation without its items."""
    store = await store_of(state, conversation_id)
    return shown(await store.get(owner_of(request), conversation_id))


@json_route(router, PATH, body=ConversationUpdate, reply=ConversationObject)
async def update_conversation(
    request: Request,
    conversation_id: ConversationId,
    body: Annotated[ConversationUpdate, Depends(json_body(ConversationUpdate))],
    state: State,
) -> Response:
    """Put other metadata in the place of a conversation's."""
    store = await store_of(state, conversation_id)
    return shown(await store.update(owner_of(request), conversation_id, body.metadata or {}))


@json_route(router, PATH, reply=ConversationDeleted, methods=("DELETE",))
async def delete_conversation(request: Request, conversation_id: ConversationId, state: State) -> Response:
    """Delete a conversation with its items."""
    store = await store_of(state, conversation_id)
    await store.delete(owner_of(request), conversation_id)
    return json_reply(ConversationDeleted(id=conversation_id))


@json_route(router, f"{PATH}/items", reply=ItemList, methods=("GET",))
async def list_conversation_items(
    request: Request,
    conversation_id: ConversationId,
    state: State,
    after: Annotated[str | None, Query(min_length=1, max_length=128)] = None,
    limit: Annotated[int, Query(ge=1, le=100)] = 20,
    order: Annotated[Literal["asc", "desc"], Query()] = "desc",
    include: Include = None,
) -> Response:
    """List a conversation's items."""
    store = await store_of(state, conversation_id)
    bodies, has_more = await store.page(
        owner_of(request), conversation_id, after=after, limit=limit, is_ascending=order == "asc"
    )
    items = [decode_item(body) for body in bodies]
    return json_reply(ItemList.of(items, [item["id"] for item in items], has_more))


@json_route(router, f"{PATH}/items", body=ConversationItems, reply=ItemList)
async def add_conversation_items(
    request: Request,
    conversation_id: ConversationId,
    body: Annotated[ConversationItems, Depends(json_body(ConversationItems))],
    state: State,
    include: Include = None,
) -> Response:
    """Add items, and return them."""
    new = read_items(body.items, state.text.template.no_images)
    store = await store_of(state, conversation_id)
    items = await store.add(owner_of(request), conversation_id, new)
    return json_reply(ItemList.of(items, [item["id"] for item in items], has_more=False))


@json_route(router, f"{PATH}/items/{{item_id}}", methods=("GET",))
async def get_conversation_item(
    request: Request, conversation_id: ConversationId, item_id: ItemId, state: State, include: Include = None
) -> Response:
    """Show an item."""
    store = await store_of(state, conversation_id)
    found = await store.item(owner_of(request), conversation_id, item_id)
    return Response(found, media_type="application/json")


@json_route(router, f"{PATH}/items/{{item_id}}", reply=ConversationObject, methods=("DELETE",))
async def delete_conversation_item(
    request: Request, conversation_id: ConversationId, item_id: ItemId, state: State
) -> Response:
    """Delete an item, and return the conversation."""
    store = await store_of(state, conversation_id)
    return shown(await store.delete_item(owner_of(request), conversation_id, item_id))
