"""`/v1/messages/batches`."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import suppress
from functools import partial
from pathlib import Path as FilePath
from typing import TYPE_CHECKING, Annotated, Any

from fastapi import APIRouter, Path, Query
from starlette.requests import Request
from starlette.responses import Response, StreamingResponse

from dovetail.contracts.errors import RequestError
from dovetail_server.apis.messages import batches as mb
from dovetail_server.apis.messages.batches import (
    DeletedMessageBatch,
    MessageBatch,
    MessageBatchList,
    MessageBatchRequest,
)
from dovetail_server.apis.messages.schema import AnthropicError
from dovetail_server.errors import catalogue as errors
from dovetail_server.openapi.document import failures, json_route
from dovetail_server.reading.request import worked
from dovetail_server.reading.tasks import MESSAGE_BATCH
from dovetail_server.routes.files import PLAIN_ID, json_reply, owner_of
from dovetail_server.schema.batches import BatchRequest
from dovetail_server.state import ReadyState, State

if TYPE_CHECKING:
    from dovetail_server.batches.service import StorageService

router = APIRouter(tags=["messages"])
BatchId = Annotated[str, Path(min_length=1, max_length=64, pattern=PLAIN_ID)]
Cursor = Annotated[str | None, Query(min_length=1, max_length=64, pattern=PLAIN_ID)]
INPUT_S = 2 * 24 * 3600
"""The file of what was asked stays for so long, which is longer than a batch can run."""
CHUNK_BYTES = 1 << 16
PATH = "/v1/messages/batches"


@json_route(router, PATH, body=MessageBatchRequest, reply=MessageBatch, error=AnthropicError)
async def create_batch(request: Request, state: ReadyState) -> Response:
    """Answer many conversations in the background; one that cannot be answered shows in the results."""
    if state.is_draining:
        raise errors.draining()
    lines = await worked(request, state, MESSAGE_BATCH)
    num = mb.count_lines(lines, state.settings.max_batch_lines)
    service = await state.storage.get()
    owner = owner_of(request)
    await service.files.check_room(owner, len(lines))
    temp = service.layout.new_temp()
    try:
        size = await asyncio.to_thread(_write, temp, lines)
        row = await service.files.add(
            temp, owner=owner, filename="messages.jsonl", purpose="batch", size=size, expires_s=INPUT_S
        )
    finally:
        await asyncio.to_thread(temp.unlink, missing_ok=True)
    asked = BatchRequest(input_file_id=str(row["id"]), endpoint=mb.ENDPOINT, completion_window="24h")
    made = await service.create(owner, asked, num)
    return json_reply(await _shown(request, service, mb.shown_id(made.id)))


def _write(temp: FilePath, lines: bytes) -> int:
    from dovetail_server.storage.disk import create

    with create(temp) as file:
        return file.write(lines)


async def _row(request: Request, service: StorageService, batch_id: str) -> Any:
    """Return a batch of messages of the caller's.

    Raises:
        RequestError: 404.
    """
    if not batch_id.startswith(mb.PREFIX):
        raise mb.missing(batch_id)
    try:
        row = await service.batches.get(mb.own_id(batch_id), owner_of(request))
    except RequestError:
        raise mb.missing(batch_id) from None
    if row["endpoint"] != mb.ENDPOINT:
        raise mb.missing(batch_id)
    return row


async def _shown(request: Request, service: StorageService, batch_id: str) -> MessageBatch:
    row = await _row(request, service, batch_id)
    return mb.to_message_batch(row, str(request.base_url).rstrip("/"))


@json_route(router, PATH, reply=MessageBatchList, methods=("GET",), error=AnthropicError)
async def list_batches(
    request: Request,
    state: State,
    after_id: Cursor = None,
    before_id: Cursor = None,
    limit: Annotated[int, Query(ge=1, le=1000)] = 20,
) -> Response:
    """List batches of messages, newest first: those behind `after_id`, or right before `before_id`."""
    if after_id is not None and before_id is not None:
        raise RequestError("send one of after_id and before_id", param="before_id", code="invalid_value")
    service = await state.storage.get()
    cursor = after_id or before_id
    if cursor is not None:
        await _row(request, service, cursor)
    rows, has_more = await service.batches.page(
        owner_of(request),
        None if cursor is None else mb.own_id(cursor),
        limit,
        endpoint=mb.ENDPOINT,
        is_ascending=before_id is not None,
    )
    base = str(request.base_url).rstrip("/")
    data = [mb.to_message_batch(row, base) for row in (rows[::-1] if before_id is not None else rows)]
    ends = (data[0].id, data[-1].id) if data else (None, None)
    return json_reply(MessageBatchList(data=data, has_more=has_more, first_id=ends[0], last_id=ends[1]))


@json_route(router, PATH + "/{message_batch_id}", reply=MessageBatch, methods=("GET",), error=AnthropicError)
async def get_batch(request: Request, message_batch_id: BatchId, state: State) -> Response:
    """Show a batch of messages."""
    return json_reply(await _shown(request, await state.storage.get(), message_batch_id))


@json_route(router, PATH + "/{message_batch_id}/cancel", reply=MessageBatch, error=AnthropicError)
async def cancel_batch(request: Request, message_batch_id: BatchId, state: State) -> Response:
    """End a batch early; what is answered already is kept. One that has ended is shown as it is."""
    service = await state.storage.get()
    row = await _row(request, service, message_batch_id)
    if row["status"] not in mb.ENDED:
        with suppress(RequestError):  # it has ended meanwhile
            await service.cancel(owner_of(request), mb.own_id(message_batch_id))
    return json_reply(await _shown(request, service, message_batch_id))


@json_route(router, PATH + "/{message_batch_id}", reply=DeletedMessageBatch, methods=("DELETE",), error=AnthropicError)
async def delete_batch(request: Request, message_batch_id: BatchId, state: State) -> Response:
    """Delete a batch that has ended, with its results."""
    service = await state.storage.get()
    row = await _row(request, service, message_batch_id)
    _check_ended(row, message_batch_id, "be deleted; cancel it first")
    await service.batches.delete(str(row["id"]), owner_of(request))
    for name in ("input_file_id", "output_file_id", "error_file_id"):
        if row[name] is not None:
            with suppress(RequestError):  # it was deleted, or has expired
                await service.files.delete(str(row[name]), owner_of(request))
    return json_reply(DeletedMessageBatch(id=message_batch_id))


def _check_ended(row: Any, batch_id: str, what: str) -> None:
    if row["status"] not in mb.ENDED:
        text = f"the batch {batch_id!r} is still processing and cannot {what}"
        raise RequestError(text, param="message_batch_id", code="batch_not_ended", status=400)


@router.get(
    PATH + "/{message_batch_id}/results",
    response_model=None,
    response_class=StreamingResponse,
    responses=failures(AnthropicError),
)
async def batch_results(request: Request, message_batch_id: BatchId, state: State) -> Response:
    """Send the results of a batch that has ended, one JSON object a line."""
    service = await state.storage.get()
    row = await _row(request, service, message_batch_id)
    _check_ended(row, message_batch_id, "have results yet")
    never_began = row["in_progress_at"] is None  # then nothing was written of any request
    paths = []
    for name in ("input_file_id",) if never_began else ("output_file_id", "error_file_id"):
        if row[name] is not None:
            await service.files.get(str(row[name]), owner_of(request))  # else it was deleted: a 404
            paths.append(service.layout.file(str(row[name])))
    write = partial(mb.unbegun_results, str(row["status"])) if never_began else mb.results_of
    return StreamingResponse(_results(paths, write), media_type="application/x-jsonl")


async def _results(paths: Sequence[FilePath], write: Callable[[Sequence[bytes]], bytes]) -> AsyncIterator[bytes]:
    for path in paths:
        file = await asyncio.to_thread(path.open, "rb")
        try:
            while lines := await asyncio.to_thread(file.readlines, CHUNK_BYTES):
                yield await asyncio.to_thread(write, lines)
        finally:
            await asyncio.to_thread(file.close)
