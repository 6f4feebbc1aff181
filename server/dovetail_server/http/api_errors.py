"""Errors in the words of the API on whose paths they come: one layer around everything that answers there."""

from __future__ import annotations

import logging
from collections.abc import Sequence

import msgspec
from starlette.datastructures import MutableHeaders
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from dovetail.contracts.api import Api
from dovetail.contracts.replies import Failure
from dovetail_server.errors.body import ErrorBody

logger = logging.getLogger("dovetail.server")


class ApiErrors:
    """Writes errors on the paths that an API owns in its words, and names the request in its header."""

    def __init__(self, app: ASGIApp, apis: Sequence[Api]) -> None:
        """Wrap `app`, which answers with this server's own errors and `x-request-id`."""
        self.app = app
        self._owners = [(path, f"{path}/", api) for api in apis for path in api.owns]

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve one connection's request."""
        if scope["type"] == "http":
            for path, below, api in self._owners:  # spelled out, as it is asked for every request
                if scope["path"] == path or scope["path"].startswith(below):
                    send = _Translator(send, api)
                    break
        await self.app(scope, receive, send)


def failure_reply(api: Api, failure: Failure, request_id: str | None) -> tuple[int, bytes]:
    """Return the status and the body of an error in the words of an API.

    Raises:
        ValueError: The status is none of an error.
    """
    status, body = api.failed(failure, request_id)
    if isinstance(status, bool) or not isinstance(status, int) or not 400 <= status <= 599:
        raise ValueError(f"failed() gives the status {status!r}; possible: 400 to 599")
    return status, msgspec.json.encode(body)


class _Translator:
    """Passes replies on; an error is held back until it is whole."""

    def __init__(self, send: Send, api: Api) -> None:
        self.send = send
        self.api = api
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
            failure = Failure(start["status"], error.message, error.type, error.param, error.code)
            try:
                start["status"], body = failure_reply(self.api, failure, headers.get("x-request-id"))
            except Exception:
                # A stranger's code. The client reads this server's words rather than nothing.
                logger.exception("%s.failed() cannot tell of an error", self.api)
            headers["content-length"] = str(len(body))
        await self.send(start)
        await self.send({"type": "http.response.body", "body": body})
