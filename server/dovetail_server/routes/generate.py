"""`/generate`, the native endpoint."""

from __future__ import annotations

from typing import Annotated

from fastapi import APIRouter, Depends
from starlette.requests import Request
from starlette.responses import Response

from dovetail_server.bodies.request import prepared, prompt_body
from dovetail_server.bodies.tasks import GENERATE
from dovetail_server.native.generate import Generated, GenerateRequest
from dovetail_server.openapi import json_route
from dovetail_server.reading import check_name
from dovetail_server.serving import generate
from dovetail_server.serving.sse import cancel_on_disconnect, start
from dovetail_server.state import ServerState, get_ready_state

router = APIRouter(tags=["native"])


@json_route(router, "/generate", body=GenerateRequest, reply=Generated, may_list=True, streams=True)
async def generate_text(
    request: Request,
    body: Annotated[GenerateRequest, Depends(prompt_body(GENERATE))],
    state: Annotated[ServerState, Depends(get_ready_state)],
) -> Response:
    """Continue a text or token ids; a batch gives a list."""
    check_name(body, state.served_names)
    job = await prepared(request, GENERATE, body, lambda made: generate.prepare(state, body, made))
    if body.stream:
        return await start(request, generate.stream(job))
    return Response(await cancel_on_disconnect(request, generate.reply(job)), media_type="application/json")
