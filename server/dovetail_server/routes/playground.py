"""`/playground`: chat, comparison, model, batches and load in a browser, from files of this package alone.

The files hold no secret and need no key, so that the page can ask for one; what it then asks this server, it asks with
that key, as any client does.
"""

from __future__ import annotations

from fastapi import APIRouter
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import RedirectResponse, Response

from dovetail_server.playground import INDEX, Asset, assets

router = APIRouter(include_in_schema=False)
POLICY = (
    "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self' blob:; font-src 'self'; "
    "connect-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'; "
    "require-trusted-types-for 'script'; trusted-types 'none'"
)
"""No script or style in the page, nothing from or to another host, and no text that is ever read as HTML.

`blob:` is for previews of images that somebody attaches: only a script of the page can make such an address."""


@router.get("/playground")
async def page(request: Request) -> Response:
    """The page."""
    return send(request, assets()[INDEX], {"content-security-policy": POLICY, "referrer-policy": "no-referrer"})


@router.get("/playground/{name:path}")
async def asset(request: Request, name: str) -> Response:
    """A file of the page."""
    if not name:
        return RedirectResponse("../playground")
    found = assets().get(name)
    if found is None or name == INDEX:
        raise HTTPException(404)
    return send(request, found, {})


def send(request: Request, found: Asset, headers: dict[str, str]) -> Response:
    """Send a file, or say that the browser has it already: it changes with the installed package only."""
    headers = {"etag": found.tag, "cache-control": "no-cache", "x-content-type-options": "nosniff", **headers}
    if request.headers.get("if-none-match") == found.tag:
        return Response(status_code=304, headers=headers)
    return Response(found.data, media_type=found.media_type, headers=headers)
