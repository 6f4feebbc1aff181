"""`/metrics`."""

from __future__ import annotations

from typing import Annotated

from fastapi import APIRouter, Depends
from starlette.requests import Request
from starlette.responses import PlainTextResponse, Response

from dovetail_server.openapi.document import FAILURES
from dovetail_server.state import ServerState, get_state

router = APIRouter(tags=["server"])


@router.get("/metrics", response_model=None, response_class=PlainTextResponse, responses=FAILURES)
async def metrics(request: Request, state: Annotated[ServerState, Depends(get_state)]) -> Response:
    """Counters, gauges and histograms for Prometheus, in its text format or OpenMetrics'."""
    text, media_type = state.metrics.render(request.headers.get("accept", ""))
    return Response(text, headers={"content-type": media_type})
