"""`/v1/messages/count_tokens`."""

from __future__ import annotations

from typing import Annotated

from fastapi import APIRouter, Depends
from starlette.requests import Request
from starlette.responses import Response

from dovetail_server.apis.messages.schema import AnthropicError, CountTokensRequest, TokenCount
from dovetail_server.openapi.document import json_route
from dovetail_server.reading.request import finished
from dovetail_server.reading.tasks import COUNT_TOKENS
from dovetail_server.state import ServerState, get_ready_state

router = APIRouter(tags=["messages"])
State = Annotated[ServerState, Depends(get_ready_state)]


@json_route(
    router, "/v1/messages/count_tokens", body=CountTokensRequest, reply=TokenCount, error=AnthropicError, place="any"
)
async def count_tokens(request: Request, state: State) -> Response:
    """Count the tokens of a prompt."""
    return await finished(request, state, COUNT_TOKENS)
