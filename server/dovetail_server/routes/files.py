"""`/v1/files`."""

from __future__ import annotations

import asyncio
from typing import Annotated, Any, Literal

import msgspec
from fastapi import APIRouter, Path, Query
from pydantic import ValidationError
from starlette.requests import ClientDisconnect, Request
from starlette.responses import FileResponse, Response

from dovetail.contracts.errors import RequestError
from dovetail_server.errors.catalogue import ClientGoneError, from_validation
from dovetail_server.openapi.document import FAILURES, json_route
from dovetail_server.schema.batches import PURPOSES, ExpiresAfter, FileDeleted, FileList, FileObject, FileUpload
from dovetail_server.state import State

router = APIRouter(tags=["files"])
PLAIN_ID = r"^[A-Za-z0-9_.\-]+$"
FileId = Annotated[str, Path(min_length=1, max_length=64, pattern=PLAIN_ID)]
Cursor = Annotated[str | None, Query(min_length=1, max_length=64, pattern=PLAIN_ID)]
MAX_PAGE = 1000
"""Longer pages would keep the server from others; `has_more` tells of the rest."""
MAX_BATCH_INPUT = 200 << 20


def owner_of(request: Request) -> str:
    """Return whose files and batches a caller may see; empty where the server asks for no key."""
    return str(request.scope.get("state", {}).get("owner") or "")


def json_reply(value: Any) -> Response:
    """Encode a reply."""
    return Response(msgspec.json.encode(value), media_type="application/json")


def to_file(row: Any) -> FileObject:
    """Return a row as the API shows it."""
    names = ("id", "bytes", "created_at", "expires_at", "filename", "purpose")
    return FileObject(**{name: row[name] for name in names if row[name] is not None})


@json_route(router, "/v1/files", form=FileUpload, reply=FileObject)
async def upload_file(request: Request, state: State) -> Response:
    """Store a file."""
    from dovetail_server.storage.disk import remove
    from dovetail_server.storage.upload import FormReader, receive_file

    reader = FormReader(request.headers.get("content-type", ""), state.settings.max_file_bytes)
    service = await state.storage.get()
    await service.files.check_room(owner_of(request), int(request.headers.get("content-length") or 0))
    temp = service.layout.new_temp()
    try:
        await receive_file(reader, request.stream(), temp, state.settings.min_free_disk_bytes)
        purpose, expires_s = check_fields(reader.fields, reader.filename or "", reader.num_file_bytes)
        row = await service.files.add(
            temp,
            owner=owner_of(request),
            filename=reader.filename or "",
            purpose=purpose,
            size=reader.num_file_bytes,
            expires_s=expires_s,
        )
    except ClientDisconnect:
        raise ClientGoneError("the client left while sending its file") from None
    finally:
        await asyncio.to_thread(remove, temp)
    return json_reply(to_file(row))


def check_fields(fields: dict[str, str], filename: str, size: int) -> tuple[str, int | None]:
    """Return purpose and lifetime of a file.

    Raises:
        RequestError: A field is missing, unknown or wrong, or the file does not suit its purpose.
    """
    given = dict(fields)
    purpose = given.pop("purpose", None)
    anchor, seconds = given.pop("expires_after[anchor]", None), given.pop("expires_after[seconds]", None)
    if given:
        name = next(iter(given))
        raise RequestError(f"unknown field {name!r}", param=name, code="unknown_parameter")
    if purpose is None:
        raise RequestError("purpose is required", param="purpose", code="missing_required_parameter")
    if purpose not in PURPOSES:
        text = f"purpose must be one of {', '.join(PURPOSES)} (given: {purpose[:64]!r})"
        raise RequestError(text, param="purpose", code="invalid_value")
    if purpose == "batch":
        if not filename.lower().endswith(".jsonl"):
            raise RequestError(
                f"a file for batches is named *.jsonl, not {filename!r}", param="file", code="invalid_value"
            )
        if size > MAX_BATCH_INPUT:
            text = f"a file for batches has at most {MAX_BATCH_INPUT} bytes, not {size}; split it"
            raise RequestError(text, param="file", code="file_too_large", status=413)
    return purpose, None if anchor is None and seconds is None else lifetime(anchor, seconds)


def lifetime(anchor: str | None, seconds: str | None) -> int:
    """Read `expires_after`."""
    number = int(seconds) if seconds is not None and seconds.isascii() and seconds.isdigit() else seconds
    body = {name: value for name, value in (("anchor", anchor), ("seconds", number)) if value is not None}
    try:
        return ExpiresAfter.model_validate(body).seconds
    except ValidationError as error:
        found = from_validation(error, body, list(ExpiresAfter.model_fields))
        param = f"expires_after.{found.param}"
        raise RequestError(f"expires_after.{found.message}", param=param, code=found.code) from None


@json_route(router, "/v1/files", reply=FileList, methods=("GET",))
async def list_files(
    request: Request,
    state: State,
    after: Cursor = None,
    limit: Annotated[int, Query(ge=0, le=10_000)] = 10_000,
    order: Annotated[Literal["asc", "desc"], Query()] = "desc",
    purpose: Annotated[str | None, Query(max_length=32, pattern=PLAIN_ID)] = None,
) -> Response:
    """List files."""
    service = await state.storage.get()
    rows, has_more = await service.files.page(
        owner_of(request), after=after, limit=min(limit, MAX_PAGE), is_ascending=order == "asc", purpose=purpose
    )
    data = [to_file(row) for row in rows]
    return json_reply(FileList.of(data, [file.id for file in data], has_more))


@json_route(router, "/v1/files/{file_id}", reply=FileObject, methods=("GET",))
async def get_file(request: Request, file_id: FileId, state: State) -> Response:
    """Describe a file."""
    service = await state.storage.get()
    return json_reply(to_file(await service.files.get(file_id, owner_of(request))))


@json_route(router, "/v1/files/{file_id}", reply=FileDeleted, methods=("DELETE",))
async def delete_file(request: Request, file_id: FileId, state: State) -> Response:
    """Delete a file; batches that have begun are not disturbed."""
    service = await state.storage.get()
    await service.files.delete(file_id, owner_of(request))
    return json_reply(FileDeleted(id=file_id))


@router.get("/v1/files/{file_id}/content", response_model=None, response_class=FileResponse, responses=FAILURES)
async def file_content(request: Request, file_id: FileId, state: State) -> Response:
    """Send a file's bytes."""
    service = await state.storage.get()
    row = await service.files.get(file_id, owner_of(request))
    path = service.layout.file(str(row["id"]))
    if not await asyncio.to_thread(path.is_file):
        raise service.files.missing(file_id)
    headers = {"x-content-type-options": "nosniff", "content-disposition": "attachment"}
    return FileResponse(path, media_type="application/octet-stream", headers=headers)
