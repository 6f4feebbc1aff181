"""The APIs that `--apis` names, made and checked."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import TYPE_CHECKING

from dovetail.contracts.api import Api, Route, View
from dovetail.errors import PluginError
from dovetail.plugins import PluginPlan, load, make_plan
from dovetail.plugins.loader import LoadedPlugins, describe, naming_plugin

if TYPE_CHECKING:
    from dovetail.plugin_settings import PluginSettings

NAME = re.compile(r"[a-z][a-z0-9_]{0,63}")


def apis_of(plan: PluginPlan) -> list[Api]:
    """Return the APIs of a plan, in its order.

    Raises:
        PluginError: One cannot be made, or brings a route that another one has.
    """
    return made(load(plan, "api"))


def made(loaded: LoadedPlugins) -> list[Api]:
    """As `apis_of`, of plugins that have been loaded."""
    apis: list[Api] = []
    owners: dict[str, str] = {}
    for planned, kind in loaded.candidates("api"):
        with naming_plugin(loaded), loaded.watched(planned):
            api: Api = kind()
            routes = api.routes()
        who = describe(planned)
        for route in routes:
            if not isinstance(route, Route | View):
                raise PluginError(f"{who}: routes() returned {route!r}; possible: a Route or a View of contracts.api")
            if not NAME.fullmatch(route.name) or not route.path.startswith("/") or ".." in route.path:
                text = f"{who}: route {route.name!r} at {route.path!r}: a name has letters, digits and _, a path begins"
                raise PluginError(f"{text} with / and has no ..")
            for key in (f"the path {route.path}", f"the name {route.name}"):
                if key in owners:
                    raise PluginError(f"{who} and {owners[key]} both bring {key}; leave one of them out of --apis")
                owners[key] = who
        apis.append(api)
    return apis


def generating(apis: Sequence[Api]) -> list[Route]:
    """Return the routes that generate."""
    return [route for api in apis for route in api.routes() if isinstance(route, Route)]


def named_apis(settings: PluginSettings) -> list[Api]:
    """Return the APIs that settings name, for a process that has no other plugins.

    Raises:
        PluginError: See `apis_of`; or one is not installed.
    """
    from dovetail.processing.plan import scan

    registry, _ = scan(settings)
    return apis_of(make_plan(registry, api=settings.apis))
