"""`/v1/chat/completions/{id}`: chat completions that were stored."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Literal

import msgspec
from fastapi import APIRouter, Depends, Path, Query
from starlette.requests import Request
from starlette.responses import Response

from dovetail_server.apis.chat.schema import (
    ChatCompletion,
    CompletionDeleted,
    CompletionUpdate,
    StoredCompletions,
)
from dovetail_server.apis.responses.objects import ItemList
from dovetail_server.compat.endpoints import why_not
from dovetail_server.openapi.document import json_route
from dovetail_server.reading.request import json_body
from dovetail_server.routes.files import PLAIN_ID, Cursor, json_reply, owner_of
from dovetail_server.routes.responses import page_of
from dovetail_server.state import ServerState, State
from dovetail_server.storage.completion_rows import missing, shown_messages, with_metadata

if TYPE_CHECKING:
    from dovetail_server.storage.completions import CompletionStore

router = APIRouter(tags=["openai"])


async def plain_id(completion_id: Annotated[str, Path(min_length=1, max_length=64, pattern=PLAIN_ID)]) -> str:
    """Return the id of a path that is none of a peer's routes; called before the body is looked at.

    Raises:
        RequestError: 404, with the reason why the peer's route is not served.
    """
    if why_not(f"/v1/chat/completions/{completion_id}") is not None:
        raise missing(completion_id)
    return completion_id


CompletionId = Annotated[str, Depends(plain_id)]
Order = Annotated[Literal["asc", "desc"], Query()]
Limit = Annotated[int, Query(ge=0, le=100)]


async def store_of(state: ServerState, completion_id: str) -> CompletionStore:
    """Return where completions are kept.

    Raises:
        RequestError: 404, this server keeps none; its database is not made for the question.
    """
    if state.settings.max_stored_responses == 0:
        raise missing(completion_id)
    return (await state.storage.get()).completions


def metadata_of(request: Request) -> dict[str, str]:
    """Read `metadata[key]=value` of a query."""
    pairs = request.query_params.multi_items()
    return {name[9:-1]: value for name, value in pairs if name.startswith("metadata[") and name.endswith("]")}


@json_route(router, "/v1/chat/completions", reply=StoredCompletions, methods=("GET",))
async def list_stored(
    request: Request,
    state: State,
    after: Cursor = None,
    limit: Limit = 20,
    order: Order = "asc",
    model: Annotated[str | None, Query(max_length=512)] = None,
) -> Response:
    """List stored completions; `metadata[key]=value` leaves those that have it."""
    if state.settings.max_stored_responses == 0:
        return json_reply(StoredCompletions.of([], [], has_more=False))
    service = await state.storage.get()
    rows, has_more = await service.completions.page(
        owner_of(request),
        after=after,
        limit=limit,
        is_ascending=order == "asc",
        model=model,
        metadata=metadata_of(request),
    )
    data = [msgspec.Raw(with_metadata(row)) for row in rows]
    return json_reply(StoredCompletions.of(data, [row["id"] for row in rows], has_more))


@json_route(router, "/v1/chat/completions/{completion_id}", reply=ChatCompletion, methods=("GET",))
async def get_stored(request: Request, completion_id: CompletionId, state: State) -> Response:
    """Show a stored completion."""
    store = await store_of(state, completion_id)
    return Response(with_metadata(await store.get(owner_of(request), completion_id)), media_type="application/json")


@json_route(router, "/v1/chat/completions/{completion_id}", body=CompletionUpdate, reply=ChatCompletion)
async def update_stored(
    request: Request,
    completion_id: CompletionId,
    body: Annotated[CompletionUpdate, Depends(json_body(CompletionUpdate))],
    state: State,
) -> Response:
    """Put other metadata in the place of a stored completion's."""
    store = await store_of(state, completion_id)
    row = await store.update(owner_of(request), completion_id, body.metadata or {})
    return Response(with_metadata(row), media_type="application/json")


@json_route(router, "/v1/chat/completions/{completion_id}", reply=CompletionDeleted, methods=("DELETE",))
async def delete_stored(request: Request, completion_id: CompletionId, state: State) -> Response:
    """Delete a stored completion."""
    store = await store_of(state, completion_id)
    await store.delete(owner_of(request), completion_id)
    return json_reply(CompletionDeleted(id=completion_id))


@json_route(router, "/v1/chat/completions/{completion_id}/messages", reply=ItemList, methods=("GET",))
async def list_messages(
    request: Request,
    completion_id: CompletionId,
    state: State,
    after: Annotated[str | None, Query(min_length=1, max_length=128)] = None,
    limit: Limit = 20,
    order: Order = "asc",
) -> Response:
    """List the messages that a stored completion answered."""
    store = await store_of(state, completion_id)
    messages = shown_messages(completion_id, await store.messages(owner_of(request), completion_id))
    return json_reply(page_of(messages if order == "asc" else messages[::-1], after, limit))
