"""The path under which a proxy in front shows the server (`--root-path`)."""

from __future__ import annotations

from starlette.types import ASGIApp, Receive, Scope, Send


class Prefix:
    """Takes the prefix off requests that still have it, so that everything below sees one form of every path."""

    def __init__(self, app: ASGIApp, root_path: str) -> None:
        """Wrap `app`; `root_path` begins with a slash and does not end with one."""
        self.app = app
        self.root_path = root_path

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve one connection's request."""
        if scope["type"] != "lifespan":
            path = scope["path"]
            if path.startswith(self.root_path + "/"):
                path = path.removeprefix(self.root_path)
            scope = {**scope, "path": path, "root_path": self.root_path}
        await self.app(scope, receive, send)
