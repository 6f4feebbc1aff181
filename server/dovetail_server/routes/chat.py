"""`/v1/chat/completions`."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Annotated

from fastapi import APIRouter, Depends
from starlette.requests import Request
from starlette.responses import Response

from dovetail_server.bodies.request import prepared, prompt_body
from dovetail_server.bodies.tasks import CHAT
from dovetail_server.openai.chat import ChatCompletion, ChatRequest
from dovetail_server.openapi import json_route
from dovetail_server.routes.files import owner_of
from dovetail_server.serving import chat, chat_reply
from dovetail_server.serving.chat import ChatJob
from dovetail_server.serving.common import new_id
from dovetail_server.serving.sse import cancel_on_disconnect, start
from dovetail_server.state import ServerState, get_ready_state

if TYPE_CHECKING:
    from dovetail_server.storage.completions import CompletionKeeper

router = APIRouter(tags=["openai"])


@json_route(router, "/v1/chat/completions", body=ChatRequest, reply=ChatCompletion, streams=True)
async def chat_completions(
    request: Request,
    body: Annotated[ChatRequest, Depends(prompt_body(CHAT))],
    state: Annotated[ServerState, Depends(get_ready_state)],
) -> Response:
    """Answer a conversation, whole or as a stream."""
    model = state.check_model(body.model)
    job = await prepared(request, CHAT, body, lambda made: chat.prepare(state, body, model, made))
    if body.store and state.settings.max_stored_responses:
        job.keeper = await keeper_of(request, state, job)
    if body.stream:
        return await start(request, chat_reply.stream(job))
    return Response(await cancel_on_disconnect(request, chat_reply.reply(job)), media_type="application/json")


async def keeper_of(request: Request, state: ServerState, job: ChatJob) -> CompletionKeeper:
    """Return what keeps the reply of a job; the database is there before it begins.

    Raises:
        ServiceError: The database cannot be used.
    """
    from dovetail_server.storage.completions import CompletionKeeper, messages_of

    service = await state.storage.get()
    body = job.request
    is_named = body.rid is not None or body.request_id is not None
    return CompletionKeeper(
        store=service.completions,
        owner=owner_of(request),
        id=new_id("chatcmpl") if is_named else job.generation.request_id,
        metadata=body.metadata or {},
        messages=await asyncio.to_thread(messages_of, await request.body()),
    )
