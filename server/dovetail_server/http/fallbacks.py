"""What no route has, and is answered all the same or refused in words: HEAD of a GET, WebSockets, pages' questions."""

from __future__ import annotations

from collections.abc import Sequence

from starlette.datastructures import Headers
from starlette.exceptions import HTTPException
from starlette.middleware.cors import CORSMiddleware
from starlette.responses import Response
from starlette.routing import BaseRoute, Match
from starlette.types import Receive, Scope, Send

from dovetail_server.errors.catalogue import no_websocket, refuse_websocket, to_reply
from dovetail_server.http.auth import foreign_page


class HeadRoute(BaseRoute):
    """The last route: has whatever answers GET answer HEAD, of which the connection sends no body."""

    def __init__(self, routes: Sequence[BaseRoute]) -> None:
        """Stand for those of `routes` that have no HEAD of their own."""
        self.routes = routes

    def _found(self, scope: Scope) -> tuple[BaseRoute, Scope] | None:
        for route in self.routes:
            if route is not self:
                match, found = route.matches({**scope, "method": "GET"})
                if match is Match.FULL:
                    return route, found
        return None

    def matches(self, scope: Scope) -> tuple[Match, Scope]:
        """Match a HEAD whose GET is served."""
        is_head = scope["type"] == "http" and scope["method"] == "HEAD"
        found = self._found(scope) if is_head else None
        return (Match.NONE, {}) if found is None else (Match.FULL, {**found[1], "route": found[0]})

    async def handle(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer as the GET. The scope is the connection's, which goes by its method, so the route gets another one."""
        found = self._found(scope)
        if found is not None:
            route, more = found
            scope.update(more)
            await route.handle({**scope, "method": "GET"}, receive, send)


async def no_route(scope: Scope, receive: Receive, send: Send) -> None:
    """Answer what leads to no route.

    Raises:
        HTTPException: It is HTTP, whose handler words the reply.
    """
    if scope["type"] != "websocket":
        raise HTTPException(404)
    await refuse_websocket(no_websocket(scope["path"]), scope, receive, send)


class Cors(CORSMiddleware):
    """Starlette's, which says why a page is refused."""

    def preflight_response(self, request_headers: Headers) -> Response:
        """Answer a browser's question for a page."""
        if not self.is_allowed_origin(origin=request_headers["origin"]):
            return to_reply(foreign_page())
        return super().preflight_response(request_headers)
