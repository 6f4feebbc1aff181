"""`/v1/embeddings`."""

from __future__ import annotations

from typing import Annotated

from fastapi import APIRouter, Depends
from starlette.responses import Response

from dovetail_server.body import json_body
from dovetail_server.openai.embeddings import EmbeddingRequest
from dovetail_server.openapi import json_route
from dovetail_server.serving.embeddings import refusal
from dovetail_server.state import ServerState, get_ready_state

router = APIRouter(tags=["openai"])


@json_route(router, "/v1/embeddings", body=EmbeddingRequest)
async def create_embeddings(
    body: Annotated[EmbeddingRequest, Depends(json_body(EmbeddingRequest))],
    state: Annotated[ServerState, Depends(get_ready_state)],
) -> Response:
    """Say that the served model gives no embeddings."""
    raise refusal(state, body)
