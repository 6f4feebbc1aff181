"""What hooks are given and what they return: small objects that only grow, so that old plugins keep working."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping, MutableMapping
from dataclasses import dataclass, field
from typing import Any

import pluggy

from dovetail.contracts.errors import PluginError

PROJECT = "dovetail"
"""Whose hooks they are, for pluggy."""
hookimpl = pluggy.HookimplMarker(PROJECT)
"""Marks a function of a plugin that implements a hook, named as the hook is."""

AsgiApp = Callable[
    [
        MutableMapping[str, Any],
        Callable[[], Awaitable[MutableMapping[str, Any]]],
        Callable[[MutableMapping[str, Any]], Awaitable[None]],
    ],
    Awaitable[None],
]
"""An ASGI 3 application: `await app(scope, receive, send)`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ProcessContext:
    """The process that a hook runs in.

    Attributes:
        role: `api`, `engine`, `worker` or `compiler`.
        rank: Rank among the processes of this role.
        plugin: Name of the plugin whose hook is called.
        options: That plugin's settings as plain values.
        settings: An instance of what its `dovetail_settings` returned; None if it returned nothing.
    """

    role: str
    rank: int = 0
    plugin: str = ""
    options: Mapping[str, Any] = field(default_factory=dict)
    settings: Any = None


@dataclass(frozen=True, slots=True, kw_only=True)
class RouteSet:
    """HTTP routes of a plugin. `/stats` of plugin `acme` is served at `/x/acme/stats`.

    Attributes:
        routes: ASGI application by path; a path starts with `/` and may hold `{parameters}`.
        admin: Those of the paths that need the admin's key where the server has one (`--admin-api-key`). Every route
            needs a key where it has any; `scope["state"]["owner"]` then tells keys apart.
    """

    routes: Mapping[str, AsgiApp]
    admin: frozenset[str] = frozenset()


@dataclass(frozen=True, slots=True, kw_only=True)
class HealthCheck:
    """One line of the health report. `check()` says in one line what is wrong, or returns None."""

    name: str
    check: Callable[[], str | None]


@dataclass(frozen=True, slots=True)
class Proposal:
    """A default that a plugin proposes, with its reason. `applied` is False where the user's configuration wins."""

    key: str
    value: Any
    why: str
    plugin: str
    applied: bool


@dataclass(slots=True)
class ConfigDraft:
    """The configuration while plugins may still propose defaults.

    Attributes:
        known: Names of all settings.
        configured: Settings that the user gave; no proposal changes them.
        proposals: In the order made.
    """

    known: frozenset[str]
    configured: Mapping[str, Any] = field(default_factory=dict)
    proposals: list[Proposal] = field(default_factory=list)
    _plugin: str = ""

    def set(self, key: str, value: Any, *, why: str) -> None:
        """Propose `value` as the default of setting `key`.

        Raises:
            PluginError: There is no such setting, or another plugin proposes a different value.
        """
        if key not in self.known:
            raise PluginError(f"setting {key!r}: unknown")
        for other in self.proposals:
            if other.key == key and other.plugin != self._plugin and other.value != value:
                raise PluginError(
                    f"setting {key!r}: {other.plugin} proposes {other.value!r} ({other.why}) and {self._plugin} "
                    f"{value!r} ({why}); set it yourself or disable one of them"
                )
        self.proposals.append(Proposal(key, value, why, self._plugin, key not in self.configured))

    def defaults(self) -> dict[str, Any]:
        """Return the proposed defaults that hold."""
        return {proposal.key: proposal.value for proposal in self.proposals if proposal.applied}

    def for_plugin(self, plugin: str) -> ConfigDraft:
        """Return a view whose proposals are attributed to `plugin`."""
        return ConfigDraft(self.known, self.configured, self.proposals, plugin)


@dataclass(frozen=True, slots=True)
class CliCommand:
    """A sub-command of `dovetail` that a plugin adds; `target` is a `module:attr`, imported when it is typed."""

    name: str
    target: str
    help: str
    plugin: str


@dataclass(slots=True)
class CliCommands:
    """Sub-commands collected from plugins.

    Attributes:
        reserved: Names of Dovetail's own sub-commands.
        commands: By name.
    """

    reserved: frozenset[str] = frozenset()
    commands: dict[str, CliCommand] = field(default_factory=dict)
    _plugin: str = ""

    def add(self, name: str, target: str, *, help: str) -> None:
        """Add `dovetail NAME`. The target is called with the list of arguments and returns the exit code.

        Raises:
            PluginError: The name is taken.
        """
        taken = "dovetail" if name in self.reserved else None
        if name in self.commands:
            taken = self.commands[name].plugin
        if taken is not None:
            raise PluginError(f"command {name!r}: {taken} has one of this name already; choose another")
        self.commands[name] = CliCommand(name, target, help, self._plugin)

    def for_plugin(self, plugin: str) -> CliCommands:
        """Return a view whose commands are attributed to `plugin`."""
        return CliCommands(self.reserved, self.commands, plugin)
