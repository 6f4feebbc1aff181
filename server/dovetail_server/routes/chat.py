"""`/v1/chat/completions`."""

from __future__ import annotations

from typing import Annotated

import msgspec
from fastapi import APIRouter, Depends
from starlette.requests import Request
from starlette.responses import Response

from dovetail_server.bodies.tasks import CHAT
from dovetail_server.body import prompt_body, take_prompts
from dovetail_server.openai.chat import ChatCompletion, ChatRequest, StoredCompletions
from dovetail_server.openapi import json_route
from dovetail_server.serving import chat, chat_reply
from dovetail_server.serving.prepare import prepared
from dovetail_server.serving.sse import start, while_connected
from dovetail_server.state import ServerState, get_ready_state

router = APIRouter(tags=["openai"])


@json_route(router, "/v1/chat/completions", reply=StoredCompletions, methods=("GET",))
async def list_stored() -> Response:
    """List stored completions: none, for only responses are stored."""
    return Response(msgspec.json.encode(StoredCompletions()), media_type="application/json")


@json_route(router, "/v1/chat/completions", body=ChatRequest, reply=ChatCompletion, streams=True)
async def chat_completions(
    request: Request,
    body: Annotated[ChatRequest, Depends(prompt_body(CHAT))],
    state: Annotated[ServerState, Depends(get_ready_state)],
) -> Response:
    """Answer a conversation, whole or as a stream."""
    model = state.check_model(body.model)
    job = await prepared(request, body, lambda: chat.prepare(state, body, model, take_prompts(request)))
    if body.stream:
        return await start(request, chat_reply.stream(job))
    return Response(await while_connected(request, chat_reply.reply(job)), media_type="application/json")
