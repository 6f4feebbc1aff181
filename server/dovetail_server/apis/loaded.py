"""The APIs that `--apis` names, made and checked."""

from __future__ import annotations

from collections.abc import Sequence
from inspect import signature
from typing import TYPE_CHECKING

from dovetail.base.distribution import DISTRIBUTION
from dovetail.contracts.api import Api, Route
from dovetail.contracts.errors import PluginError
from dovetail.plugins import PluginPlan, load, make_plan
from dovetail.plugins.loader import LoadedPlugins, describe, naming_plugin
from dovetail.processing.apis import routes_of
from dovetail_server.apis.guarded import Guarded
from dovetail_server.apis.routes import BUILT_IN

if TYPE_CHECKING:
    from dovetail.processing.plugin_settings import PluginSettings


def apis_of(plan: PluginPlan) -> list[Api]:
    """Return the APIs of a plan, in its order.

    Raises:
        PluginError: One cannot be made or served, or brings a route that another one has, or tells of its errors.
    """
    return made(load(plan, "api"))


def made(loaded: LoadedPlugins) -> list[Api]:
    """As `apis_of`, of plugins that have been loaded."""
    apis: list[Api] = []
    paths: list[tuple[str, str]] = []
    owned: list[tuple[str, str]] = []
    owners: dict[str, str] = {}
    for planned, kind in loaded.candidates("api"):
        who = describe(planned)
        with naming_plugin(loaded), loaded.watched(planned):
            try:
                signature(kind).bind()
            except TypeError as error:
                raise PluginError(f"{who}: {kind.__name__} cannot be made without arguments: {error}") from None
            api: Api = kind()
            try:
                routes = routes_of(api)
            except ValueError as error:
                raise PluginError(f"{who}: {error}") from None
        for route in routes:
            for key in (f"the path {route.path}", f"the name {route.name}"):
                if key in owners:
                    raise PluginError(f"{who} and {owners[key]} both bring {key}; leave one of them out of --apis")
                owners[key] = who
            paths.append((route.path, who))
        owned += [(path, who) for path in api.owns]
        apis.append(api if planned.distribution == DISTRIBUTION else Guarded(api, who, routes))
    for path, who in owned:
        for other, owner in (*paths, *owned):
            if owner != who and is_below(other, path):
                why = f"{who} tells of errors on {path} and below it, where {owner} has {other}"
                raise PluginError(f"{why}; leave one of them out of --apis")
    return apis


def generating(apis: Sequence[Api]) -> list[Route]:
    """Return the routes that generate."""
    return [route for api in apis for route in api.routes() if isinstance(route, Route)]


def of_packages(apis: Sequence[Api]) -> dict[str, Route]:
    """Return the routes that generate and are no built-in API's, by path: batches run them, too."""
    own = {route.path for route in generating(BUILT_IN)}
    return {route.path: route for route in generating(apis) if route.path not in own}


def of_batches(apis: Sequence[Api]) -> dict[str, Route]:
    """Return those of them that have whole replies, which is what batches write."""
    return {path: route for path, route in of_packages(apis).items() if not route.only_streams}


def owners_of(apis: Sequence[Api]) -> dict[str, Api]:
    """Return who tells of the errors of the routes that `of_packages` returns, by path, where that is an API."""
    owned = [(path, api) for api in apis for path in api.owns]
    return {route: api for route in of_packages(apis) for path, api in owned if is_below(route, path)}


def named_apis(settings: PluginSettings) -> list[Api]:
    """Return the APIs that settings name, for a process that has no other plugins.

    Raises:
        PluginError: See `apis_of`; or one is not installed.
    """
    from dovetail.processing.plan import scan

    registry, _ = scan(settings)
    return apis_of(make_plan(registry, api=settings.apis))


def is_below(path: str, owned: str) -> bool:
    """Whether a path is an owned one, or below it."""
    return path == owned or path.startswith(f"{owned}/")
