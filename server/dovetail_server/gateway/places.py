"""What a gateway may do with the routes of its workers: they say so themselves."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from dovetail.contracts.api import Api, Route
from dovetail_server import app  # noqa: F401 imports all routes, which say where they go
from dovetail_server.apis.loaded import generating
from dovetail_server.openapi import PLACES
from dovetail_server.serving import run
from dovetail_server.serving.sse import error_event


class Places:
    """What a gateway may do with the routes of its workers."""

    def __init__(self, apis: Sequence[Api]) -> None:
        """Read it off the routes: those that generate, and those of `json_route`."""
        self._routes = {route.path: route for route in generating(apis)}
        self._places = PLACES | {path: route.place for path, route in self._routes.items()}

    def has_prefix(self, path: str) -> bool:
        """Whether the worker of a request is chosen by the beginning of its prompt."""
        return self._places.get(path) == "prefix"

    def is_held(self, path: str) -> bool:
        """Whether a body is small enough to be held, so that another worker can be asked again."""
        return path in self._places

    def resumes(self, path: str) -> bool:
        """Whether a stream can go on on another worker: only events have a place for its journal."""
        route = self._routes.get(path)
        return self.has_prefix(path) and (route is None or route.writer.media_type == "text/event-stream")

    def route(self, path: str) -> Route | None:
        """Return a route that generates."""
        return self._routes.get(path)

    def ending(self, path: str, request_id: str) -> Callable[[Exception], bytes]:
        """Return what writes the end of a stream that cannot go on, in the words of its API."""
        route = self._routes.get(path)
        return error_event if route is None else run.ending(route.writer, request_id)
