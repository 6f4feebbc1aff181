"""Where hook plugins (`--plugin NAME`) meet the server: start and stop, routes, health, observers.

Everything here runs at start or stop; what a hook returned is called directly afterwards.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from re import Pattern
from typing import TYPE_CHECKING, Any

from starlette.routing import Match, Route
from starlette.types import Scope

from dovetail.contracts.errors import ConfigError, PluginError
from dovetail.plugins.loader import describe
from dovetail_server.http.auth import check_admin
from dovetail_server.observe.observers import KINDS, Observers

if TYPE_CHECKING:
    from dovetail.plugins import HookManager, PlannedPlugin, PluginPlan

logger = logging.getLogger("dovetail.server")


@dataclass(slots=True, kw_only=True)
class ApiHooks:
    """What hook plugins bring to the HTTP process."""

    manager: HookManager | None = None
    routes: dict[str, Callable[..., Any]] = field(default_factory=dict)
    """ASGI applications by full path."""
    checks: list[tuple[str, Callable[[], str | None]]] = field(default_factory=list)
    observers: Observers = field(default_factory=Observers)
    _owners: dict[str, str] = field(default_factory=dict)

    @classmethod
    def start(cls, plan: PluginPlan) -> ApiHooks:
        """Start the plugins whose roles include this process, and collect what they bring.

        Raises:
            PluginError: One failed, or returned what its hook does not; the server must not start.
        """
        if not plan.of_kind("hooks"):
            return cls()
        from dovetail.plugins import HookManager, load

        manager = HookManager(load(plan, "api").all("hooks"), timeout_s=plan.timeout_s)
        manager.start("api")
        hooks = cls(manager=manager)
        try:
            hooks.collect(manager)
        except ConfigError:
            hooks.stop()
            raise
        return hooks

    def collect(self, manager: HookManager) -> None:
        """Ask the plugins for routes, health checks, observers and loggers.

        Raises:
            PluginError: One failed, or returned what its hook does not.
        """
        from dovetail.contracts.hooks import HealthCheck

        for result in manager.in_process("dovetail_routes", "api"):
            self.add_routes(result.plugin, result.value)
        for result in manager.in_process("dovetail_health", "api"):
            if not isinstance(result.value, HealthCheck):
                raise _wrong(result.plugin, "dovetail_health", result.value, "HealthCheck")
            self.checks.append((f"{result.plugin.name}: {result.value.name}", result.value.check))
        for hook in KINDS:
            for result in manager.in_process(hook, "api"):
                self.observers.add(hook, f"{describe(result.plugin)}: {hook}", result.value)

    def add_routes(self, plugin: PlannedPlugin, value: Any) -> None:
        """Take a plugin's routes.

        Raises:
            PluginError: It returned no `RouteSet`, a path is malformed, or another plugin has the path.
        """
        from dovetail.contracts.hooks import RouteSet

        if not isinstance(value, RouteSet):
            raise _wrong(plugin, "dovetail_routes", value, "RouteSet")
        if not re.fullmatch(r"[\w.-]+", plugin.name):
            raise PluginError(
                f"{describe(plugin)}: a plugin with routes needs a name of letters, digits, '.', '_' and '-'"
            )
        for path, app in value.routes.items():
            if not path.startswith("/") or ".." in path or not callable(app):
                raise PluginError(
                    f"{describe(plugin)}: route {path!r} must begin with '/' and lead to an ASGI application"
                )
            endpoint = AdminEndpoint(app) if path in value.admin else AsgiEndpoint(app)
            self.add_route(f"/x/{plugin.name}{path}", endpoint, plugin.qualified)
        if stray := sorted(set(value.admin) - set(value.routes)):
            raise PluginError(f"{describe(plugin)}: admin names {stray[0]!r}, which is none of its routes")

    def add_route(self, path: str, app: Callable[..., Any], owner: str) -> None:
        """Take a route. Paths that differ only in the names of their parameters collide.

        Raises:
            PluginError: It exists already.
        """
        shape = re.sub(r"\{[^}]*\}", "{}", path)
        if shape in self._owners:
            other = self._owners[shape]
            who = f"{other} brings it twice" if other == owner else f"{other} and {owner} both bring it"
            raise PluginError(f"route {path}: {who}; disable one of them")
        self._owners[shape] = owner
        self.routes[path] = app

    def check_free(self, taken: Iterable[Pattern[str]]) -> None:
        """Compare the plugins' routes with the server's own.

        Raises:
            PluginError: A route of a plugin is one of the server's.
        """
        for pattern in taken:
            for path in self.routes:
                if pattern.match(path):
                    owner = self._owners[re.sub(r"\{[^}]*\}", "{}", path)]
                    raise PluginError(f"route {path}: {owner} brings it and Dovetail has it; disable the plugin")

    def why_not_healthy(self) -> str | None:
        """Return the first check's complaint; a check that raises complains too."""
        for name, check in self.checks:
            try:
                complaint = check()
            except (Exception, SystemExit) as error:
                logger.warning("health check %s raised", name, exc_info=error)
                complaint = f"the check raised {type(error).__name__}"
            if complaint is not None:
                return f"{name}: {complaint}"
        return None

    def stop(self) -> None:
        """Call the plugins' stop hooks; failures are logged."""
        if self.manager is not None:
            self.manager.stop("api")


def _wrong(plugin: PlannedPlugin, hook: str, value: Any, wanted: str) -> PluginError:
    return PluginError(f"{describe(plugin)}: {hook} returned {value!r}; return a dovetail.contracts.{wanted} or None")


class PluginRoute(Route):
    """A route of a plugin; as FastAPI's own, it leaves itself in the scope, for those who count requests by route."""

    def matches(self, scope: Scope) -> tuple[Match, Scope]:
        """Match a request."""
        match, found = super().matches(scope)
        return match, found if match == Match.NONE else {**found, "route": self}


class AsgiEndpoint:
    """Makes any ASGI callable, a plain function too, an endpoint that Starlette mounts as it is."""

    def __init__(self, app: Callable[..., Any]) -> None:
        """Wrap `app`."""
        self.app = app

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        """Serve."""
        await self.app(scope, receive, send)


class AdminEndpoint(AsgiEndpoint):
    """As `AsgiEndpoint`, for callers with the admin's key."""

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        """Serve, or raise the error that says which key is missing."""
        check_admin(scope["state"]["caller"])
        await super().__call__(scope, receive, send)
