"""Errors as Anthropic's clients read them."""

from __future__ import annotations

import msgspec

from dovetail.contracts.replies import Failure
from dovetail_server.apis.messages.schema import AnthropicError, AnthropicErrorDetail, UnsupportedThread
from dovetail_server.errors.body import ErrorDetail

PREFIX = "/v1/messages"
TYPES = {
    400: "invalid_request_error",
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    413: "request_too_large",
    429: "rate_limit_error",
    504: "timeout_error",
    529: "overloaded_error",
}
OVERLOADED = 529
NO_THREADS = "thread_unsupported_request"


def status_of(status: int, code: str | None) -> int:
    """Return Anthropic's status for ours: a full queue, and a server that cannot serve now, are overload."""
    return OVERLOADED if status == 503 or code == "queue_full" else status


def error_body(status: int, detail: ErrorDetail, request_id: str | None) -> AnthropicError:
    """Return the body of an error, which has no place for the field at fault: the message names it.

    Args:
        status: Anthropic's.
        detail: As our own body has it.
        request_id: The request's.
    """
    kind = TYPES.get(status, "invalid_request_error" if status < 500 else "api_error")
    message = detail.message
    if detail.param is not None and detail.param.removesuffix(".type") not in message:
        message = f"{detail.param}: {message}"
    details = UnsupportedThread() if detail.code == NO_THREADS else msgspec.UNSET
    return AnthropicError(
        error=AnthropicErrorDetail(type=kind, message=message, details=details), request_id=request_id
    )


def error_reply(failure: Failure, request_id: str | None) -> tuple[int, AnthropicError]:
    """Return Anthropic's status and body for an error."""
    detail = ErrorDetail(message=failure.message, type=failure.kind, param=failure.param, code=failure.code)
    status = status_of(failure.status, failure.code)
    return status, error_body(status, detail, request_id)
