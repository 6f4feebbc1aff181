"""`…/render`: the token ids of a request, for routers that place it where its prefix is cached."""

from __future__ import annotations

from typing import Annotated

import msgspec
from fastapi import APIRouter, Depends
from starlette.requests import Request
from starlette.responses import Response

from dovetail_server.anthropic import messages
from dovetail_server.anthropic.schema import AnthropicError, MessagesRequest
from dovetail_server.bodies.request import prepared, prompt_body, raw_body
from dovetail_server.bodies.responses import begin
from dovetail_server.bodies.tasks import CHAT, COMPLETIONS, MESSAGES
from dovetail_server.openai.chat import ChatRequest
from dovetail_server.openai.completions import CompletionRequest
from dovetail_server.openai.render import Rendered
from dovetail_server.openai.responses import ResponsesRequest
from dovetail_server.openapi import json_route
from dovetail_server.routes.files import owner_of
from dovetail_server.serving import chat, completions
from dovetail_server.serving.generation import Generation
from dovetail_server.serving.sse import cancel_on_disconnect
from dovetail_server.state import ServerState, get_ready_state

router = APIRouter(tags=["render"])
State = Annotated[ServerState, Depends(get_ready_state)]


def rendered(generation: Generation, model: str, stream: bool | None) -> list[Rendered]:
    """Return what the engine would be given, one entry per prompt."""
    firsts = {choice.prompt_index: choice.submit for choice in reversed(generation.choices)}
    return [
        Rendered(
            request_id=generation.request_id,
            token_ids=submit.prompt_ids,
            sampling_params=msgspec.to_builtins(submit.params),
            model=model,
            stream=bool(stream),
            cache_salt=submit.cache_salt or msgspec.UNSET,
            priority=submit.priority,
        )
        for _, submit in sorted(firsts.items())
    ]


def answer(value: Rendered | list[Rendered]) -> Response:
    """Encode a reply."""
    return Response(msgspec.json.encode(value), media_type="application/json")


@json_route(router, "/v1/chat/completions/render", body=ChatRequest, reply=Rendered)
async def render_chat(
    request: Request, body: Annotated[ChatRequest, Depends(prompt_body(CHAT))], state: State
) -> Response:
    """Return the token ids of a conversation."""
    model = state.check_model(body.model)
    job = await prepared(request, CHAT, body, lambda made: chat.prepare(state, body, model, made))
    return answer(rendered(job.generation, model, body.stream)[0])


@json_route(router, "/v1/completions/render", body=CompletionRequest, reply=Rendered, may_list=True)
async def render_completion(
    request: Request, body: Annotated[CompletionRequest, Depends(prompt_body(COMPLETIONS))], state: State
) -> Response:
    """Return the token ids of one or several prompts, as a list."""
    model = state.check_model(body.model)
    job = await prepared(request, COMPLETIONS, body, lambda made: completions.prepare(state, body, model, made))
    return answer(rendered(job.generation, model, body.stream))


@json_route(router, "/v1/responses/render", body=ResponsesRequest, reply=Rendered)
async def render_response(request: Request, state: State) -> Response:
    """Return the token ids of a response's prompt, with the responses that it continues."""

    def only_looked_at(asked: ResponsesRequest) -> ResponsesRequest:
        return asked.model_copy(update={"store": False, "background": None})

    entry = begin(state, await raw_body(request), owner_of(request), only_looked_at)
    job = await cancel_on_disconnect(request, entry)
    return answer(rendered(job.chat.generation, job.chat.model, job.request.stream)[0])


@json_route(router, "/v1/messages/render", body=MessagesRequest, reply=Rendered, error=AnthropicError)
async def render_message(
    request: Request, body: Annotated[MessagesRequest, Depends(prompt_body(MESSAGES))], state: State
) -> Response:
    """Return the token ids of a conversation in the form of Anthropic's API."""
    model = state.check_model(body.model)
    job = await prepared(request, MESSAGES, body, lambda made: messages.prepare(state, body, model, made))
    return answer(rendered(job.chat.generation, model, body.stream)[0])
