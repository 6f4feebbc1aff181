"""`/v1/rerank` and `/v1/classify`, under every path that peers have for them."""

from __future__ import annotations

import asyncio
from typing import Annotated

from fastapi import APIRouter, Depends
from starlette.requests import Request
from starlette.responses import Response

from dovetail_server.bodies.request import prompt_body, take_prompts
from dovetail_server.bodies.tasks import CLASSIFY, RERANK
from dovetail_server.openai.rerank import Classes, ClassifyRequest, Reranked, RerankRequest
from dovetail_server.openapi import json_route
from dovetail_server.serving import rerank
from dovetail_server.serving.sse import cancel_on_disconnect
from dovetail_server.state import ServerState, get_ready_state

router = APIRouter(tags=["openai"])
State = Annotated[ServerState, Depends(get_ready_state)]


@json_route(router, "/v1/rerank", body=RerankRequest, reply=Reranked)
@json_route(router, "/v2/rerank", body=RerankRequest, reply=Reranked)
@json_route(router, "/rerank", body=RerankRequest, reply=Reranked)
async def rerank_documents(
    request: Request, body: Annotated[RerankRequest, Depends(prompt_body(RERANK))], state: State
) -> Response:
    """Order documents by how well they go with a query."""
    return await _answered(request, body, state)


@json_route(router, "/v1/classify", body=ClassifyRequest, reply=Classes)
@json_route(router, "/classify", body=ClassifyRequest, reply=Classes)
async def classify_texts(
    request: Request, body: Annotated[ClassifyRequest, Depends(prompt_body(CLASSIFY))], state: State
) -> Response:
    """Score the labels of one or several texts."""
    return await _answered(request, body, state)


async def _answered(request: Request, body: RerankRequest | ClassifyRequest, state: ServerState) -> Response:
    model = state.check_model(body.model)
    work = asyncio.to_thread(rerank.prepare, state, body, model, take_prompts(request))
    job = await cancel_on_disconnect(request, work)
    return Response(await cancel_on_disconnect(request, rerank.reply(job)), media_type="application/json")
