"""The routes that generate, whatever their API: a body comes in, its job runs, its writer answers."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from contextlib import suppress
from threading import Thread
from typing import TYPE_CHECKING, Any

import msgspec
from fastapi import APIRouter
from starlette.requests import Request
from starlette.responses import Response

from dovetail.contracts.api import Api, Route, ServerFacts, View
from dovetail.contracts.errors import PluginError, RequestError
from dovetail.contracts.requests import JsonObject
from dovetail_server.apis.dropped import HEADER, header_of
from dovetail_server.apis.loaded import is_below
from dovetail_server.apis.routes import BUILT_IN
from dovetail_server.apis.watch import TICK_S, WATCH
from dovetail_server.errors.body import ErrorBody
from dovetail_server.openapi.document import json_route
from dovetail_server.reading.intake import job_of
from dovetail_server.reading.parse import decoded
from dovetail_server.reading.request import MAX_PLAIN, PLAIN_OBJECTS, body_too_large, raw_body
from dovetail_server.routes.files import owner_of
from dovetail_server.serving import run
from dovetail_server.serving.sse import cancel_on_disconnect, start

if TYPE_CHECKING:
    from dovetail_server.serving.job import Job
    from dovetail_server.state import ServerState
    from dovetail_server.storage.completions import CompletionKeeper

# Calls what a view shows, in threads that nobody else needs: one that sleeps cannot be ended, only left behind.
#
# The event loop's own threads are few, and tokenizing, files and batches wait for them; at its end the process does,
# too.

MAX_AT_ONCE = 4
GRACE_S = 2 * TICK_S
"""`WATCH` ends a call that loops so much later at most, and can say where it stood."""


class Showing:
    """Calls one view."""

    def __init__(self, what: str, show: Callable[[ServerFacts, JsonObject], Any]) -> None:
        """Take a view's `show`; `what` it is, for messages."""
        self._what, self._show = what, show
        self._turns = asyncio.Semaphore(MAX_AT_ONCE)

    async def __call__(self, facts: ServerFacts, body: JsonObject) -> Any:
        """Return what it shows.

        Raises:
            PluginError: It did not end in time, or none of `MAX_AT_ONCE` earlier calls did.
            Exception: What it raises.
        """
        try:
            async with asyncio.timeout(WATCH.limit_s + GRACE_S) as limit:
                await self._turns.acquire()
                return await asyncio.wrap_future(self._begin(facts, body))
        except TimeoutError:
            if not limit.expired():
                raise
            raise PluginError(f"{self._what} did not end within {WATCH.limit_s:g} s and is left behind") from None

    def _begin(self, facts: ServerFacts, body: JsonObject) -> Future[Any]:
        loop = asyncio.get_running_loop()
        made: Future[Any] = Future()
        made.set_running_or_notify_cancel()  # who gives up waiting cannot cancel it

        def run() -> None:
            try:
                made.set_result(self._show(facts, body))
            except BaseException as error:
                made.set_exception(error)
            with suppress(RuntimeError):  # the loop has closed meanwhile
                loop.call_soon_threadsafe(self._turns.release)

        try:
            Thread(target=run, name="dovetail-show", daemon=True).start()
        except BaseException:
            self._turns.release()
            raise
        return made


async def answer(request: Request, route: Route) -> Response:
    """Answer a request, whole or as a stream."""
    state: ServerState = request.app.state.server
    job = await job_of(request, state, route)
    if job.reply.is_kept:
        try:
            job.keeper = await keeper_of(request, state, job)
        except BaseException:
            if job.generation.early is not None:
                job.generation.early.close()
            raise
    asked = job.reply.requests[0]
    if asked.stream:
        ends = run.ending(route.writer, request.scope["state"].get("request_id"))
        response: Response = await start(request, run.stream(job), ends, route.writer)
    else:
        response = Response(await cancel_on_disconnect(request, run.reply(job)), media_type="application/json")
    if asked.dropped:
        response.headers[HEADER] = header_of(asked)
    return response


async def keeper_of(request: Request, state: ServerState, job: Job) -> CompletionKeeper:
    """Return what keeps the reply of a job; the database is there before it begins.

    Raises:
        ServiceError: The database cannot be used.
    """
    from dovetail_server.storage.completions import CompletionKeeper, messages_of

    service = await state.storage.get()
    return CompletionKeeper(
        store=service.completions,
        owner=owner_of(request),
        id=job.reply.id,
        metadata=job.reply.requests[0].keeps or {},
        messages=await asyncio.to_thread(messages_of, await request.body()),
    )


def router_of(apis: Sequence[Api]) -> APIRouter:
    """Return the routes of some APIs as the application takes them."""
    router = APIRouter()
    for api in apis:
        for route in api.routes():
            if isinstance(route, Route):
                add_route(router, route, error_of(api, route))
            else:
                add_view(router, route, str(api), error_of(api, route))
    return router


def error_of(api: Api, route: Route | View) -> type[msgspec.Struct] | None:
    """Return what describes the errors of a route; None where an API has its own form and does not describe it."""
    is_owned = any(is_below(route.path, path) for path in api.owns)
    return route.error or (None if is_owned else ErrorBody)


def add_route(router: APIRouter, route: Route, error: type[msgspec.Struct] | None) -> None:
    """Add a route that generates."""

    async def endpoint(request: Request) -> Response:
        return await answer(request, route)

    endpoint.__name__, endpoint.__doc__ = route.name, route.about
    json_route(
        router,
        route.path,
        body=route.body,
        reply=route.reply,
        may_list=route.may_list,
        streams=True,
        error=error,
        tags=(route.tag,),
    )(endpoint)


def add_view(router: APIRouter, view: View, who: str, error: type[msgspec.Struct] | None) -> None:
    """Add a route that shows something; `who` brings it, for messages."""
    show = Showing(f"{who}: {view.path}: show()", view.show)

    async def endpoint(request: Request) -> Response:
        state: ServerState = request.app.state.server
        state.check_ready()
        raw = await raw_body(request) if view.method == "POST" else b""
        if len(raw) > MAX_PLAIN:
            raise body_too_large(len(raw), MAX_PLAIN)
        body = decoded(raw, PLAIN_OBJECTS) if raw else {}
        if not isinstance(body, dict):
            raise RequestError("the body must be a JSON object", code="invalid_json")
        return Response(msgspec.json.encode(await show(state.facts(), body)), media_type="application/json")

    endpoint.__name__, endpoint.__doc__ = view.name, view.about
    json_route(router, view.path, methods=(view.method,), error=error, tags=(view.tag,))(endpoint)


router = router_of(BUILT_IN)
"""Those that are built in, for the documentation."""
