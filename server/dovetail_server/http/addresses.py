"""Which route an address means: the prefix of a proxy, `/v1` too many or too few, doubled slashes, Azure's paths.

This is the outermost layer, so that keys, limits, the gateway and Ray's front all see the route's own path, and there
is no second reading of it. Only whole parts that are in front are added or left out, and only where that gives a route
below `/v1`: `..` is a name like any other, what is still encoded stays so, and what gives no such route stays as it was
sent. All other routes, those of operators among them, have one address: a proxy in front that lets `/v1` pass, or
keeps `/flush_cache` back, must not be got around by another spelling.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from contextvars import ContextVar

from starlette.types import ASGIApp, Receive, Scope, Send

DEPLOYMENT: ContextVar[str | None] = ContextVar("dovetail_deployment", default=None)
"""The model that a request's address names, as Azure's do; None for other addresses."""
ASKED = "dovetail.asked"
"""In the scope: the path that named a deployment; a gateway sends a worker this one."""
SLASHES = re.compile("/{2,}")
FORM = re.compile(r"(?:/openai(?:/deployments/(?P<deployment>[^/]+))?)?(?:/v1)*(?P<rest>/.*)", re.DOTALL)
DEPLOYED = frozenset(("/chat/completions", "/completions", "/embeddings", "/responses"))
"""What a deployment of Azure's serves: routes whose body names a model."""
PARAMETER = re.compile(r"\{\w+(:path)?\}")


class Routes:
    """The paths of routes, as FastAPI writes them: `/v1/files/{file_id}`, `/v1/models/{model_id:path}`."""

    def __init__(self, paths: Iterable[str]) -> None:
        """Take them; their methods do not matter here."""
        paths = list(paths)
        self._plain = frozenset(path for path in paths if "{" not in path)
        self._others = re.compile("|".join(sorted({_pattern(path) for path in paths if "{" in path})) or r"(?!)")

    def __contains__(self, path: str) -> bool:
        """Whether a path leads to a route."""
        return path in self._plain or self._others.fullmatch(path) is not None

    def meant_by(self, path: str) -> tuple[str, str | None]:
        """Return the path of the route that an address means, and the deployment that it names; else the address."""
        if path in self:
            return path, None
        form = FORM.fullmatch(SLASHES.sub("/", path))
        if form is None:
            return path, None
        rest, deployment = form["rest"].removesuffix("/"), form["deployment"]
        if deployment is not None and rest not in DEPLOYED:
            return path, None
        meant = f"/v1{rest}"
        return (meant, deployment) if meant in self else (path, None)


def _pattern(path: str) -> str:
    """Return the expression of a path: a parameter is one part of it, or with `:path` all that follows."""
    literals = PARAMETER.split(path)[::2]
    found = [".+" if kind else "[^/]+" for kind in PARAMETER.findall(path)]
    return re.escape(literals[0]) + "".join(
        parameter + re.escape(literal) for parameter, literal in zip(found, literals[1:], strict=True)
    )


class Addresses:
    """Gives every request the path of the route that it means."""

    def __init__(self, app: ASGIApp, routes: Routes, root_path: str = "") -> None:
        """Wrap `app`; `root_path`, the prefix of a proxy, begins with a slash and does not end with one."""
        self.app = app
        self.routes = routes
        self.root_path = root_path
        # However often it is there: the router would take off what is left of it, and read another path than we do.
        self._prefix = re.compile(f"(?:{re.escape(root_path)})*(?=/)")

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve one connection's request."""
        if scope["type"] != "lifespan":
            path = scope["path"]
            if self.root_path and (found := self._prefix.match(path)):
                path = path[found.end() :]
            meant, deployment = self.routes.meant_by(path)
            if self.root_path:
                is_taken_off = not meant.startswith(f"{self.root_path}/")  # as with --root-path /v1
                scope = {**scope, "path": meant, "root_path": self.root_path if is_taken_off else ""}
            elif meant != path:
                scope = {**scope, "path": meant}
            if deployment is not None:
                scope[ASKED] = path
                DEPLOYMENT.set(deployment)
        await self.app(scope, receive, send)
