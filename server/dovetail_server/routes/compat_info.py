"""What clients of llama.cpp (`/props`) and of Text Generation Inference (`/info`) ask a server about itself."""

from __future__ import annotations

from typing import Annotated

from fastapi import APIRouter, Depends
from starlette.responses import Response

import dovetail
from dovetail_server.openapi.document import FAILURES
from dovetail_server.routes.info import shown_reply
from dovetail_server.state import ServerState, get_ready_state

router = APIRouter(tags=["server"])
State = Annotated[ServerState, Depends(get_ready_state)]


@router.get("/props", response_model=None, responses=FAILURES)
async def props(state: State) -> Response:
    """Context, slots and template under llama.cpp's names."""
    text, settings = state.text, state.settings
    special = text.tokenizer.special_tokens
    return shown_reply(
        {
            "default_generation_settings": {"n_ctx": text.limits.context_len, "params": dict(text.limits.defaults)},
            "total_slots": state.info.max_running_requests,
            "model_alias": state.served_names[0],
            "model_path": settings.model_path,
            "chat_template": text.template.source,
            "bos_token": special.get("bos_token", ""),
            "eos_token": special.get("eos_token", ""),
            "modalities": {"vision": not text.template.no_images, "audio": False},
            "build_info": f"dovetail-{dovetail.__version__}",
            "is_sleeping": False,
        }
    )


@router.get("/info", response_model=None, responses=FAILURES)
async def tgi_info(state: State) -> Response:
    """Model and limits under the names of Text Generation Inference."""
    info, context_len = state.info, state.text.limits.context_len
    return shown_reply(
        {
            "model_id": state.served_names[0],
            "model_dtype": info.dtype,
            "model_device_type": info.device.partition(":")[0],
            "model_pipeline_tag": "text-generation" if info.generates else "feature-extraction",
            "max_concurrent_requests": state.max_live,
            "max_input_tokens": context_len - 1 if info.generates else context_len,
            "max_total_tokens": context_len,
            "router": "dovetail",
            "version": dovetail.__version__,
        }
    )
