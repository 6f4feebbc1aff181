"""`/v1/embeddings`."""

from __future__ import annotations

from typing import Annotated

from fastapi import APIRouter, Depends
from starlette.requests import Request
from starlette.responses import Response

from dovetail_server.apis.embeddings import serve as embeddings
from dovetail_server.apis.embeddings.schema import EmbeddingRequest, Embeddings
from dovetail_server.openapi.document import json_route
from dovetail_server.reading.request import prepared, prompt_body
from dovetail_server.reading.tasks import EMBEDDINGS
from dovetail_server.serving.sse import cancel_on_disconnect
from dovetail_server.state import ServerState, get_ready_state

router = APIRouter(tags=["openai"])


@json_route(router, "/v1/embeddings", body=EmbeddingRequest, reply=Embeddings, place="any")
async def create_embeddings(
    request: Request,
    body: Annotated[EmbeddingRequest, Depends(prompt_body(EMBEDDINGS))],
    state: Annotated[ServerState, Depends(get_ready_state)],
) -> Response:
    """Give the vector of one or several texts."""
    model = state.check_model(body.model)
    job = await prepared(request, EMBEDDINGS, lambda made: embeddings.prepare(state, body, model, made))
    return Response(await cancel_on_disconnect(request, embeddings.reply(job)), media_type="application/json")
