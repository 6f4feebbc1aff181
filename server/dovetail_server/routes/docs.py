"""`/docs`: the interactive documentation, from files of this machine: nothing is loaded from anywhere else."""

from __future__ import annotations

import asyncio
import hashlib
from functools import cache
from importlib.resources import files
from typing import Annotated

from fastapi import APIRouter, Depends
from starlette.requests import Request
from starlette.responses import HTMLResponse, RedirectResponse, Response

from dovetail_server.state import ServerState, get_state

router = APIRouter(include_in_schema=False)
ASSETS = {
    "swagger-ui-bundle.js": "text/javascript",
    "swagger-ui.css": "text/css",
    "favicon-32x32.png": "image/png",
}
"""Swagger UI, as the package `fastapi-swagger` brings it (Apache-2.0)."""
POLICY = (
    "default-src 'none'; script-src 'self'; style-src 'self' 'unsafe-inline'; img-src 'self' data:; "
    "connect-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
)
PAGE = """\
<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<title>Dovetail</title>
<link rel="icon" href="docs/favicon-32x32.png">
<link rel="stylesheet" href="docs/swagger-ui.css">
</head>
<body>
<div id="page"></div>
<script src="docs/swagger-ui-bundle.js"></script>
<script src="docs/start.js"></script>
</body>
</html>
"""
START = """\
SwaggerUIBundle({
  url: "openapi.json",
  dom_id: "#page",
  deepLinking: true,
  persistAuthorization: false,
  displayRequestDuration: true,
  defaultModelsExpandDepth: 0,
  tryItOutEnabled: true,
  validatorUrl: null,
});
"""


@cache
def asset(name: str) -> tuple[bytes, str]:
    """Return a file of Swagger UI and its entity tag."""
    data = (files("fastapi_swagger") / "resources" / name).read_bytes()
    return data, f'"{hashlib.sha256(data).hexdigest()[:32]}"'


@router.get("/")
async def root(state: Annotated[ServerState, Depends(get_state)]) -> Response:
    """Whoever opens the server's address finds the playground; the documentation where that is switched off."""
    return RedirectResponse("docs" if state.settings.disable_playground else "playground")


@router.get("/docs")
async def docs() -> Response:
    """The page."""
    return HTMLResponse(PAGE, headers={"content-security-policy": POLICY})


@router.get("/docs/start.js")
async def start() -> Response:
    """What the page runs: a file of its own, so that scripts in the page can be forbidden."""
    return Response(START, media_type="text/javascript")


async def send_asset(request: Request) -> Response:
    """A file of Swagger UI; it changes with the installed package only."""
    name = request.url.path.rpartition("/")[2]
    data, tag = await asyncio.to_thread(asset, name)
    headers = {"etag": tag, "cache-control": "no-cache", "x-content-type-options": "nosniff"}
    if request.headers.get("if-none-match") == tag:
        return Response(status_code=304, headers=headers)
    return Response(data, media_type=ASSETS[name], headers=headers)


for _name in ASSETS:
    router.add_api_route(f"/docs/{_name}", send_asset)
