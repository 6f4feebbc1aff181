"""Probes: whether the process lives, and whether it should get traffic."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from typing import Any

import msgspec
from fastapi import APIRouter
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from dovetail_server.http.auth import CALLER, NO_CALLER, PROBES
from dovetail_server.openapi.document import FAILURES
from dovetail_server.state import State

router = APIRouter(tags=["health"])
RESPONSES: dict[int | str, dict[str, Any]] = {503: {"description": "Not ready", "content": {"application/json": {}}}}


def answer(reason: str | None, removed: Sequence[str] = ()) -> Response:
    """Return 200, or 503 with the reason; `plugins` shows objects of plugins that were removed for failing."""
    body: dict[str, Any] = {"status": "ok"} if reason is None else {"status": "unavailable", "reason": reason}
    caller = CALLER.get()
    if caller is NO_CALLER:  # a probe without a key learns no reasons
        body = {"status": body["status"]}
    elif reason is not None and not caller.may_admin:  # what follows may name folders
        body["reason"] = reason.partition(":")[0]
    if removed and caller is not NO_CALLER:
        body["plugins"] = list(removed)
    return Response(msgspec.json.encode(body), 200 if reason is None else 503, media_type="application/json")


@router.get("/livez", response_model=None, responses=FAILURES)
async def livez() -> Response:
    """Whether the HTTP process answers."""
    return answer(None)


@router.get("/readyz", response_model=None, responses=RESPONSES)
async def readyz(state: State) -> Response:
    """Whether requests would be served now: started, not draining, engine alive and stepping."""
    return answer(await state.health(), state.hooks.observers.removed)


@router.head("/health", response_model=None, include_in_schema=False)
@router.get("/health", response_model=None, responses=RESPONSES)
async def health(state: State) -> Response:
    """The same as `/readyz`, under the peers' name."""
    return answer(await state.health(), state.hooks.observers.removed)


@router.head("/ping", response_model=None, include_in_schema=False)
@router.post("/ping", response_model=None, responses=RESPONSES)
@router.get("/ping", response_model=None, responses=RESPONSES)
async def ping(state: State) -> Response:
    """The same as `/health`, under SageMaker's name."""
    return answer(await state.health(), state.hooks.observers.removed)


@router.get("/health_generate", response_model=None, responses=RESPONSES)
async def health_generate(state: State) -> Response:
    """Whether the engine's step counter moves while there is work; no synthetic request is made."""
    return answer(await state.health(), state.hooks.observers.removed)


async def live(request: Request) -> Response:
    """The process answers: of an address that has no router of its own."""
    return answer(None)


def probe_routes(ready: Callable[[Request], Awaitable[Response]]) -> list[Route]:
    """Return the routes of probes for such an address; `ready` answers all but the first."""
    routes = [Route(path, ready, methods=["GET", "POST"] if path == "/ping" else ["GET"]) for path in sorted(PROBES)]
    return [Route("/livez", live, methods=["GET"]), *routes]
