"""`/v1/score`."""

from __future__ import annotations

import asyncio
from typing import Annotated

from fastapi import APIRouter, Depends
from starlette.requests import Request
from starlette.responses import Response

from dovetail_server.bodies.request import prompt_body, take_prompts
from dovetail_server.bodies.tasks import SCORE
from dovetail_server.native.score import ScoreRequest, Scores
from dovetail_server.openai.rerank import PairScores
from dovetail_server.openapi import json_route
from dovetail_server.serving import rerank, score
from dovetail_server.serving.rerank import is_pair
from dovetail_server.serving.sse import cancel_on_disconnect
from dovetail_server.state import ServerState, get_ready_state

router = APIRouter(tags=["native"])


@json_route(router, "/v1/score", body=ScoreRequest, reply=Scores, other_reply=PairScores)
@json_route(router, "/score", body=ScoreRequest, reply=Scores, other_reply=PairScores)
async def score_items(
    request: Request,
    body: Annotated[ScoreRequest, Depends(prompt_body(SCORE))],
    state: Annotated[ServerState, Depends(get_ready_state)],
) -> Response:
    """Tell how well two texts go together, or how likely each of some tokens is to follow a query and an item."""
    model, made = state.check_model(body.model), take_prompts(request)
    if is_pair(body):
        pairs = await cancel_on_disconnect(request, asyncio.to_thread(rerank.prepare, state, body, model, made))
        return Response(await cancel_on_disconnect(request, rerank.reply(pairs)), media_type="application/json")
    job = await cancel_on_disconnect(request, asyncio.to_thread(score.prepare, state, body, model, made))
    return Response(await cancel_on_disconnect(request, score.reply(job)), media_type="application/json")
