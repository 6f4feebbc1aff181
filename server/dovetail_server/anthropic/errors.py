"""Errors as Anthropic's clients read them, on its routes: one layer around everything that answers there."""

from __future__ import annotations

import msgspec
from starlette.datastructures import MutableHeaders
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from dovetail_server.anthropic.schema import AnthropicError, AnthropicErrorDetail, UnsupportedThread
from dovetail_server.openai.errors import ErrorBody, ErrorDetail

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
    if detail.param is not None and detail.param not in message:
        message = f"{detail.param}: {message}"
    details = UnsupportedThread() if detail.code == NO_THREADS else msgspec.UNSET
    return AnthropicError(
        error=AnthropicErrorDetail(type=kind, message=message, details=details), request_id=request_id
    )


def is_here(path: str) -> bool:
    """Tell whether a path is one of Anthropic's routes."""
    return path == PREFIX or path.startswith(f"{PREFIX}/")


class AnthropicErrorMiddleware:
    """Writes errors of Anthropic's routes in its words, and names the request in its header."""

    def __init__(self, app: ASGIApp) -> None:
        """Wrap `app`, which answers with this server's own errors and `x-request-id`."""
        self.app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve one connection's request."""
        if scope["type"] != "http" or not is_here(scope["path"]):
            await self.app(scope, receive, send)
            return
        await self.app(scope, receive, _Translator(send))


class _Translator:
    """Passes replies on; an error is held back until it is whole."""

    def __init__(self, send: Send) -> None:
        self.send = send
        self.start: Message | None = None
        self.body = b""

    async def __call__(self, message: Message) -> None:
        if message["type"] == "http.response.start":
            headers = MutableHeaders(scope=message)
            if "x-request-id" in headers:
                headers["request-id"] = headers["x-request-id"]
            if message["status"] >= 400:
                self.start = message
                return
        elif self.start is not None:
            self.body += message.get("body", b"")
            if not message.get("more_body", False):
                await self._send_error(self.start)
            return
        await self.send(message)

    async def _send_error(self, start: Message) -> None:
        body = self.body
        try:
            error = msgspec.json.decode(body, type=ErrorBody).error
        except msgspec.DecodeError:
            pass  # not one of our errors: it goes out as it is
        else:
            headers = MutableHeaders(scope=start)
            start["status"] = status_of(start["status"], error.code)
            body = msgspec.json.encode(error_body(start["status"], error, headers.get("request-id")))
            headers["content-length"] = str(len(body))
        await self.send(start)
        await self.send({"type": "http.response.body", "body": body})
