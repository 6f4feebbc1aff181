"""`/v1/score`."""

from __future__ import annotations

from typing import Annotated

from fastapi import APIRouter, Depends
from starlette.requests import Request
from starlette.responses import Response

from dovetail_server.apis.rerank import serve as rerank
from dovetail_server.apis.rerank.schema import PairScores
from dovetail_server.apis.rerank.serve import is_pair
from dovetail_server.apis.score import serve as score
from dovetail_server.apis.score.schema import ScoreRequest, Scores
from dovetail_server.openapi.document import json_route
from dovetail_server.reading.request import prepared, prompt_body
from dovetail_server.reading.tasks import SCORE
from dovetail_server.serving.sse import cancel_on_disconnect
from dovetail_server.state import ServerState, get_ready_state

router = APIRouter(tags=["native"])


@json_route(router, "/v1/score", body=ScoreRequest, reply=Scores, other_reply=PairScores, place="any")
@json_route(router, "/score", body=ScoreRequest, reply=Scores, other_reply=PairScores, place="any")
async def score_items(
    request: Request,
    body: Annotated[ScoreRequest, Depends(prompt_body(SCORE))],
    state: Annotated[ServerState, Depends(get_ready_state)],
) -> Response:
    """Tell how well two texts go together, or how likely each of some tokens is to follow a query and an item."""
    model = state.check_model(body.model)
    if is_pair(body):
        pairs = await prepared(request, SCORE, lambda made: rerank.prepare(state, body, model, made))
        return Response(await cancel_on_disconnect(request, rerank.reply(pairs)), media_type="application/json")
    job = await prepared(request, SCORE, lambda made: score.prepare(state, body, model, made))
    return Response(await cancel_on_disconnect(request, score.reply(job)), media_type="application/json")
