"""`/separate_reasoning` and `/parse_function_call`."""

from __future__ import annotations

import asyncio
from typing import Annotated

import msgspec
from fastapi import APIRouter, Depends
from starlette.responses import Response

from dovetail_server.body import json_body
from dovetail_server.native.parsing import (
    ParsedCalls,
    ParseFunctionCallRequest,
    SeparatedReasoning,
    SeparateReasoningRequest,
)
from dovetail_server.openapi import json_route
from dovetail_server.serving.parsing import parse_calls, separate_reasoning
from dovetail_server.state import ServerState, get_ready_state

router = APIRouter(tags=["native"])
State = Annotated[ServerState, Depends(get_ready_state)]


@json_route(router, "/separate_reasoning", body=SeparateReasoningRequest, reply=SeparatedReasoning)
async def separate(
    body: Annotated[SeparateReasoningRequest, Depends(json_body(SeparateReasoningRequest))], state: State
) -> Response:
    """Split a finished output into reasoning and text."""
    reply = await asyncio.to_thread(separate_reasoning, state, body)
    return Response(msgspec.json.encode(reply), media_type="application/json")


@json_route(router, "/parse_function_call", body=ParseFunctionCallRequest, reply=ParsedCalls)
async def parse(
    body: Annotated[ParseFunctionCallRequest, Depends(json_body(ParseFunctionCallRequest))], state: State
) -> Response:
    """Find the tool calls in a finished output."""
    reply = await asyncio.to_thread(parse_calls, state, body)
    return Response(msgspec.json.encode(reply), media_type="application/json")
