"""`/v1/messages`."""

from __future__ import annotations

from typing import Annotated

from fastapi import APIRouter, Depends
from starlette.requests import Request
from starlette.responses import Response

from dovetail_server.anthropic import messages
from dovetail_server.anthropic.schema import (
    AnthropicError,
    CountTokensRequest,
    MessageReply,
    MessagesRequest,
    TokenCount,
)
from dovetail_server.bodies.request import finished, prepared, prompt_body
from dovetail_server.bodies.tasks import COUNT_TOKENS, MESSAGES
from dovetail_server.openapi import json_route
from dovetail_server.serving.sse import cancel_on_disconnect, start
from dovetail_server.state import ServerState, get_ready_state

router = APIRouter(tags=["messages"])
State = Annotated[ServerState, Depends(get_ready_state)]


@json_route(router, "/v1/messages", body=MessagesRequest, reply=MessageReply, streams=True, error=AnthropicError)
async def create_message(
    request: Request, body: Annotated[MessagesRequest, Depends(prompt_body(MESSAGES))], state: State
) -> Response:
    """Answer a conversation in the form of Anthropic's API, whole or as a stream."""
    model = state.check_model(body.model)
    job = await prepared(request, MESSAGES, body, lambda made: messages.prepare(state, body, model, made))
    if body.stream:
        request_id = request.scope["state"].get("request_id")
        return await start(request, messages.stream(job), lambda error: messages.final_error_event(error, request_id))
    return Response(await cancel_on_disconnect(request, messages.reply(job)), media_type="application/json")


@json_route(router, "/v1/messages/count_tokens", body=CountTokensRequest, reply=TokenCount, error=AnthropicError)
async def count_tokens(request: Request, state: State) -> Response:
    """Count the tokens of a prompt."""
    return await finished(request, state, COUNT_TOKENS)
