"""`/v1/files`."""

from __future__ import annotations

from typing import Literal

import msgspec
from pydantic import Field

from dovetail_server.schema.common import RequestModel

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


class FileList(msgspec.Struct, frozen=True, kw_only=True):
    """A page of files."""

    object: Literal["list"] = "list"
    data: list[FileObject]
    first_id: str | None
    last_id: str | None
    has_more: bool


class FileDeleted(msgspec.Struct, frozen=True, kw_only=True):
    """Response of `DELETE /v1/files/{id}`."""

    id: str
    object: Literal["file"] = "file"
    deleted: bool = True
