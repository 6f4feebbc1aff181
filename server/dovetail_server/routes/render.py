"""`…/render`: the token ids of a request, for routers that place it where its prefix is cached."""

from __future__ import annotations

from typing import Any

import msgspec
from fastapi import APIRouter
from starlette.requests import Request
from starlette.responses import Response

from dovetail.contracts.api import Route
from dovetail_server.apis.responses.schema import ResponsesRequest
from dovetail_server.apis.routes import CHAT, COMPLETIONS, MESSAGES
from dovetail_server.errors import catalogue as errors
from dovetail_server.errors.body import ErrorBody
from dovetail_server.openapi.document import json_route
from dovetail_server.reading.intake import job_of
from dovetail_server.reading.request import raw_body
from dovetail_server.reading.responses import begin
from dovetail_server.routes.files import owner_of
from dovetail_server.serving.generation import Generation
from dovetail_server.serving.sse import cancel_on_disconnect
from dovetail_server.state import ReadyState

# `…/render`: the reply, as vLLM has it: what the engine would be given.


class Rendered(msgspec.Struct, frozen=True, kw_only=True):
    """A prompt as token ids, with its sampling parameters. Nothing has been generated."""

    request_id: str
    token_ids: list[int]
    sampling_params: dict[str, Any]
    model: str
    stream: bool
    cache_salt: str | msgspec.UnsetType = msgspec.UNSET
    priority: int


router = APIRouter(tags=["render"])


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


def add(route: Route, about: str) -> None:
    """Add the route that shows what another route's requests come to."""

    async def endpoint(request: Request, state: ReadyState) -> Response:
        job = await job_of(request, state, route, runs=False)
        found = rendered(job.generation, job.reply.model, job.reply.requests[0].stream)
        return answer(found if route.renders_list else found[0])

    endpoint.__name__, endpoint.__doc__ = f"render_{route.name}", about
    path, error = f"{route.path}/render", route.error or ErrorBody
    json_route(router, path, body=route.body, reply=Rendered, may_list=route.renders_list, error=error, place="any")(
        endpoint
    )


add(CHAT, "Return the token ids of a conversation.")
add(COMPLETIONS, "Return the token ids of one or several prompts, as a list.")
add(MESSAGES, "Return the token ids of a conversation in the form of Anthropic's API.")


@json_route(router, "/v1/responses/render", body=ResponsesRequest, reply=Rendered, place="any")
async def render_response(request: Request, state: ReadyState) -> Response:
    """Return the token ids of a response's prompt, with the responses that it continues."""

    def only_looked_at(asked: ResponsesRequest) -> ResponsesRequest:
        if asked.context_management:
            raise errors.unsupported("context_management", "nothing is compacted where a prompt is only looked at")
        return asked.model_copy(update={"store": False, "background": None})

    entry = begin(state, await raw_body(request), owner_of(request), only_looked_at)
    job = await cancel_on_disconnect(request, entry)
    return answer(rendered(job.generation, job.reply.model, job.reply.requests[0].stream)[0])
