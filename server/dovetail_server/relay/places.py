"""What a gateway may do with the routes of its workers: they say so themselves."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import msgspec

from dovetail.contracts.api import Api, Route
from dovetail_server.apis.guarded import watch
from dovetail_server.apis.loaded import generating, named_apis, of_packages
from dovetail_server.http.auth import Keys
from dovetail_server.http.journal import END, end_of
from dovetail_server.openapi.document import PLACES
from dovetail_server.serving import run
from dovetail_server.serving.hooks import ApiHooks
from dovetail_server.serving.sse import error_event
from dovetail_server.settings.serve import ServeSettings
from dovetail_server.start import app  # noqa: F401 imports all routes, which say where they go
from dovetail_server.tenants.tenant import Tenant

MAX_PARSED_BYTES = 1 << 20
"""Larger bodies are not looked into, which would hold up every other request."""
MAX_TEXT_BYTES = 1 << 15
"""Enough to tell prompts apart: two that are equal so far share some eight thousand tokens."""


class PromptStart(msgspec.Struct):
    """The fields that prompts are made of, as they were written, of all APIs."""

    tools: msgspec.Raw = msgspec.Raw()
    instructions: msgspec.Raw = msgspec.Raw()
    system: msgspec.Raw = msgspec.Raw()
    messages: msgspec.Raw = msgspec.Raw()
    prompt: msgspec.Raw = msgspec.Raw()
    input: msgspec.Raw = msgspec.Raw()
    text: msgspec.Raw = msgspec.Raw()
    input_ids: msgspec.Raw = msgspec.Raw()


ORDER = PromptStart.__struct_fields__
decode = msgspec.json.Decoder(PromptStart).decode


def beginning(body: bytes) -> str | None:
    """Return what a body's prompt begins with, in the order of templates; None if the body says nothing of it.

    Prompts that are equal to a place give texts that are equal to a place, if one client wrote both: nothing of a body
    is normalised.
    """
    if len(body) > MAX_PARSED_BYTES:
        return body[:MAX_TEXT_BYTES].decode("utf-8", "replace")
    try:
        prompt = decode(body)
    except (msgspec.MsgspecError, UnicodeDecodeError):
        return None  # the worker says what is wrong with it
    text = b"".join(bytes(getattr(prompt, name))[:MAX_TEXT_BYTES] for name in ORDER)[:MAX_TEXT_BYTES]
    return text.decode("utf-8", "replace") or None


class RelayState:
    """What stands in front of servers: its keys, its limits, and what it may do with their routes.

    Attributes:
        num_held_bytes: Bytes of request bodies in memory, and `held_by` whose they are.
        num_kept_bytes: Of the journals of all streams, and of the replies that are held.
        places: What may be done with the routes of the servers.
    """

    def __init__(self, settings: ServeSettings) -> None:
        """Find the APIs of the settings; the keys count nothing, as those of the servers do."""
        self.settings = settings
        self.keys = Keys.of(settings, counts=False)
        self.hooks = ApiHooks()
        self.num_held_bytes = 0
        self.held_by: dict[Tenant, int] = {}
        self.num_kept_bytes = 0
        self.apis = named_apis(settings)
        watch(self.apis)
        self.places = Places(self.apis)


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
