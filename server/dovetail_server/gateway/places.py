"""What a gateway may do with the routes of its workers: they say so themselves."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from dovetail.contracts.api import Api, Route
from dovetail_server import app  # noqa: F401 imports all routes, which say where they go
from dovetail_server.apis.loaded import generating, of_packages
from dovetail_server.gateway.prompts import MAX_TEXT_BYTES, beginning
from dovetail_server.http.journal import END, end_of
from dovetail_server.openapi import PLACES
from dovetail_server.serving import run
from dovetail_server.serving.sse import error_event


class Places:
    """What a gateway may do with the routes of its workers."""

    def __init__(self, apis: Sequence[Api]) -> None:
        """Read it off the routes: those that generate, and those of `json_route`."""
        self._routes = {route.path: route for route in generating(apis)}
        self._foreign = of_packages(apis)
        self._places = PLACES | {path: route.place for path, route in self._routes.items()}

    def prompt(self, path: str, body: bytes) -> str | None:
        """Return the beginning of a request's prompt if its worker is chosen by that; else None.

        Only a package knows which of its fields are the prompt. Bodies that one client wrote are equal as far as their
        prompts are, for the most part.
        """
        if self._places.get(path) != "prefix":
            return None
        found = beginning(body)
        return body[:MAX_TEXT_BYTES].decode("utf-8", "replace") if found is None and path in self._foreign else found

    def is_held(self, path: str) -> bool:
        """Whether a body is small enough to be held, so that another worker can be asked again."""
        return path in self._places

    def resumes(self, path: str) -> bool:
        """Whether a stream can go on on another worker: events and lines have a place for its journal.

        What lines of JSON say in a silence could not be told from what they say otherwise.
        """
        route = self._routes.get(path)
        if route is None:
            return self._places.get(path) == "prefix"
        end = end_of(route.writer.media_type)
        return end == END or (end is not None and not route.writer.keep_alive)

    def route(self, path: str) -> Route | None:
        """Return a route that generates."""
        return self._routes.get(path)

    def ending(self, path: str, request_id: str) -> Callable[[Exception], bytes]:
        """Return what writes the end of a stream that cannot go on, in the words of its API."""
        route = self._routes.get(path)
        return error_event if route is None else run.ending(route.writer, request_id)
