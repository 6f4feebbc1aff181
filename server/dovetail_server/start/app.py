"""The FastAPI application: routes, the outer layer, error replies, and the OpenAPI document."""

from __future__ import annotations

import asyncio
import difflib
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING, Any, Protocol

from fastapi import APIRouter, FastAPI, Request
from fastapi.exceptions import RequestValidationError
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.responses import Response
from starlette.routing import Mount, Route
from starlette.types import ASGIApp

import dovetail
from dovetail.contracts.api import Api, View
from dovetail.contracts.errors import EngineError, PluginError, RequestError
from dovetail_server.apis.guarded import Guarded
from dovetail_server.apis.loaded import is_below
from dovetail_server.compat.endpoints import why_not
from dovetail_server.errors import catalogue as errors
from dovetail_server.errors.body import ErrorDetail
from dovetail_server.http.addresses import Addresses, Routes
from dovetail_server.http.api_errors import ApiErrors
from dovetail_server.http.asgi import BodyLimitMiddleware, RequestIdMiddleware
from dovetail_server.http.auth import CALLER, OPEN, Auth, Keys, may_be_open, open_paths
from dovetail_server.http.fallbacks import Cors, HeadRoute, no_route
from dovetail_server.http.held import Holder
from dovetail_server.http.hosts import HostRules, Hosts
from dovetail_server.http.journal import MAX_JOURNAL_BYTES, Resumable
from dovetail_server.http.journal import PATH as RESUME_PATH
from dovetail_server.openapi.document import complete
from dovetail_server.reading.tasks import OWN_NAMES
from dovetail_server.routes import (
    admin,
    batches,
    conversations,
    docs,
    files,
    generating,
    health,
    info,
    message_batches,
    models,
    playground,
    profile,
    render,
    response_socket,
    responses,
    stored_completions,
    worked,
)
from dovetail_server.schema.unknown import LeavesOut
from dovetail_server.serving.hooks import ApiHooks, PluginRoute
from dovetail_server.state import ServerState
from dovetail_server.tenants.tenant import RATE_HEADERS

if TYPE_CHECKING:
    from dovetail_server.settings.serve import ServeSettings

FORM_BYTES = 1 << 16
"""What a form may have around its file."""
MAX_NEAR = 128
"""Characters of an unknown path that is compared with all routes."""
DESCRIPTION = (
    "OpenAI's and Anthropic's APIs, SGLang's native one. Errors are `{\"error\": {message, type, param, code}}`."
)


ROUTERS = (
    render.router,  # before the routes that take any id in the place of its name
    stored_completions.router,
    responses.router,
    conversations.router,
    message_batches.router,
    worked.router,
    models.router,
    files.router,
    batches.router,
    info.router,
    health.router,
    admin.router,
    profile.router,
    docs.router,
)
"""All routes but those of APIs and the playground, in the order in which they are looked at.

What is stored (files, batches, responses, conversations) is served here and by no API: its database is the server's,
and outlives the choice of APIs.
"""


def routers(settings: ServeSettings, apis: Sequence[Api]) -> list[APIRouter]:
    """Return what is served."""
    return [generating.router_of(apis), *ROUTERS, *(() if settings.disable_playground else (playground.router,))]


def check_apis(apis: Sequence[Api], beside: Sequence[Route] = ()) -> None:
    """Hold the routes of APIs against the server's own, and those `beside` them, which they may not replace.

    Raises:
        PluginError: A path is one of the server's, or a name is: names tell processes what to read.
    """
    own = [route for router in (*ROUTERS, playground.router) for route in router.routes if isinstance(route, Route)]
    own += beside
    names = {route.name for route in own} | OWN_NAMES
    keyless = may_be_open()  # by path, whatever the method
    for api in apis:
        owns = api.owns if isinstance(api, Guarded) else ()
        for path in (one.path for one in own if any(is_below(one.path, at) for at in owns)):
            raise PluginError(f"{api} tells of errors on {path}, which is the server's own; let it own other paths")
        for route in api.routes():
            method = route.method if isinstance(route, View) else "POST"
            taken = route.path in keyless or any(
                method in (one.methods or ()) and one.path_regex.match(route.path) for one in own
            )
            what = f"path {route.path}" if taken else f"name {route.name!r}" if route.name in names else ""
            if what:
                raise PluginError(f"{api} brings the {what}, which is the server's own; give it another")


def create_app(state: ServerState) -> FastAPI:
    """Build the application of one server."""

    @asynccontextmanager
    async def lifespan(_: FastAPI) -> AsyncIterator[None]:
        yield
        await state.storage.close()
        await asyncio.to_thread(state.close_children)
        await asyncio.to_thread(state.hooks.observers.close)

    app = FastAPI(
        title="Dovetail",
        version=dovetail.__version__,
        description=DESCRIPTION,
        docs_url=None,  # FastAPI's loads scripts from elsewhere
        redoc_url=None,
        exception_handlers={**HANDLERS, RequestValidationError: handle_validation},
        lifespan=lifespan,
    )
    app.state.server = state
    paths: list[tuple[str, set[str]]] = []
    for router in routers(state.settings, state.apis):
        app.router.routes += router.routes  # included, they would be made again for each application and matched twice
        paths += [(route.path, route.methods or set()) for route in router.routes if isinstance(route, Route)]
        state.hooks.check_free(route.path_regex for route in router.routes if isinstance(route, Route))
    app.state.paths = paths
    for path, endpoint in state.hooks.routes.items():
        app.router.routes.append(PluginRoute(path, endpoint, include_in_schema=False))
    app.router.routes.append(response_socket.route)
    app.router.routes.append(HeadRoute(app.router.routes))
    app.router.default = no_route
    upload_bytes = max(state.settings.max_body_bytes, state.settings.max_file_bytes + FORM_BYTES)
    resume_bytes = state.settings.max_body_bytes + 2 * MAX_JOURNAL_BYTES
    app.add_middleware(Resumable, key=state.settings.resume_key)
    if state.settings.unknown_fields == "warn":
        app.add_middleware(LeavesOut, fields=state.unknown_fields)
    add_layers(app, state, {"/v1/files": upload_bytes, RESUME_PATH: resume_bytes})
    build_schema = app.openapi

    def openapi() -> dict[str, Any]:
        if app.openapi_schema is None:
            app.openapi_schema = complete(
                build_schema(),
                model=state.served_names[0],
                needs_key=state.keys.are_needed,
                unlocked=open_paths(state.settings),
            )
        return app.openapi_schema

    app.openapi = openapi  # type: ignore[method-assign]  # FastAPI's documented way to extend the document
    return app


class Layered(Holder, Protocol):
    """What the layers need of their server."""

    keys: Keys
    """Who may come in."""

    @property
    def apis(self) -> Sequence[Api]:
        """Those whose routes generate here."""

    @property
    def hooks(self) -> ApiHooks:
        """Whose observers are told of requests."""


def add_layers(app: Starlette, state: Layered, streamed: dict[str, int], beside: Sequence[Route] = ()) -> None:
    """Put the layers around the routes, the innermost first; `beside` are those that every server does not have.

    Raises:
        PluginError: See `check_apis`.
    """
    check_apis(state.apis, beside)
    settings = state.settings
    app.add_middleware(Auth, keys=state.keys, origins=settings.allow_origins, open_paths=open_paths(settings))
    app.add_middleware(Hosts, rules=HostRules.of(settings), exempt=OPEN)
    app.add_middleware(BodyLimitMiddleware, state=state, streamed=streamed)
    if settings.allow_origins:
        # A browser asks before it sends the key: those questions are answered here, for these origins only.
        app.add_middleware(
            Cors,
            allow_origins=settings.allow_origins,
            allow_methods=["GET", "POST", "DELETE"],
            allow_headers=["*"],
            expose_headers=["x-request-id", "retry-after", *RATE_HEADERS],
            max_age=600,
        )
    app.add_middleware(RequestIdMiddleware, observers=state.hooks.observers)
    app.add_middleware(ApiErrors, apis=state.apis)
    own = [route.path for route in app.routes if isinstance(route, Route)]
    paths = [
        route.path for router in routers(settings, state.apis) for route in router.routes if isinstance(route, Route)
    ]
    app.add_middleware(Addresses, routes=Routes([*own, *paths]), root_path=settings.root_path)


def make_relay_app(state: Layered, own: Sequence[Route], relay: ASGIApp, streamed: dict[str, int]) -> Starlette:
    """Build an application that has a few routes of its own and relays all other requests, behind the same layers.

    Raises:
        PluginError: An API takes a path that is the application's own.
    """
    app = Starlette(routes=[*own, Mount("/", app=relay)], exception_handlers=HANDLERS)
    app.state.server = state
    add_layers(app, state, streamed, own)
    return app


async def handle_error(request: Request, error: Exception) -> Response:
    """Answer an error of ours."""
    return errors.to_reply(error, is_admin=CALLER.get().may_admin)


def nearest_route(app: FastAPI, method: str, path: str) -> str | None:
    """Return the route that was probably meant: `/v1` in front of one that is not below it, or a slip."""
    if len(path) > MAX_NEAR:
        return None
    paths = [known for known, methods in app.state.paths if method in methods]
    if (meant := path.removeprefix("/v1")) in paths:
        return meant
    return next(iter(difflib.get_close_matches(path, paths, n=1, cutoff=0.8)), None)


async def handle_http(request: Request, error: Exception) -> Response:
    """Answer an unknown path or a wrong method."""
    status = getattr(error, "status_code", 500)
    headers = getattr(error, "headers", None)
    path = request.scope["path"]
    if status in (404, 405) and "sec-websocket-key" in request.headers:  # a server without a library for them
        return errors.to_reply(errors.no_websocket(path))
    if status in (404, 405) and (why := why_not(path)) is not None:
        status, text, code = 404, f"{request.method} {path} is not supported: {why}", "unsupported_route"
    elif status == 404:
        near = nearest_route(request.app, request.method, path)
        hint = f"did you mean {near}?" if near else "GET /openapi.json lists the routes"
        text, code = f"no route {request.method} {errors.shortened(path)}; {hint}", "not_found"
    elif status == 405:
        allowed = (headers or {}).get("Allow", "another method")
        text, code = f"{path} takes {allowed}, not {request.method}", "method_not_allowed"
    else:
        text, code = str(getattr(error, "detail", "bad request")), "bad_request"
    return errors.reply(status, ErrorDetail(message=text, type="invalid_request_error", code=code), headers)


async def handle_validation(request: Request, error: Exception) -> Response:
    """Answer a bad query or path parameter."""
    found = error.errors()[0] if isinstance(error, RequestValidationError) else {"loc": ("",), "msg": "is not valid"}
    param = str(found["loc"][-1])
    reason = str(found["msg"]).removeprefix("Input ")
    text = f"{param} {reason[0].lower()}{reason[1:]}"
    return errors.to_reply(RequestError(text, param=param, code="invalid_value"))


HANDLERS: dict[Any, Any] = {
    **dict.fromkeys((RequestError, errors.ServiceError, EngineError), handle_error),
    HTTPException: handle_http,
}
