"""`/v1/completions`."""

from __future__ import annotations

from typing import Annotated

from fastapi import APIRouter, Depends
from starlette.requests import Request
from starlette.responses import Response

from dovetail_server.bodies.request import prepared, prompt_body
from dovetail_server.bodies.tasks import COMPLETIONS
from dovetail_server.openai.completions import Completion, CompletionRequest
from dovetail_server.openapi import json_route
from dovetail_server.serving import completions
from dovetail_server.serving.sse import cancel_on_disconnect, start
from dovetail_server.state import ServerState, get_ready_state

router = APIRouter(tags=["openai"])


@json_route(router, "/v1/completions", body=CompletionRequest, reply=Completion, streams=True)
async def create_completion(
    request: Request,
    body: Annotated[CompletionRequest, Depends(prompt_body(COMPLETIONS))],
    state: Annotated[ServerState, Depends(get_ready_state)],
) -> Response:
    """Continue one or several prompts, whole or as a stream."""
    model = state.check_model(body.model)
    job = await prepared(request, COMPLETIONS, body, lambda made: completions.prepare(state, body, model, made))
    if body.stream:
        return await start(request, completions.stream(job))
    return Response(await cancel_on_disconnect(request, completions.reply(job)), media_type="application/json")
