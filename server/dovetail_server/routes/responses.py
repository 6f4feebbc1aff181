"""`/v1/responses`."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Any, Literal

from fastapi import APIRouter, Path, Query
from starlette.requests import Request
from starlette.responses import Response

from dovetail.contracts.errors import RequestError
from dovetail_server.apis.dropped import HEADER, header_of
from dovetail_server.apis.responses.background import check_log
from dovetail_server.apis.responses.items import OPEN, decode_items, missing, turn_items
from dovetail_server.apis.responses.objects import (
    CompactedResponse,
    InputTokens,
    ItemList,
    ResponseDeleted,
    ResponseObject,
)
from dovetail_server.apis.responses.reply import ResponsesWriter
from dovetail_server.apis.responses.schema import CompactRequest, Includable, InputTokensRequest, ResponsesRequest
from dovetail_server.openapi.document import json_route
from dovetail_server.reading.request import raw_body
from dovetail_server.reading.responses import begin, compact, count, not_background
from dovetail_server.routes.files import PLAIN_ID, json_reply, owner_of
from dovetail_server.serving import run
from dovetail_server.serving.sse import cancel_on_disconnect, start
from dovetail_server.state import ReadyState, ServerState, State

if TYPE_CHECKING:
    from dovetail_server.batches.service import StorageService
    from dovetail_server.serving.job import Job

router = APIRouter(tags=["responses"])
ResponseId = Annotated[str, Path(min_length=1, max_length=64, pattern=PLAIN_ID)]
ENDING = run.ending(ResponsesWriter, None)
Include = Annotated[list[Includable] | None, Query(max_length=32)]


@json_route(router, "/v1/responses", body=ResponsesRequest, reply=ResponseObject, streams=True, place="prefix")
async def create_response(request: Request) -> Response:
    """Answer items, whole, as a stream or in the background; the reply is kept unless `store` is false."""
    state: ServerState = request.app.state.server
    owner = owner_of(request)
    job = await begin(state, await raw_body(request), owner, http=request)
    asked = job.reply.requests[0]
    response = await answered(request, state, owner, job)
    if asked.dropped:
        response.headers[HEADER] = header_of(asked)
    return response


async def answered(request: Request, state: ServerState, owner: str, job: Job) -> Response:
    """Return what a job answers, whole, as a stream or in the background."""
    asked = job.reply.requests[0]
    if asked.reply["echo"]["background"]:
        service = await state.storage.get()
        live = await service.background.start(owner, job)
        return await start(request, live.follow(-1), ENDING) if asked.stream else json_reply(live.response)
    if asked.stream:
        return await start(request, run.stream(job), ENDING)
    return Response(await cancel_on_disconnect(request, run.reply(job)), media_type="application/json")


@json_route(router, "/v1/responses/input_tokens", body=InputTokensRequest, reply=InputTokens, place="any")
async def count_input_tokens(request: Request, state: ReadyState) -> Response:
    """Count the tokens of a prompt, with the responses that it continues."""
    reply = await cancel_on_disconnect(request, count(state, await raw_body(request), owner_of(request)))
    return Response(reply, media_type="application/json")


@json_route(router, "/v1/responses/compact", body=CompactRequest, reply=CompactedResponse, place="any")
async def compact_conversation(request: Request, state: ReadyState) -> Response:
    """Make a conversation shorter: the user's messages stay, the model sums up the rest."""
    return json_reply(await cancel_on_disconnect(request, compact(state, await raw_body(request), owner_of(request))))


async def service_of(state: ServerState, response_id: str) -> StorageService:
    """Return what knows stored responses.

    Raises:
        RequestError: 404, this server stores none; its database is not made for the question.
    """
    if state.settings.max_stored_responses == 0:
        raise missing(response_id)
    return await state.storage.get()


@json_route(router, "/v1/responses/{response_id}", reply=ResponseObject, follows=True, methods=("GET",))
async def get_response(
    request: Request,
    response_id: ResponseId,
    state: State,
    stream: Annotated[bool, Query()] = False,
    starting_after: Annotated[int, Query(ge=-1, le=1 << 30)] = -1,
    include: Include = None,
    include_obfuscation: Annotated[bool | None, Query()] = None,
) -> Response:
    """Show a stored response as it is now, or follow one that runs in the background."""
    service = await service_of(state, response_id)
    live = service.background.get(owner_of(request), response_id)
    if not stream:
        if live is not None:
            return json_reply(live.response)
        row = await service.responses.get(owner_of(request), response_id)
        return Response(row["body"], media_type="application/json")
    if live is None:
        await service.responses.get(owner_of(request), response_id)
    followed = check_log(live, response_id)
    if followed.is_ended and starting_after >= len(followed.log) - 1:
        text = f"starting_after is {starting_after}, and the last event has the number {len(followed.log) - 1}"
        raise RequestError(text, param="starting_after", code="invalid_value")
    return await start(request, followed.follow(starting_after), ENDING)


@json_route(router, "/v1/responses/{response_id}", reply=ResponseDeleted, methods=("DELETE",))
async def delete_response(request: Request, response_id: ResponseId, state: State) -> Response:
    """Delete a stored response; one that runs is cancelled first."""
    service = await service_of(state, response_id)
    await service.background.drop(owner_of(request), response_id)
    await service.responses.delete(owner_of(request), response_id)
    return json_reply(ResponseDeleted(id=response_id))


@json_route(router, "/v1/responses/{response_id}/cancel", reply=ResponseObject)
async def cancel_response(request: Request, response_id: ResponseId, state: State) -> Response:
    """End a background response; one that has ended is shown as it is."""
    service = await service_of(state, response_id)
    live = service.background.get(owner_of(request), response_id)
    if live is not None:
        return json_reply(await service.background.cancel(live))
    row = await service.responses.get(owner_of(request), response_id)
    if not row["is_background"]:
        raise not_background(response_id)
    if row["status"] in OPEN:
        text = f"{response_id!r} is generated by another server of this database; ask that one"
        raise RequestError(text, param="response_id", code="runs_elsewhere", status=409)
    return Response(row["body"], media_type="application/json")


@json_route(router, "/v1/responses/{response_id}/input_items", reply=ItemList, methods=("GET",))
async def list_input_items(
    request: Request,
    response_id: ResponseId,
    state: State,
    after: Annotated[str | None, Query(min_length=1, max_length=128)] = None,
    limit: Annotated[int, Query(ge=0, le=100)] = 20,
    order: Annotated[Literal["asc", "desc"], Query()] = "desc",
    include: Include = None,
) -> Response:
    """List what a response was generated from, with the items of the responses that it continues."""
    service, owner = await service_of(state, response_id), owner_of(request)
    row, own = await service.responses.with_input(owner, response_id)
    items = decode_items(own)
    if row["previous_id"] is not None:
        before = await service.responses.chain(owner, row["previous_id"])
        items = [*(item for turn in before for item in turn_items(*turn)), *items]
    return json_reply(page_of(items if order == "asc" else items[::-1], after, limit))


def page_of(items: list[dict[str, Any]], after: str | None, limit: int) -> ItemList:
    """Return a page of items.

    Raises:
        RequestError: `after` names none of them.
    """
    begin_at = 0
    if after is not None:
        places = [at for at, item in enumerate(items) if item["id"] == after]
        if not places:
            text = f"after: no item {after!r} in this list; give the last id of the page before"
            raise RequestError(text, param="after", code="invalid_value")
        begin_at = places[0] + 1
    data = items[begin_at : begin_at + limit]
    return ItemList.of(data, [item["id"] for item in data], begin_at + limit < len(items))
