"""The outermost ASGI layer: request ids, the body limit, and the last catch for exceptions."""

from __future__ import annotations

import re
import uuid
from collections.abc import Mapping

from starlette.datastructures import Headers, MutableHeaders
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from dovetail.errors import RequestError
from dovetail_server.errors import ClientGoneError, to_reply

SAFE_ID = re.compile(r"[\x21-\x7e]{1,128}")


class Edge:
    """Gives each HTTP request its `x-request-id`, bounds its body, and answers whatever goes wrong below."""

    def __init__(self, app: ASGIApp, max_body_bytes: int, larger: Mapping[str, int] | None = None) -> None:
        """Wrap `app`; `larger` are the limits of paths that have their own."""
        self.app = app
        self.max_body_bytes = max_body_bytes
        self.larger = dict(larger or {})

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve one connection's request."""
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        headers = Headers(scope=scope)
        given = headers.get("x-request-id", "")
        request_id = given if SAFE_ID.fullmatch(given) else f"req_{uuid.uuid4().hex}"
        scope.setdefault("state", {})["request_id"] = request_id
        started = False
        num_bytes = 0
        limit = self.larger.get(scope["path"], self.max_body_bytes)

        async def send_with_id(message: Message) -> None:
            nonlocal started
            if message["type"] == "http.response.start":
                started = True
                MutableHeaders(scope=message)["x-request-id"] = request_id
            await send(message)

        async def receive_bounded() -> Message:
            nonlocal num_bytes
            message = await receive()
            num_bytes += len(message.get("body", b""))
            if num_bytes > limit:
                raise self.too_large(limit)
            return message

        try:
            length = headers.get("content-length", "")
            if length.isdigit() and int(length) > limit:
                raise self.too_large(limit)
            await self.app(scope, receive_bounded, send_with_id)
        except ClientGoneError:
            return
        except Exception as error:
            if started:
                raise  # the reply is under way; uvicorn logs and closes the connection
            await to_reply(error)(scope, receive, send_with_id)

    def too_large(self, limit: int) -> RequestError:
        """Return the error for a body over the limit."""
        flag = "--max-body-bytes" if limit == self.max_body_bytes else "--max-file-bytes"
        text = f"the request body is over {limit} bytes, the limit set by {flag}"
        return RequestError(text, code="body_too_large", status=413)
