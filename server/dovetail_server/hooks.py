"""Where hook plugins (`--plugin NAME`) meet the server: defaults, selection, start and stop, routes, health.

Everything here runs at start or stop; what a hook returned is called directly afterwards.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from pydantic import ValidationError

from dovetail.errors import ConfigError
from dovetail_server.settings import ServeSettings

if TYPE_CHECKING:
    from dovetail.plugins import HookManager, PluginPlan

logger = logging.getLogger("dovetail.server")
LATER = ("dovetail_settings", "dovetail_request_observers", "dovetail_stat_loggers")
"""Hooks that this version does not act on; a plugin that has one is told so."""


def configure(settings: ServeSettings, manager: HookManager | None, facts: dict[str, Any]) -> ServeSettings:
    """Apply the defaults that plugins propose, each with its reason in the log; what the user gave stays.

    Raises:
        ConfigError: A proposed value is not possible.
    """
    if manager is None:
        return settings
    from dovetail.plugins.contexts import ConfigDraft

    given = {name: getattr(settings, name) for name in settings.model_fields_set}
    draft = ConfigDraft(frozenset(ServeSettings.model_fields), given)
    manager.configure(draft, facts)
    for proposal in draft.proposals:
        state = "sets" if proposal.applied else "would set"
        text = "Plugin %s %s %s to %r: %s."
        logger.info(text, proposal.plugin, state, proposal.key, proposal.value, proposal.why)
    try:
        return ServeSettings(**(given | draft.defaults()))
    except ValidationError as error:
        first = error.errors()[0]
        raise ConfigError(f"a plugin proposes {first['loc'][0]} {first['input']!r}: {first['msg']}") from None


@dataclass(slots=True, kw_only=True)
class ApiHooks:
    """What hook plugins bring to the HTTP process."""

    manager: HookManager | None = None
    routes: dict[str, Callable[..., Any]] = field(default_factory=dict)
    """ASGI applications by full path."""
    checks: list[tuple[str, Callable[[], str | None]]] = field(default_factory=list)

    @classmethod
    def start(cls, plan: PluginPlan) -> ApiHooks:
        """Start the plugins whose roles include this process, and collect routes and health checks.

        Raises:
            PluginError: One failed; the server must not start.
        """
        if not plan.of_kind("hooks"):
            return cls()
        from dovetail.plugins import HookManager, load

        manager = HookManager(load(plan, "api").all("hooks"))
        manager.start("api")
        hooks = cls(manager=manager)
        for result in manager.in_process("dovetail_routes", "api"):
            for path, app in result.value.routes.items():
                hooks.add_route(f"/x/{result.plugin.name}{path}", app)
        for result in manager.in_process("dovetail_health", "api"):
            hooks.checks.append((f"{result.plugin.name}: {result.value.name}", result.value.check))
        hooks.warn_of_later_hooks()
        return hooks

    def add_route(self, path: str, app: Callable[..., Any]) -> None:
        """Take a route.

        Raises:
            ConfigError: It exists already.
        """
        if path in self.routes:
            raise ConfigError(f"route {path}: two plugins bring it; disable one of them")
        self.routes[path] = app

    def warn_of_later_hooks(self) -> None:
        """Say which hooks are there and not acted on: nothing is ignored silently."""
        if self.manager is None:
            return
        found = {r.plugin.name: None for r in self.manager.settings()}
        for hook in LATER[1:]:
            found |= {r.plugin.name: None for r in self.manager.in_process(hook, "api")}
        for name in found:
            logger.warning("Plugin %s has one of %s, which this version does not use yet.", name, ", ".join(LATER))

    def why_not_healthy(self) -> str | None:
        """Return the first check's complaint; a check that raises complains too."""
        for name, check in self.checks:
            try:
                complaint = check()
            except Exception as error:
                logger.warning("health check %s raised", name, exc_info=error)
                complaint = f"the check raised {type(error).__name__}"
            if complaint is not None:
                return f"{name}: {complaint}"
        return None

    def stop(self) -> None:
        """Call the plugins' stop hooks; failures are logged."""
        if self.manager is not None:
            self.manager.stop("api")


class AsgiEndpoint:
    """Makes any ASGI callable, a plain function too, an endpoint that Starlette mounts as it is."""

    def __init__(self, app: Callable[..., Any]) -> None:
        """Wrap `app`."""
        self.app = app

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        """Serve."""
        await self.app(scope, receive, send)
