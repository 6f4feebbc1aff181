"""What this server is: model, settings, plugins."""

from __future__ import annotations

import time
from datetime import UTC, datetime
from typing import Annotated, Any

import msgspec
from fastapi import APIRouter, Query
from starlette.requests import Request
from starlette.responses import PlainTextResponse, Response

import dovetail
from dovetail_server.http.auth import CALLER
from dovetail_server.http.shown import shown, shown_options
from dovetail_server.metrics.series import hit_rate
from dovetail_server.openapi.document import FAILURES
from dovetail_server.state import ReadyState, State
from dovetail_server.tenants.tenant import Tenant

router = APIRouter(tags=["server"])


def json_reply(value: Any) -> Response:
    """Encode a value."""
    return Response(msgspec.json.encode(value), media_type="application/json")


def shown_reply(value: Any) -> Response:
    """Encode what the present caller is shown of a value."""
    return json_reply(shown(value, CALLER.get()))


@router.get("/get_model_info", response_model=None, responses=FAILURES)
@router.get("/model_info", response_model=None, responses=FAILURES)
async def model_info(state: ReadyState) -> Response:
    """Facts of the model."""
    settings, info = state.settings, state.info
    no_images = state.text.template.no_images
    return shown_reply(
        {
            "model_path": settings.model_path,
            "tokenizer_path": settings.tokenizer_path or settings.model_path,
            "served_model_names": state.served_names,
            "is_generation": True,
            "architecture": info.architecture,
            "dtype": info.dtype,
            "vocab_size": info.vocab_size,
            "context_length": state.text.limits.context_len,
            "max_images": 0 if no_images else state.max_images,
            "no_images": no_images or None,
            "max_image_patches": 0 if no_images else info.timed_patches or info.max_image_patches,
            "max_body_bytes": settings.max_body_bytes,
            "reasoning_parser": settings.reasoning_parser,
            "tool_call_parser": settings.tool_call_parser,
            "preferred_sampling_params": dict(state.text.limits.defaults),
        }
    )


@router.get("/get_server_info", response_model=None, responses=FAILURES)
@router.get("/server_info", response_model=None, responses=FAILURES)
async def server_info(state: ReadyState) -> Response:
    """Version, settings, engine and load."""
    load = await state.engine.control("stats")
    info = msgspec.structs.asdict(state.info)
    settings = state.settings.model_dump(mode="json", exclude={"plugins"})
    return shown_reply(
        {
            **settings,
            "plugins": shown_options(state.settings.plugins),
            "version": dovetail.__version__,
            "status": "draining" if state.is_stopping else "ready",
            "engine": info,
            "max_total_num_tokens": state.info.max_total_tokens,
            "internal_states": [load],
        }
    )


@router.get("/version", response_model=None, responses=FAILURES)
async def version() -> Response:
    """Dovetail's version."""
    return json_reply({"version": dovetail.__version__})


@router.get("/loads", response_model=None, include_in_schema=False)
@router.get("/v1/loads", response_model=None, responses=FAILURES)
async def loads(state: ReadyState) -> Response:
    """The engine's load under SGLang's names, for routers that place requests by it; every section, always."""
    stats = await state.engine.control("stats")
    tally, size = state.metrics.tally, stats["max_total_tokens"]
    usage = stats["num_used_tokens"] / size if size else 0.0
    load = {
        "dp_rank": 0,
        "timestamp": time.time(),
        "num_running_reqs": stats["num_running"],
        "num_waiting_reqs": stats["num_queued"],
        "num_used_tokens": stats["num_used_tokens"],
        "num_total_tokens": stats["num_used_tokens"],
        "num_active_tokens": stats["num_used_tokens"],
        "max_total_num_tokens": size,
        "max_running_requests": state.info.max_running_requests,
        "token_usage": usage,
        "gen_throughput": stats["gen_throughput"],
        "cache_hit_rate": hit_rate(tally),
        "utilization": stats["num_running"] / state.info.max_running_requests,
        "memory": {"token_capacity": size, "weight_gb": state.info.weight_bytes / (1 << 30)},
        "queues": {"waiting": stats["num_queued"]},
    }
    now = datetime.now(UTC).isoformat()
    return json_reply({"timestamp": now, "version": dovetail.__version__, "dp_rank_count": 1, "loads": [load]})


@router.get("/v1/steps", response_model=None, responses=FAILURES)
async def steps(state: ReadyState, after: Annotated[int, Query(ge=0, le=1 << 62)] = 0) -> Response:
    """The engine's last steps, up to 512, the oldest first; those after the step of this number."""
    return json_reply(await state.engine.control("steps", after=after))


@router.get("/v1/plugins", response_model=None, responses=FAILURES)
async def plugins(state: State) -> Response:
    """Every plugin that is installed, with its state."""
    return shown_reply(state.registry.listing() if state.registry is not None else {"object": "list", "data": []})


# What clients of llama.cpp (`/props`) and of Text Generation Inference (`/info`) ask a server about itself.


@router.get("/props", response_model=None, responses=FAILURES)
async def props(state: ReadyState) -> Response:
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
async def tgi_info(state: ReadyState) -> Response:
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


# `/metrics`.


@router.get("/metrics", response_model=None, response_class=PlainTextResponse, responses=FAILURES)
async def metrics(request: Request, state: State) -> Response:
    """Counters, gauges and histograms for Prometheus, in its text format or OpenMetrics'."""
    text, media_type = state.metrics.render(request.headers.get("accept", ""))
    return Response(text, headers={"content-type": media_type})


# What each key has used, and what it may use.


@router.get("/v1/usage", response_model=None, responses=FAILURES)
async def usage(state: State) -> Response:
    """The caller's own use since the server's start, with its limits; for the admin's key, that of every key."""
    caller = CALLER.get()
    seen = state.keys.tenants.values() if caller.is_admin else (state.keys.tenant(caller.owner),)
    data = [shown_usage(tenant) for tenant in seen if tenant.owner == caller.owner or tenant.usage.requests]
    return Response(msgspec.json.encode({"object": "list", "data": data}), media_type="application/json")


def shown_usage(tenant: Tenant) -> dict[str, Any]:
    """Return one key's row."""
    limits = tenant.grant.limits.model_dump()
    return {
        "object": "usage",
        "key": tenant.short,
        "name": tenant.grant.name or None,
        "weight": tenant.grant.weight,
        "requests": tenant.usage.requests,
        "running_requests": tenant.num_live,
        "input_tokens": tenant.usage.input_tokens,
        "output_tokens": tenant.usage.output_tokens,
        "rejected": dict(tenant.usage.rejected),
        "limits": {name: limit for name, limit in limits.items() if limit is not None},
    }
