"""What this server is: model, settings, plugins."""

from __future__ import annotations

from typing import Annotated, Any

import msgspec
from fastapi import APIRouter, Depends
from starlette.responses import Response

import dovetail
from dovetail_server.openapi import FAILURES
from dovetail_server.state import ServerState, get_ready_state, get_state

router = APIRouter(tags=["server"])
State = Annotated[ServerState, Depends(get_ready_state)]


def json_reply(value: Any) -> Response:
    """Encode a value."""
    return Response(msgspec.json.encode(value), media_type="application/json")


@router.get("/get_model_info", response_model=None, responses=FAILURES)
@router.get("/model_info", response_model=None, responses=FAILURES)
async def model_info(state: State) -> Response:
    """Facts of the model."""
    settings, info = state.settings, state.info
    return json_reply(
        {
            "model_path": settings.model_path,
            "tokenizer_path": settings.tokenizer_path or settings.model_path,
            "served_model_names": state.served_names,
            "is_generation": True,
            "architecture": info.architecture,
            "dtype": info.dtype,
            "vocab_size": info.vocab_size,
            "context_length": state.text.limits.context_len,
            "reasoning_parser": settings.reasoning_parser,
            "tool_call_parser": settings.tool_call_parser,
            "preferred_sampling_params": dict(state.text.limits.defaults),
        }
    )


@router.get("/get_server_info", response_model=None, responses=FAILURES)
@router.get("/server_info", response_model=None, responses=FAILURES)
async def server_info(state: State) -> Response:
    """Version, settings, engine and load."""
    load = await state.engine.control("stats")
    info = msgspec.structs.asdict(state.info)
    settings = state.settings.model_dump(mode="json")
    return json_reply(
        {
            **settings,
            "version": dovetail.__version__,
            "status": "draining" if state.is_draining else "ready",
            "engine": info,
            "max_total_num_tokens": state.info.max_total_tokens,
            "internal_states": [load],
        }
    )


@router.get("/v1/plugins", response_model=None, responses=FAILURES)
async def plugins(state: Annotated[ServerState, Depends(get_state)]) -> Response:
    """Every plugin that is installed, with its state."""
    return json_reply(state.registry.listing() if state.registry is not None else {"object": "list", "data": []})
