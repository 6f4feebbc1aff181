"""`/v1/rerank` and `/v1/classify`, under every path that peers have for them."""

from __future__ import annotations

from typing import Annotated, TypeVar

from fastapi import APIRouter, Depends
from starlette.requests import Request
from starlette.responses import Response

from dovetail_server.apis.rerank import serve as rerank
from dovetail_server.apis.rerank.schema import Classes, ClassifyRequest, Reranked, RerankRequest
from dovetail_server.openapi.document import json_route
from dovetail_server.reading.request import prepared, prompt_body
from dovetail_server.reading.tasks import CLASSIFY, RERANK, Task
from dovetail_server.serving.sse import cancel_on_disconnect
from dovetail_server.state import ServerState, get_ready_state

router = APIRouter(tags=["openai"])
M = TypeVar("M", RerankRequest, ClassifyRequest)
State = Annotated[ServerState, Depends(get_ready_state)]


@json_route(router, "/v1/rerank", body=RerankRequest, reply=Reranked, place="any")
@json_route(router, "/v2/rerank", body=RerankRequest, reply=Reranked, place="any")
@json_route(router, "/rerank", body=RerankRequest, reply=Reranked, place="any")
async def rerank_documents(
    request: Request, body: Annotated[RerankRequest, Depends(prompt_body(RERANK))], state: State
) -> Response:
    """Order documents by how well they go with a query."""
    return await _answered(request, RERANK, body, state)


@json_route(router, "/v1/classify", body=ClassifyRequest, reply=Classes, place="any")
@json_route(router, "/classify", body=ClassifyRequest, reply=Classes, place="any")
async def classify_texts(
    request: Request, body: Annotated[ClassifyRequest, Depends(prompt_body(CLASSIFY))], state: State
) -> Response:
    """Score the labels of one or several texts."""
    return await _answered(request, CLASSIFY, body, state)


async def _answered(request: Request, task: Task[M], body: M, state: ServerState) -> Response:
    model = state.check_model(body.model)
    job = await prepared(request, task, lambda made: rerank.prepare(state, body, model, made))
    return Response(await cancel_on_disconnect(request, rerank.reply(job)), media_type="application/json")
