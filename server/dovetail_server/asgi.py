"""The outer ASGI layers: `Edge` names each request and says how it ended; `Guard` bounds bodies and catches exceptions.

Between the two stand the CORS headers, so that error replies carry them too; keys are checked behind both (`auth.py`).
"""

from __future__ import annotations

import re
import time
import uuid
from collections.abc import Mapping

from starlette.datastructures import Headers, MutableHeaders
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from dovetail.contracts.observers import HttpEnd
from dovetail.errors import RequestError
from dovetail_server.errors import ClientGoneError, queue_full_bytes, to_reply
from dovetail_server.observers import Observers
from dovetail_server.state import ServerState

SAFE_ID = re.compile(r"[\x21-\x7e]{1,128}")
METHODS = frozenset({"GET", "POST", "DELETE", "PUT", "PATCH", "HEAD", "OPTIONS"})


class Edge:
    """Gives each HTTP request its `x-request-id`, and tells observers how it ended."""

    def __init__(self, app: ASGIApp, observers: Observers) -> None:
        """Wrap `app`."""
        self.app = app
        self.observers = observers

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve one connection's request."""
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        given = Headers(scope=scope).get("x-request-id", "")
        request_id = given if SAFE_ID.fullmatch(given) else f"req_{uuid.uuid4().hex}"
        scope.setdefault("state", {})["request_id"] = request_id
        status: int | None = None

        async def send_with_id(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
                MutableHeaders(scope=message)["x-request-id"] = request_id
            await send(message)

        began = time.perf_counter()
        try:
            await self.app(scope, receive, send_with_id)
        finally:
            if self.observers:
                self.observers.http_ended(
                    HttpEnd(
                        request_id=request_id,
                        method=scope["method"] if scope["method"] in METHODS else "other",
                        route=route_of(scope),
                        status=status,
                        seconds=time.perf_counter() - began,
                    )
                )


def route_of(scope: Scope) -> str:
    """Return the path of the route that served a request, with its parameters as written in the document; "" if none.

    Never the path that was asked for: whoever asks for a million paths must not make a million routes.
    """
    return str(getattr(scope.get("route"), "path", ""))


class Guard:
    """Bounds bodies, each and all together, and answers whatever goes wrong below."""

    def __init__(self, app: ASGIApp, state: ServerState, streamed: Mapping[str, int]) -> None:
        """Wrap `app`.

        Args:
            app: What is guarded.
            state: The server's; it counts the bytes that are held.
            streamed: Limits of paths whose bodies go to the disk piece by piece, and do not count as held.
        """
        self.app = app
        self.state = state
        self.streamed = dict(streamed)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve one connection's request."""
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        state, path = self.state, scope["path"]
        is_held = path not in self.streamed
        limit = state.settings.max_body_bytes if is_held else self.streamed[path]
        num_bytes = 0
        started = False

        async def send_noting(message: Message) -> None:
            nonlocal started
            started = True
            await send(message)

        async def receive_bounded() -> Message:
            nonlocal num_bytes
            message = await receive()
            new = len(message.get("body", b""))
            self.check(num_bytes, new, limit, is_held=is_held)
            num_bytes += new
            if is_held:
                state.num_held_bytes += new
            return message

        try:
            length = Headers(scope=scope).get("content-length", "")
            if length.isdigit():
                self.check(0, int(length), limit, is_held=is_held)
            await self.app(scope, receive_bounded, send_noting)
        except ClientGoneError:
            return
        except Exception as error:
            if started:
                raise  # the reply is under way; uvicorn logs and closes the connection
            await to_reply(error)(scope, receive, send)
        finally:
            if is_held:
                state.num_held_bytes -= num_bytes

    def check(self, had: int, new: int, limit: int, *, is_held: bool) -> None:
        """Refuse a body that is too large, or for which there is no room now.

        Args:
            had: Bytes of it that have come.
            new: Bytes that come now.
            limit: Of this body.
            is_held: Whether it is kept in memory.
        """
        if had + new > limit:
            raise self.too_large(limit, is_held=is_held)
        held, most = self.state.num_held_bytes, self.state.settings.max_queued_bytes
        if is_held and held + new > most and held > had:  # alone, any body within its own limit is served
            raise queue_full_bytes(most)

    @staticmethod
    def too_large(limit: int, *, is_held: bool) -> RequestError:
        """Return the error for a body over the limit."""
        flag = "--max-body-bytes" if is_held else "--max-file-bytes"
        text = f"the request body is over {limit} bytes, the limit set by {flag}"
        return RequestError(text, code="body_too_large", status=413)
