"""What a package's API brings is looked at before anything is served; its errors reach clients."""

from __future__ import annotations

import logging
import re
from collections.abc import Callable, Iterator, Sequence
from contextlib import nullcontext
from dataclasses import fields
from types import SimpleNamespace
from typing import Any, ClassVar

import msgspec
import pytest
from harness import Harness
from msgspec.structs import replace
from package_apis import ONE, WHO, Loose, Says, Strange
from pydantic import BaseModel, ConfigDict

from dovetail.contracts.api import Api, Route, ServerFacts, View
from dovetail.contracts.errors import PluginError, RequestError
from dovetail.contracts.replies import Writer
from dovetail.contracts.requests import JsonObject, Request
from dovetail.plugins import PlannedPlugin, PluginPlan
from dovetail.processing.apis import routes_of
from dovetail_server.apis.guarded import Guarded
from dovetail_server.apis.loaded import made as apis_made
from dovetail_server.apis.routes import BUILT_IN
from dovetail_server.start.app import check_apis


@pytest.mark.parametrize("status", [None, "400", 200, 99, 9999, True])
def test_an_error_reaches_the_client_whatever_its_api_does(
    status: Any, loose: Loose, loose_server: Harness, caplog: pytest.LogCaptureFixture
) -> None:
    """Where `failed` raises or gives no status of an error, the client reads this server's words, and the log tells."""
    loose.status, loose.made = status, replace(ONE, model="nobody")
    with caplog.at_level(logging.ERROR, "dovetail.server"):
        reply = loose_server.post("/loose/say", {})
    assert (reply.status_code, reply.json()["error"]["code"]) == (404, "model_not_found")
    assert f"{WHO}.failed()" in caplog.text


def test_a_refusal_has_the_status_of_an_error() -> None:
    """Any other could not be sent, or would be read as a reply."""
    for status in (200, 302, 99, 999):
        with pytest.raises(ValueError, match="possible: 400 to 599"):
            RequestError("no", status=status)


def test_foreign_errors_are_not_described_as_ours(loose_server: Harness) -> None:
    """On a path that an API owns the OpenAPI document claims no form of errors that nobody described."""
    paths = loose_server.get("/openapi.json").json()["paths"]
    for path, method in (("/loose/say", "post"), ("/loose/show", "get")):
        route = paths[path][method]
        assert route["responses"]["4XX"]["content"]["application/json"]["schema"] == {}
        assert route["tags"] == ["plugins"]


@pytest.mark.parametrize("kept", [(), BUILT_IN[:1], BUILT_IN[1:]])
def test_the_document_has_what_is_served(kept: tuple[Api, ...], make_harness: Callable[..., Harness]) -> None:
    """Whatever `--apis` leaves out, as the tutorial's package does, the page and its examples are of the others."""
    served = make_harness(apis=(*kept, Loose()))
    paths = served.get("/openapi.json").json()["paths"]
    assert "/loose/say" in paths
    assert ("post" in paths["/v1/chat/completions"]) is (BUILT_IN[0] in kept)
    assert served.get("/docs").status_code == 200


class OneView(Api):
    view: ClassVar[dict[str, Any]] = {}

    def routes(self) -> Sequence[Route | View]:
        def show(facts: ServerFacts, body: JsonObject) -> JsonObject:
            return {}

        return [View(**{"name": "one", "path": "/one", "about": "One.", "show": show} | self.view)]


def with_view(**fields: Any) -> Api:
    return type("Faulty", (OneView,), {"view": fields})()


def with_route(**fields: Any) -> Api:
    route: dict[str, Any] = {"name": "one", "path": "/one", "about": "One.", "read": print, "writer": Says}
    return type("Faulty", (Loose,), {"routes": lambda self: [Route(**route | fields)], "owns": ()})()


def owning(owns: Any) -> Api:
    return type("Faulty", (Loose,), {"owns": owns})()


class Undescribed(BaseModel):
    model_config = ConfigDict(arbitrary_types_allowed=True)
    given: Harness


class Twin(msgspec.Struct):
    """The first of two schemas of one name."""


def other_twin() -> type[msgspec.Struct]:
    return msgspec.defstruct("Twin", [("a", int)], module=__name__)


def faults() -> Iterator[tuple[Api, str]]:
    yield type("Faulty", (Loose,), {"routes": lambda self: None})(), r"routes\(\) returned NoneType"
    yield with_view(path="/{any:path}"), "neither parameters"
    yield with_view(path="one"), "begins with /"
    yield with_view(about=""), "about is ''"
    yield with_view(method="PUT"), "possible: GET, POST"
    yield with_view(show=None), "give a function"
    yield with_view(error=dict), "give a msgspec.Struct"
    yield with_route(writer=dict), "give a class made of"
    yield with_route(writer=Writer), "does not implement failed, step, whole"
    yield with_route(writer=type("Odd", (Says,), {"keep_alive": ""})), "keep_alive must be bytes"
    yield with_route(writer=type("Odd", (Says,), {"keep_alive": bytes(2000)})), "at most 1024"
    yield with_route(writer=type("Odd", (Says,), {"media_type": "text/x\r\nset-cookie: a=b"})), "media_type is"
    yield with_route(writer=type("Odd", (Says,), {"media_type": ""})), "media_type is"
    yield with_route(id_prefix="\ud800"), "id_prefix is"
    yield with_route(about="\ud800"), "about is"
    yield with_route(tag="a\nb"), "tag is"
    yield with_route(writer=type("Odd", (Says,), {"reports_aborts": property(print)})), "reports_aborts is"
    yield with_route(body=dict), "give a pydantic model"
    yield with_route(body=Undescribed), "body cannot be described as a JSON schema"
    yield with_route(reply=msgspec.defstruct("Undescribed", [("a", ServerFacts | Twin | dict)])), "reply cannot be desc"
    yield with_route(read="read"), "give a function"
    yield with_route(place="moon"), "possible: prefix, any"
    yield with_route(reply=Twin, error=other_twin()), "two schemas are called Twin"
    yield owning("/loose"), "give paths in a tuple"
    yield owning(("/",)), "more behind it"
    yield owning(("loose",)), "begins with /"
    yield type("Faulty", (OneView,), {"owns": ("/one",)})(), r"has no failed\(\)"


@pytest.mark.parametrize(("api", "why"), list(faults()))
def test_an_api_that_cannot_be_served_is_refused(api: Api, why: str) -> None:
    """What the server would stumble over later is said before it starts; the kit asks the same function."""
    with pytest.raises(ValueError, match=why):
        routes_of(api)


@pytest.mark.parametrize(
    "fields",
    [
        {"path": "/health"},
        {"path": "/livez", "method": "POST"},
        {"path": "/metrics", "method": "POST"},
        {"path": "/v1/models/mine"},
        {"name": "create_response"},
        {"name": "tokenize"},
    ],
)
def test_an_api_replaces_nothing_of_the_server(fields: dict[str, str]) -> None:
    """A path or a name that the server has itself stays the server's, with any method: some need no key."""
    with pytest.raises(PluginError, match="the server's own"):
        check_apis([*BUILT_IN, with_view(**fields)])


@pytest.mark.parametrize("at", ["init", "routes"])
def test_a_start_names_who_raised(at: str) -> None:
    """Also what is no `Exception`, and a class that wants arguments."""

    class Bad(Loose):
        def __init__(self, *, need: int) -> None:
            """Want an argument."""

    class Worse(Loose):
        def routes(self) -> Sequence[Route | View]:
            raise KeyboardInterrupt

    kind = Bad if at == "init" else Worse
    target = f"{__name__}:{kind.__name__}"
    planned = PlannedPlugin(kind="api", name="bad", distribution="acme", version="1.0", target=target, api=1, roles=[])
    loaded: Any = SimpleNamespace(
        plan=PluginPlan(plugins=(planned,)), candidates=lambda kind_: [(planned, kind)], watched=lambda _: nullcontext()
    )
    with pytest.raises(PluginError, match=r"api 'bad' of acme 1\.0: "):
        apis_made(loaded)


class Final(Says):
    """Lets nobody make a class of it."""

    def __init_subclass__(cls) -> None:
        raise TypeError("final")


def test_a_writer_that_cannot_be_watched_is_refused() -> None:
    """By name, where the API is made."""
    api = with_route(writer=Final)
    with pytest.raises(PluginError, match=r"/one: a class made of Final raised TypeError"):
        Guarded(api, WHO, routes_of(api))


class Swapped(Route):
    """A route whose requests nobody looks at."""

    def requests(self, body: Any) -> list[Request]:
        raise SystemExit(3)


def test_a_route_of_a_class_of_its_own_is_watched(loose: Loose, make_harness: Callable[..., Harness]) -> None:
    """What such a class overrides is not called."""
    given = {field.name: getattr(loose.routes()[0], field.name) for field in fields(Route)}
    served = make_harness(apis=(*BUILT_IN, Guarded(loose, WHO, [Swapped(**given)])))
    assert served.post("/loose/say", {}).status_code == 200


def test_an_api_tells_of_no_errors_of_the_server(strange: Strange) -> None:
    """A probe's reply is not a package's."""
    with pytest.raises(PluginError, match=re.escape(f"{WHO} tells of errors on /livez, which is")):
        check_apis([*BUILT_IN, Guarded(type("Owner", (Strange,), {"owns": ("/livez",)})(), WHO, strange.routes())])
