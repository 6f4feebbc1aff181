"""The routes that generate, whatever their API: a body comes in, its job runs, its writer answers."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

from fastapi import APIRouter
from starlette.requests import Request
from starlette.responses import Response

from dovetail.contracts.api import Route
from dovetail_server.apis.routes import ROUTES
from dovetail_server.bodies.intake import job_of
from dovetail_server.openai.errors import ErrorBody
from dovetail_server.openapi import json_route
from dovetail_server.routes.files import owner_of
from dovetail_server.serving import run
from dovetail_server.serving.sse import cancel_on_disconnect, start

if TYPE_CHECKING:
    from dovetail_server.serving.job import Job
    from dovetail_server.state import ServerState
    from dovetail_server.storage.completions import CompletionKeeper

router = APIRouter()


async def answer(request: Request, route: Route) -> Response:
    """Answer a request, whole or as a stream."""
    state: ServerState = request.app.state.server
    job = await job_of(request, state, route)
    if job.reply.is_kept:
        job.keeper = await keeper_of(request, state, job)
    if job.reply.request.stream:
        return await start(request, run.stream(job), run.ending(job), job.writer)
    return Response(await cancel_on_disconnect(request, run.reply(job)), media_type="application/json")


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
        metadata=job.reply.request.keeps or {},
        messages=await asyncio.to_thread(messages_of, await request.body()),
    )


def add(route: Route) -> None:
    """Add a route to those of the application."""

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
        error=route.error or ErrorBody,
        tags=(route.tag,),
    )(endpoint)


for each in ROUTES.values():
    add(each)
