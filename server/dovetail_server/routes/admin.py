"""Commands for whoever runs the server."""

from __future__ import annotations

from typing import Annotated

import msgspec
from fastapi import APIRouter, Depends
from pydantic import Field
from starlette.responses import Response

from dovetail.contracts.errors import RequestError
from dovetail_server.http.auth import CALLER, admin_only
from dovetail_server.openapi.document import FAILURES, json_route
from dovetail_server.reading.request import json_body
from dovetail_server.schema.common import RequestModel, Rid
from dovetail_server.state import ReadyState

router = APIRouter(tags=["server"], dependencies=[Depends(admin_only)])


class AbortRequest(RequestModel):
    """Which requests to abort."""

    rid: Rid | None = Field(None, description="The `rid` a request was sent with, or the `id` of its reply.")
    abort_all: bool | None = None


@router.get("/flush_cache", response_model=None, include_in_schema=False)
@router.post("/flush_cache", response_model=None, responses=FAILURES)
async def flush_cache(state: ReadyState) -> Response:
    """Forget cached prefixes; running requests keep their pages."""
    result = await state.engine.control("flush_cache")
    return Response(msgspec.json.encode(result), media_type="application/json")


@json_route(router, "/abort_request", body=AbortRequest)
async def abort_request(body: Annotated[AbortRequest, Depends(json_body(AbortRequest))], state: ReadyState) -> Response:
    """Abort one request with all its choices, or all requests. Without the admin's key, the caller's own ones only."""
    if body.rid is None and not body.abort_all:
        raise RequestError("rid is required, or abort_all: true", param="rid", code="missing_required_parameter")
    caller = CALLER.get()
    reachable = [live for live in state.live.values() if caller.is_admin or live.owner == caller.owner]
    doomed = [live for live in reachable if body.abort_all or live.rid == body.rid or is_part_of(live.rid, body.rid)]
    for live in doomed:
        live.abort()
    return Response(msgspec.json.encode({"aborted": len(doomed)}), media_type="application/json")


def is_part_of(rid: str, request: str | None) -> bool:
    """Tell whether `rid` is a choice (`request#3`) of a request."""
    head, dash, tail = rid.rpartition("#")
    return bool(dash) and head == request and tail.isdigit()
