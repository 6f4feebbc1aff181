"""What each key has used, and what it may use."""

from __future__ import annotations

from typing import Annotated, Any

import msgspec
from fastapi import APIRouter, Depends
from starlette.responses import Response

from dovetail_server.http.auth import CALLER
from dovetail_server.openapi.document import FAILURES
from dovetail_server.state import ServerState, get_state
from dovetail_server.tenants.tenant import Tenant

router = APIRouter(tags=["server"])


@router.get("/v1/usage", response_model=None, responses=FAILURES)
async def usage(state: Annotated[ServerState, Depends(get_state)]) -> Response:
    """The caller's own use since the server's start, with its limits; for the admin's key, that of every key."""
    caller = CALLER.get()
    seen = state.keys.tenants.values() if caller.is_admin else (state.keys.tenant(caller.owner),)
    data = [shown(tenant) for tenant in seen if tenant.owner == caller.owner or tenant.usage.requests]
    return Response(msgspec.json.encode({"object": "list", "data": data}), media_type="application/json")


def shown(tenant: Tenant) -> dict[str, Any]:
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
