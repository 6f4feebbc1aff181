"""`/docs`: the interactive documentation, from files of this machine: nothing is loaded from anywhere else."""

from __future__ import annotations

import asyncio
from functools import cache
from importlib.resources import files

from fastapi import APIRouter
from starlette.requests import Request
from starlette.responses import RedirectResponse, Response

from dovetail_server.playground import Asset
from dovetail_server.routes.playground import send
from dovetail_server.state import State

router = APIRouter(include_in_schema=False)
ASSETS = {
    "swagger-ui-bundle.js": "text/javascript",
    "swagger-ui.css": "text/css",
    "favicon-32x32.png": "image/png",
}
"""Swagger UI, as the package `fastapi-swagger` brings it (Apache-2.0)."""
OWN = {"docs.html": "text/html", "start.js": "text/javascript"}
"""The page, and what it runs: a file of its own, so that scripts in the page can be forbidden."""
POLICY = (
    "default-src 'none'; script-src 'self'; style-src 'self' 'unsafe-inline'; img-src 'self' data:; "
    "connect-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
)


@cache
def asset(name: str) -> Asset:
    """Return the page, or a file of it."""
    folder = files("dovetail_server.playground") if name in OWN else files("fastapi_swagger") / "resources"
    return Asset.of(folder / name, {**ASSETS, **OWN}[name])


@router.get("/")
async def root(state: State) -> Response:
    """Whoever opens the server's address finds the playground; the documentation where that is switched off."""
    return RedirectResponse("docs" if state.settings.disable_playground else "playground")


@router.get("/docs")
async def docs(request: Request) -> Response:
    """The page."""
    return send(request, await asyncio.to_thread(asset, "docs.html"), {"content-security-policy": POLICY})


async def send_asset(request: Request) -> Response:
    """A file of the page; it changes with the installed packages only."""
    return send(request, await asyncio.to_thread(asset, request.url.path.rpartition("/")[2]), {})


for _name in (*ASSETS, "start.js"):
    router.add_api_route(f"/docs/{_name}", send_asset)
