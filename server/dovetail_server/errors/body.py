"""The error body that every endpoint answers with."""

from __future__ import annotations

import msgspec


class ErrorDetail(msgspec.Struct, frozen=True, kw_only=True):
    """What went wrong. `type` is coarse (OpenAI's words), `code` is stable and may be null."""

    message: str
    type: str
    param: str | None = None
    code: str | None = None


class ErrorBody(msgspec.Struct, frozen=True):
    """`{"error": {…}}`."""

    error: ErrorDetail
