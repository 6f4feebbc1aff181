"""Every hook that Dovetail calls, on one page. All run at start or stop; none runs per request or per token.

A hooks plugin is a module or an object whose functions carry `@hookimpl`, named in the entry-point group
`dovetail.hooks.v1` and loaded only when enabled (`--plugin NAME`). A function takes any subset of a hook's arguments,
by name; arguments are only ever added. What is chosen by name (a model, a parser, a backend) is no hook but an entry
point of its own kind; see `docs/plugins.md`.

Each implementation is called on its own: one that raises is reported with its plugin's name and the others still run.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import pluggy

if TYPE_CHECKING:
    from dovetail.plugins.contexts import CliCommands, ConfigDraft, HealthCheck, ProcessContext, RouteSet
    from dovetail.plugins.registry import KindRegistry

PROJECT = "dovetail"

hookspec = pluggy.HookspecMarker(PROJECT)
hookimpl = pluggy.HookimplMarker(PROJECT)


@hookspec
def dovetail_models(registry: KindRegistry) -> None:
    """Register model architectures that entry points cannot list statically.

    `registry.add("ArchForCausalLM", "module:Class")`: a string, so that the plan can carry it to other processes.
    Facts as in a manifest may follow as keywords. Called in the main process, before names are resolved.
    """


@hookspec
def dovetail_attention_backends(registry: KindRegistry) -> None:
    """Register attention backends; as `dovetail_models`."""


@hookspec
def dovetail_reasoning_parsers(registry: KindRegistry) -> None:
    """Register reasoning parsers; as `dovetail_models`."""


@hookspec
def dovetail_tool_parsers(registry: KindRegistry) -> None:
    """Register tool-call parsers; as `dovetail_models`."""


@hookspec
def dovetail_grammar_backends(registry: KindRegistry) -> None:
    """Register grammar backends; as `dovetail_models`."""


@hookspec
def dovetail_settings() -> type | None:
    """Return the plugin's settings class; its fields become flags, environment variables and a config section."""


@hookspec
def dovetail_configure(draft: ConfigDraft, facts: Mapping[str, Any]) -> None:
    """Propose defaults: `draft.set(key, value, why="…")`. What the user configured wins; the reason is logged."""


@hookspec(firstresult=True)
def dovetail_select(kind: str, facts: Mapping[str, str]) -> str | None:
    """Answer `auto` for a kind with a plugin's name, or None. The first answer is tried before all others."""


@hookspec
def dovetail_process_start(ctx: ProcessContext) -> None:
    """Run in each process whose role the plugin declares, once its plugins are loaded. An exception stops the start."""


@hookspec
def dovetail_process_stop(ctx: ProcessContext) -> None:
    """Run before such a process ends in an orderly way. An exception is logged."""


@hookspec
def dovetail_routes(ctx: ProcessContext) -> RouteSet | None:
    """Return HTTP routes, mounted under `/x/<plugin>/`. A collision with any other route is a start-up error."""


@hookspec
def dovetail_request_observers(ctx: ProcessContext) -> Any:
    """Return an object that is told about requests by direct calls, or None."""


@hookspec
def dovetail_stat_loggers(ctx: ProcessContext) -> Any:
    """Return an object that is given the engine's statistics by direct calls, or None."""


@hookspec
def dovetail_cli_commands(commands: CliCommands) -> None:
    """Add sub-commands: `commands.add("acme-tune", "module:main", help="…")`; `main(argv) -> int` runs when typed."""


@hookspec
def dovetail_health(ctx: ProcessContext) -> HealthCheck | None:
    """Return a check that the health report calls; it says in one line what is wrong, or nothing."""
