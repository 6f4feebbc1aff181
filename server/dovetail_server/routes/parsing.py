"""`/separate_reasoning` and `/parse_function_call`."""

from __future__ import annotations

from typing import Annotated

from fastapi import APIRouter, Depends
from starlette.requests import Request
from starlette.responses import Response

from dovetail_server.apis.parsing.schema import (
    ParsedCalls,
    ParseFunctionCallRequest,
    SeparatedReasoning,
    SeparateReasoningRequest,
)
from dovetail_server.openapi.document import json_route
from dovetail_server.reading.request import finished
from dovetail_server.reading.tasks import PARSE_CALLS, SEPARATE_REASONING
from dovetail_server.state import ServerState, get_ready_state

router = APIRouter(tags=["native"])
State = Annotated[ServerState, Depends(get_ready_state)]


@json_route(router, "/separate_reasoning", body=SeparateReasoningRequest, reply=SeparatedReasoning, place="any")
async def separate(request: Request, state: State) -> Response:
    """Split a finished output into reasoning and text."""
    return await finished(request, state, SEPARATE_REASONING)


@json_route(router, "/parse_function_call", body=ParseFunctionCallRequest, reply=ParsedCalls, place="any")
async def parse(request: Request, state: State) -> Response:
    """Find the tool calls in a finished output."""
    return await finished(request, state, PARSE_CALLS)
