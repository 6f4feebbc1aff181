"""`/v1/batches`."""

from __future__ import annotations

from typing import Annotated

from fastapi import APIRouter, Depends, Path, Query
from starlette.requests import Request
from starlette.responses import Response

from dovetail_server.errors import catalogue as errors
from dovetail_server.openapi.document import json_route
from dovetail_server.reading.request import json_body
from dovetail_server.routes.files import PLAIN_ID, Cursor, json_reply, owner_of
from dovetail_server.schema.batches import Batch, BatchList, BatchRequest
from dovetail_server.state import State

router = APIRouter(tags=["batches"])
BatchId = Annotated[str, Path(min_length=1, max_length=64, pattern=PLAIN_ID)]


@json_route(router, "/v1/batches", body=BatchRequest, reply=Batch)
async def create_batch(
    request: Request, body: Annotated[BatchRequest, Depends(json_body(BatchRequest))], state: State
) -> Response:
    """Run the requests of a file; what is wrong with it shows in the batch, later."""
    if state.is_draining:
        raise errors.draining()
    service = await state.storage.get()
    return json_reply(await service.create(owner_of(request), body))


@json_route(router, "/v1/batches", reply=BatchList, methods=("GET",))
async def list_batches(
    request: Request, state: State, after: Cursor = None, limit: Annotated[int, Query(ge=0, le=100)] = 20
) -> Response:
    """List batches, newest first."""
    service = await state.storage.get()
    data, has_more = await service.page(owner_of(request), after, limit)
    return json_reply(BatchList.of(data, [batch.id for batch in data], has_more))


@json_route(router, "/v1/batches/{batch_id}", reply=Batch, methods=("GET",))
async def get_batch(request: Request, batch_id: BatchId, state: State) -> Response:
    """Show a batch."""
    service = await state.storage.get()
    return json_reply(await service.get(owner_of(request), batch_id))


@json_route(router, "/v1/batches/{batch_id}/cancel", reply=Batch)
async def cancel_batch(request: Request, batch_id: BatchId, state: State) -> Response:
    """End a batch early; replies that are there already are kept."""
    service = await state.storage.get()
    return json_reply(await service.cancel(owner_of(request), batch_id))
