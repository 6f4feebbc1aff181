"""Calling hooks: the enabled hook plugins of one process, each implementation in its own try.

```python
hooks = HookManager.enable(registry, ["acme"])     # main process: import, then let them register plugins
plan = make_plan(registry, hooks=["acme"], select=hooks.select, ...)
hooks = HookManager(load(plan, "api").all("hooks"))  # in every process
hooks.start("api")
```
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from difflib import get_close_matches
from typing import Any

import msgspec
import pluggy

from dovetail.contracts.errors import PluginError, described
from dovetail.contracts.hooks import PROJECT, CliCommands, ConfigDraft, ProcessContext
from dovetail.plugins import hookspecs
from dovetail.plugins.kinds import KINDS
from dovetail.plugins.loader import LoadedPlugins, describe, load, options_of, unfit
from dovetail.plugins.options import describe_options
from dovetail.plugins.plan import Options, PlannedPlugin, make_plan
from dovetail.plugins.registry import Registry
from dovetail.plugins.signals import Signalled
from dovetail.plugins.time_limit import DEFAULT_TIMEOUT_S, Interrupted, PluginTimeout, time_limit

logger = logging.getLogger("dovetail.plugins")

REGISTRATION_HOOKS = {kind.name: kind.hook for kind in KINDS.values() if kind.hook}


@dataclass(frozen=True, slots=True)
class HookResult:
    """What one implementation of a hook returned."""

    plugin: PlannedPlugin
    value: Any


Arguments = Callable[[PlannedPlugin], Mapping[str, Any]]
"""Makes the arguments of a hook for one plugin, so that each is told its own name and options."""


class HookManager:
    """The enabled hook plugins of one process, first enabled first."""

    def __init__(
        self,
        plugins: Iterable[tuple[PlannedPlugin, Any]] = (),
        *,
        timeout_s: float = DEFAULT_TIMEOUT_S,
        lenient: bool = False,
    ) -> None:
        """Register loaded hook plugins.

        Args:
            plugins: Pairs as from `LoadedPlugins.all("hooks")`.
            timeout_s: Time that each call of a hook gets; 0 for no limit.
            lenient: Leave out options that a plugin does not know: another plugin of its name may.

        Raises:
            PluginError: An implementation's name or arguments fit no hook, or the object cannot hold hooks.
        """
        self._pm = pluggy.PluginManager(PROJECT)
        self._pm.add_hookspecs(hookspecs)
        self._planned: dict[str, PlannedPlugin] = {}
        self._settings: dict[str, Any] = {}
        self._timeout_s = timeout_s
        for planned, plugin in reversed(list(plugins)):  # pluggy calls the last registered first
            self._register(planned, plugin)
        for result in self.settings():
            planned = result.plugin
            self._settings[planned.qualified] = _make_settings(planned, result.value, lenient)

    @classmethod
    def enable(
        cls,
        registry: Registry,
        names: Sequence[str],
        *,
        options: Options | None = None,
        timeout_s: float = DEFAULT_TIMEOUT_S,
    ) -> HookManager:
        """Import the named hook plugins and let them register further plugins. For the main process.

        Args:
            registry: What is installed.
            names: Names of hook plugins, as a user gives them.
            options: Their settings by plugin name, plain values.
            timeout_s: Time that each import and each call of a hook gets; 0 for no limit.

        Raises:
            PluginError: A name cannot be used, or a plugin fails to import, to fit the hooks or to register.
        """
        loaded = load(make_plan(registry, hooks=names, options=options, timeout_s=timeout_s), None)
        manager = cls(loaded.all("hooks"), timeout_s=timeout_s, lenient=True)
        for kind, hook in REGISTRATION_HOOKS.items():
            manager.collect(hook, _with_registry(registry, kind))
        return manager

    @property
    def planned(self) -> list[PlannedPlugin]:
        """The plugins held, first enabled first."""
        return list(reversed(self._planned.values()))

    def collect(self, hook: str, arguments: Arguments, *, strict: bool = True) -> list[HookResult]:
        """Call every implementation of a hook, each in its own try, and return what is not None.

        Args:
            hook: Its name in `hookspecs`.
            arguments: Makes the arguments for one plugin.
            strict: Raise once all have been called, if any failed; otherwise failures are only logged.

        Raises:
            PluginError: An implementation raised, and `strict`. Names each plugin that did.
        """
        results: list[HookResult] = []
        failures: list[str] = []
        for impl in reversed(getattr(self._pm.hook, hook).get_hookimpls()):
            planned = self._planned[impl.plugin_name]
            given = arguments(planned)
            try:
                with time_limit(f"{describe(planned)}: {hook}", self._timeout_s):
                    value = impl.function(*(given[name] for name in impl.argnames))
            except PluginTimeout as error:
                failures.append(str(error))
                continue
            except (Signalled, Interrupted):
                raise
            except BaseException as error:  # a stranger's code may raise anything; it is reported, below
                logger.debug("%s of %s failed", hook, planned.qualified, exc_info=True)
                failures.append(f"{describe(planned)}: {hook} raised {described(error)}")
                continue
            if value is not None:
                results.append(HookResult(planned, value))
        if failures and strict:
            raise PluginError("; ".join(failures))
        for failure in failures:
            logger.warning("%s", failure)
        return results

    def select(self, kind: str, facts: Mapping[str, str]) -> str | None:
        """Return the first answer to `auto`, or None. Pass it to `make_plan`."""
        results = self.collect(
            "dovetail_select",
            lambda planned: {"kind": kind, "facts": dict(facts), "settings": self._settings.get(planned.qualified)},
        )
        return next((str(result.value) for result in results), None)

    def settings(self) -> list[HookResult]:
        """Return the plugins' settings classes."""
        return self.collect("dovetail_settings", lambda planned: {})

    def configure(self, draft: ConfigDraft, facts: Mapping[str, Any]) -> None:
        """Let the plugins propose defaults; read them from `draft` afterwards."""
        self.collect(
            "dovetail_configure",
            lambda planned: {
                "draft": draft.for_plugin(planned.name),
                "facts": dict(facts),
                "settings": self._settings.get(planned.qualified),
            },
        )

    def cli_commands(self, commands: CliCommands) -> None:
        """Let the plugins add sub-commands; read them from `commands` afterwards."""
        self.collect("dovetail_cli_commands", lambda planned: {"commands": commands.for_plugin(planned.name)})

    def start(self, role: str, rank: int = 0) -> None:
        """Call `dovetail_process_start`.

        Raises:
            PluginError: A plugin failed; the process must not go on.
        """
        self.collect("dovetail_process_start", self._with_context(role, rank))

    def stop(self, role: str, rank: int = 0) -> None:
        """Call `dovetail_process_stop`; failures are logged."""
        self.collect("dovetail_process_stop", self._with_context(role, rank), strict=False)

    def in_process(self, hook: str, role: str) -> list[HookResult]:
        """Call a hook of a process: `dovetail_routes`, `dovetail_health`, one of the observers' and loggers'."""
        return self.collect(hook, self._with_context(role, 0))

    def _with_context(self, role: str, rank: int) -> Arguments:
        return lambda p: {
            "ctx": ProcessContext(
                role=role, rank=rank, plugin=p.name, options=p.options, settings=self._settings.get(p.qualified)
            )
        }

    def _register(self, planned: PlannedPlugin, plugin: Any) -> None:
        if isinstance(plugin, type):
            raise unfit(planned, f"{planned.target} is a class", "name a module or an instance")
        try:
            self._pm.register(plugin, name=planned.qualified)
            self._pm.check_pending()
        except pluggy.PluginValidationError as error:
            raise unfit(planned, described(error), self._fix()) from error
        self._planned[planned.qualified] = planned
        for caller in self._pm.get_hookcallers(plugin) or ():
            for impl in caller.get_hookimpls():
                if impl.plugin is plugin and (impl.wrapper or impl.hookwrapper):
                    raise unfit(planned, f"{caller.name} is a hook wrapper", "write a plain implementation")

    def _fix(self) -> str:
        known = [name for name in vars(hookspecs) if name.startswith("dovetail_")]
        unknown = [name for name in vars(self._pm.hook) if name.startswith("dovetail_") and name not in known]
        close = get_close_matches(unknown[0], known, n=1) if unknown else []
        return f"did you mean {close[0]}?" if close else "see dovetail/plugins/hookspecs.py for hooks and arguments"


def _with_registry(registry: Registry, kind: str) -> Arguments:
    return lambda p: {"registry": registry.for_kind(kind, p.distribution, p.version, p.file)}


def _make_settings(planned: PlannedPlugin, settings: Any, lenient: bool) -> Any:
    if not isinstance(settings, type):
        raise unfit(planned, f"dovetail_settings returned {settings!r}", "return a dataclass or a pydantic model")
    if lenient:
        try:
            known = {option.name for option in describe_options(settings)}
        except PluginError as error:
            raise unfit(planned, str(error), "correct its options") from None
        given = {name: value for name, value in planned.options.items() if name.replace("-", "_") in known}
        planned = msgspec.structs.replace(planned, options=given)
    return options_of(planned, settings)


@contextmanager
def running_hooks(loaded: LoadedPlugins, rank: int = 0) -> Iterator[HookManager]:
    """Start the hook plugins of a process and stop them at the end of the block.

    Raises:
        PluginError: A plugin could not be started.
    """
    hooks = HookManager(loaded.all("hooks"), timeout_s=loaded.plan.timeout_s)
    hooks.start(loaded.role, rank)
    try:
        yield hooks
    finally:
        hooks.stop(loaded.role, rank)
