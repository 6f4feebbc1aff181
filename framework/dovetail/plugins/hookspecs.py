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

from dovetail.contracts.hooks import PROJECT

if TYPE_CHECKING:
    from dovetail.contracts.hooks import CliCommands, ConfigDraft, HealthCheck, ProcessContext, RouteSet
    from dovetail.plugins.registry import KindRegistry

hookspec = pluggy.HookspecMarker(PROJECT)


@hookspec
def dovetail_models(registry: KindRegistry) -> None:
    """Register model architectures that entry points cannot list statically.

    Called in the main process when the plugin is enabled, before names are resolved; what is added belongs to the
    plugin's package. An exception stops the start.

    Args:
        registry: `registry.add("ArchForCausalLM", "module:Class")` takes a string, so that the plan can carry it to
            other processes. Facts as in a manifest may follow as keywords: `aliases=["acme"]`, `matches={}`.
    """


@hookspec
def dovetail_attention_backends(registry: KindRegistry) -> None:
    """Register attention backends.

    Called as `dovetail_models` is. With `matches={…}` a backend takes part in `--attention-backend auto`.

    Args:
        registry: As for `dovetail_models`.
    """


@hookspec
def dovetail_kernels(registry: KindRegistry) -> None:
    """Register kernel sets.

    Called as `dovetail_models` is. With `matches={…}` a set takes part in `--kernels auto`.

    Args:
        registry: As for `dovetail_models`.
    """


@hookspec
def dovetail_reasoning_parsers(registry: KindRegistry) -> None:
    """Register reasoning parsers.

    Called as `dovetail_models` is.

    Args:
        registry: As for `dovetail_models`.
    """


@hookspec
def dovetail_tool_parsers(registry: KindRegistry) -> None:
    """Register tool-call parsers.

    Called as `dovetail_models` is.

    Args:
        registry: As for `dovetail_models`.
    """


@hookspec
def dovetail_grammar_backends(registry: KindRegistry) -> None:
    """Register grammar backends.

    Called as `dovetail_models` is.

    Args:
        registry: As for `dovetail_models`.
    """


@hookspec
def dovetail_processors(registry: KindRegistry) -> None:
    """Register image processors.

    Called as `dovetail_models` is. With `matches={"architecture": […]}` one takes part in `--processor auto`.

    Args:
        registry: As for `dovetail_models`.
    """


@hookspec
def dovetail_quantizations(registry: KindRegistry) -> None:
    """Register quantisations.

    Called as `dovetail_models` is.

    Args:
        registry: As for `dovetail_models`.
    """


@hookspec
def dovetail_schedule_policies(registry: KindRegistry) -> None:
    """Register schedule policies.

    Called as `dovetail_models` is.

    Args:
        registry: As for `dovetail_models`.
    """


@hookspec
def dovetail_speculators(registry: KindRegistry) -> None:
    """Register speculators.

    Called as `dovetail_models` is.

    Args:
        registry: As for `dovetail_models`.
    """


@hookspec
def dovetail_devices(registry: KindRegistry) -> None:
    """Register devices.

    Called as `dovetail_models` is.

    Args:
        registry: As for `dovetail_models`.
    """


@hookspec
def dovetail_checkpoints(registry: KindRegistry) -> None:
    """Register formats of checkpoints.

    Called as `dovetail_models` is.

    Args:
        registry: As for `dovetail_models`.
    """


@hookspec
def dovetail_apis(registry: KindRegistry) -> None:
    """Register APIs.

    Called as `dovetail_models` is.

    Args:
        registry: As for `dovetail_models`.
    """


@hookspec
def dovetail_logits_processors(registry: KindRegistry) -> None:
    """Register logits processors.

    Called as `dovetail_models` is.

    Args:
        registry: As for `dovetail_models`.
    """


@hookspec
def dovetail_settings() -> type | None:
    """Return the plugin's settings class: a dataclass or a pydantic model whose fields all have defaults.

    Its fields become `--<plugin>.<field>`, `DOVETAIL_PLUGIN__<PLUGIN>__<FIELD>` and a section of the configuration
    file, are shown by `--help` when the plugin is enabled, and reach the other hooks as `ctx.settings` or `settings`.
    Called in every process of the plugin.
    """


@hookspec
def dovetail_configure(draft: ConfigDraft, facts: Mapping[str, Any], settings: Any) -> None:
    """Propose defaults of Dovetail's settings.

    Called in the main process, before the plan is made. What the user configured wins; the log says which default a
    plugin changed, to what, and why. Two plugins that propose different values for one setting stop the start.

    Args:
        draft: `draft.set("page_size", 64, why="the kernel needs it")`.
        facts: What is known: `device`, `architecture`, `model_path`.
        settings: An instance of what `dovetail_settings` returned, or None.
    """


@hookspec(firstresult=True)
def dovetail_select(kind: str, facts: Mapping[str, str], settings: Any) -> str | None:
    """Answer `auto` for a kind.

    Called in the main process once per kind that is `auto`. The first answer is tried before all other candidates; it
    must be installed. If it cannot serve, the next candidate is taken with a warning.

    Args:
        kind: `attention_backend`, `reasoning_parser`, ….
        facts: What is known: `device`, `architecture`, `quantization`, `vision`; "" where one is not.
        settings: An instance of what `dovetail_settings` returned, or None.

    Returns:
        A plugin's name, or None to leave the choice to others.
    """


@hookspec
def dovetail_process_start(ctx: ProcessContext) -> None:
    """Run in each process whose role the plugin declares, once its plugins are loaded and before it serves.

    An exception, or taking longer than `--plugin-timeout`, stops the start with exit code 2; the parent process
    prints the reason. Roles are declared in the manifest (`"roles": ["api", "engine"]`); without one, `api`.

    Args:
        ctx: `role`, `rank`, `plugin`, `options`, `settings`.
    """


@hookspec
def dovetail_process_stop(ctx: ProcessContext) -> None:
    """Run before such a process ends in an orderly way. An exception is logged.

    Args:
        ctx: As for `dovetail_process_start`.
    """


@hookspec
def dovetail_routes(ctx: ProcessContext) -> RouteSet | None:
    """Return HTTP routes, mounted under `/x/<plugin>/`.

    Called in the `api` process at start. A collision with any other route stops the start.

    Args:
        ctx: As for `dovetail_process_start`.

    Returns:
        ASGI applications by path, or None.
    """


@hookspec
def dovetail_request_observers(ctx: ProcessContext) -> Any:
    """Return a `dovetail.contracts.RequestObserver`, which is then told about requests by direct calls.

    Called in the `api` process at start. An observer that raises five times in a row is removed and shown in health.

    Args:
        ctx: As for `dovetail_process_start`.

    Returns:
        The observer, or None.
    """


@hookspec
def dovetail_stat_loggers(ctx: ProcessContext) -> Any:
    """Return a `dovetail.contracts.StatLogger`, which is then given the engine's load by direct calls.

    Called in the `api` process at start. A logger that raises five times in a row is removed and shown in health.

    Args:
        ctx: As for `dovetail_process_start`.

    Returns:
        The logger, or None.
    """


@hookspec
def dovetail_cache_observers(ctx: ProcessContext) -> Any:
    """Return a `dovetail.contracts.CacheObserver`, which is then told what the prefix cache holds by direct calls.

    Called in the `api` process at start, before the engine: engines report their cache only where somebody listens. An
    observer that raises five times in a row is removed and shown in health.

    Args:
        ctx: As for `dovetail_process_start`.

    Returns:
        The observer, or None.
    """


@hookspec
def dovetail_cli_commands(commands: CliCommands) -> None:
    """Add sub-commands of `dovetail`.

    Called when `dovetail --plugin NAME …` (or `DOVETAIL_PLUGIN=NAME dovetail …`) is given no command of Dovetail's
    own. A name that is taken is an error.

    Args:
        commands: `commands.add("acme-tune", "module:main", help="…")`; `main(argv) -> int` is imported and run when
            the command is typed.
    """


@hookspec
def dovetail_health(ctx: ProcessContext) -> HealthCheck | None:
    """Return a check that `GET /health` calls.

    Called in the `api` process at start. While the check complains, `/health` and `/readyz` answer 503 with its line.

    Args:
        ctx: As for `dovetail_process_start`.

    Returns:
        The check, which says in one line what is wrong, or None.
    """
