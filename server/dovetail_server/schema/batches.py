"""`/v1/files` and `/v1/batches`."""

from __future__ import annotations

from typing import Annotated, Literal

import msgspec
from pydantic import Field

from dovetail_server.schema.common import Name, Page, RequestModel

PURPOSES = ("batch", "assistants", "fine-tune", "vision", "user_data", "evals")
Purpose = Literal["batch", "assistants", "fine-tune", "vision", "user_data", "evals"]
MIN_EXPIRY_S = 3600
MAX_EXPIRY_S = 30 * 24 * 3600


class ExpiresAfter(RequestModel):
    """When a file is deleted automatically."""

    anchor: Literal["created_at"]
    seconds: int = Field(ge=MIN_EXPIRY_S, le=MAX_EXPIRY_S)


class FileUpload(RequestModel):
    """The form of `POST /v1/files`; `expires_after` is sent as `expires_after[anchor]` and `expires_after[seconds]`."""

    file: str = Field(max_length=512 << 20, json_schema_extra={"format": "binary"})
    purpose: Purpose
    expires_after: ExpiresAfter | None = None


class FileObject(msgspec.Struct, frozen=True, kw_only=True):
    """A file; `status` is always `processed`."""

    id: str
    object: Literal["file"] = "file"
    bytes: int
    created_at: int
    expires_at: int | msgspec.UnsetType = msgspec.UNSET
    filename: str
    purpose: str
    status: Literal["processed"] = "processed"


class FileList(Page, frozen=True, kw_only=True):
    """A page of files."""

    data: list[FileObject]


class FileDeleted(msgspec.Struct, frozen=True, kw_only=True):
    """Response of `DELETE /v1/files/{id}`."""

    id: str
    object: Literal["file"] = "file"
    deleted: bool = True


FileId = Annotated[str, Field(min_length=1, max_length=64)]
Metadata = Annotated[dict[Annotated[str, Field(min_length=1, max_length=64)], Name], Field(max_length=16)]


class BatchRequest(RequestModel):
    """Body of `POST /v1/batches`."""

    input_file_id: FileId
    endpoint: Annotated[str, Field(max_length=64)]
    completion_window: Literal["24h"]
    metadata: Metadata | None = None
    output_expires_after: ExpiresAfter | None = None


class BatchError(msgspec.Struct, frozen=True, kw_only=True):
    """One error of the input file."""

    code: str
    message: str
    param: str | None = None
    line: int | None = None


class BatchErrors(msgspec.Struct, frozen=True, kw_only=True):
    """Why a batch failed."""

    object: Literal["list"] = "list"
    data: list[BatchError]


class RequestCounts(msgspec.Struct, frozen=True, kw_only=True):
    """Lines of a batch."""

    total: int
    completed: int
    failed: int


class InputTokensDetails(msgspec.Struct, frozen=True):
    """Part of `usage`."""

    cached_tokens: int


class OutputTokensDetails(msgspec.Struct, frozen=True):
    """Part of `usage`."""

    reasoning_tokens: int


class BatchUsage(msgspec.Struct, frozen=True, kw_only=True):
    """Tokens of all answered lines."""

    input_tokens: int
    input_tokens_details: InputTokensDetails
    output_tokens: int
    output_tokens_details: OutputTokensDetails
    total_tokens: int


class Batch(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """A batch; times are seconds since 1970. What it has not yet, or never will, is left out."""

    id: str
    object: Literal["batch"]
    endpoint: str
    model: str | None = None
    errors: BatchErrors | None = None
    input_file_id: str
    completion_window: str
    status: str
    output_file_id: str | None = None
    error_file_id: str | None = None
    created_at: int
    in_progress_at: int | None = None
    expires_at: int | None = None
    finalizing_at: int | None = None
    completed_at: int | None = None
    failed_at: int | None = None
    expired_at: int | None = None
    cancelling_at: int | None = None
    cancelled_at: int | None = None
    request_counts: RequestCounts
    usage: BatchUsage
    metadata: dict[str, str] | None = None


class BatchList(Page, frozen=True, kw_only=True):
    """A page of batches."""

    data: list[Batch]


class Line(msgspec.Struct):
    """A line of an input file; `body` stays as it is written."""

    custom_id: str
    method: str
    url: str
    body: msgspec.Raw


decode_line = msgspec.json.Decoder(Line).decode
