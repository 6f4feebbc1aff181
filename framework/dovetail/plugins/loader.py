"""Loading a plan in one process: imports exactly what the process's role needs, and discovers nothing.

Every failure is a `PluginError` that names the plugin, its distribution and version, the reason and the fix. Only a
candidate of `auto` may fail: a warning is logged and the next candidate is taken.
"""

from __future__ import annotations

import logging
import os
import sys
import traceback
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from importlib import import_module
from types import FrameType
from typing import Any

from dovetail.base.distribution import DISTRIBUTION
from dovetail.contracts.errors import DovetailError, PluginError, described
from dovetail.plugins.adapters import adapt
from dovetail.plugins.files import PluginFileError, load_file
from dovetail.plugins.kinds import KINDS, ROLES, normalise, split_qualified
from dovetail.plugins.monkeypatches import CORE, detect_monkeypatches, watching
from dovetail.plugins.moved import where_now
from dovetail.plugins.options import OptionError, make_options
from dovetail.plugins.plan import PlannedPlugin, PluginPlan
from dovetail.plugins.process_state import TORCH, ProcessState, registrations, torch_defaults, torch_differences
from dovetail.plugins.records import PluginState
from dovetail.plugins.scan import installed_version
from dovetail.plugins.signals import Signalled, catching_signals
from dovetail.plugins.time_limit import DEFAULT_TIMEOUT_S, Interrupted, time_limit

logger = logging.getLogger("dovetail.plugins")


def load(plan: PluginPlan, role: str | None) -> LoadedPlugins:
    """Import what `plan` holds for `role`; each process does so once for each use of the plan.

    Plugins asked for by name are imported now; candidates of `auto` when `candidates`, `get` or `all` come to them.

    Args:
        plan: As made by the main process.
        role: `api`, `engine`, `worker` or `compiler`; None for everything, which only the main process may want.

    Raises:
        PluginError: A plugin cannot be imported, has no such attribute, does not implement the contract, or is not
            the version that was planned.
    """
    if role is not None and role not in ROLES:
        raise PluginError(f"role {role!r}: unknown; possible: {', '.join(ROLES)}")
    return LoadedPlugins(plan, role)


class LoadedPlugins:
    """The plugins of one process."""

    def __init__(self, plan: PluginPlan, role: str | None) -> None:
        """Import every plugin of the role that was asked for by name."""
        self.plan = plan
        self.role = role or "main"
        self.failures: dict[tuple[str, str], str] = {}
        """Why a candidate of `auto` was passed over, by (kind, qualified name)."""
        self.monkeypatches: list[str] = []
        """What plugins changed in Dovetail's own attributes when they were loaded, one line per plugin."""
        self._objects: dict[tuple[str, str], Any] = {}
        self._planned = plan.plugins if role is None else plan.for_role(role)
        strangers_first = sorted(self._planned, key=lambda p: p.distribution == DISTRIBUTION)
        for planned in strangers_first:  # what may be broken shows before our own imports have taken their time
            if planned.requested:
                self._object(planned)

    def get(self, kind: str, name: str) -> Any:
        """Return the class (or, for hooks, the object) that a plugin's entry point names.

        Args:
            kind: A key of `KINDS`.
            name: Its name as planned, bare or as `distribution:name`.

        Raises:
            PluginError: The plan holds no such plugin for this role, or a candidate of `auto` cannot be imported.
        """
        _, bare = split_qualified(name)
        for planned in self._of_kind(kind):
            same = normalise(kind, planned.name) == normalise(kind, bare)
            if same and (bare == name or planned.qualified == name):
                return self._object(planned)
        held = ", ".join(planned.name for planned in self._of_kind(kind)) or "none"
        raise PluginError(f"{kind} {name!r}: not in the plan of the {self.role} process, which holds: {held}")

    def candidates(self, kind: str) -> Iterator[tuple[PlannedPlugin, Any]]:
        """Yield (planned, object) in the plan's order, importing each only when it is reached.

        A candidate of `auto` that cannot be imported is passed over with a warning.

        Raises:
            PluginError: The plan holds plugins of this kind, and none of them can be imported.
        """
        planned_of_kind = self._of_kind(kind)
        usable = 0
        for planned in planned_of_kind:
            try:
                loaded = self._object(planned)
            except PluginError as error:
                if planned.requested:
                    raise
                if (kind, planned.qualified) not in self.failures:
                    self.failures[kind, planned.qualified] = str(error)
                    logger.warning("auto passes over a candidate: %s", error)
                continue
            usable += 1
            yield planned, loaded
        if planned_of_kind and not usable:
            reasons = "; ".join(self.failures[kind, planned.qualified] for planned in planned_of_kind)
            raise PluginError(f"{KINDS[kind].label} 'auto': every candidate failed: {reasons}")

    def all(self, kind: str) -> list[tuple[PlannedPlugin, Any]]:
        """Return every usable (planned, object) of `kind` in the plan's order; `candidates` in one go."""
        return list(self.candidates(kind))

    def states(self) -> list[tuple[str, str, str, str]]:
        """Return (kind, qualified name, state, reason) of everything tried here: arguments of `Registry.mark`."""
        loaded = [(kind, name, PluginState.LOADED.value, "") for kind, name in self._objects]
        return loaded + [(kind, name, PluginState.FAILED.value, why) for (kind, name), why in self.failures.items()]

    def _of_kind(self, kind: str) -> list[PlannedPlugin]:
        return [planned for planned in self._planned if planned.kind == kind]

    def _object(self, planned: PlannedPlugin) -> Any:
        key = (planned.kind, planned.qualified)
        if key not in self._objects:
            with self.watched(planned):
                self._objects[key] = import_planned(planned, self.plan.timeout_s)
        return self._objects[key]

    @contextmanager
    def watched(self, planned: PlannedPlugin) -> Iterator[None]:
        """Note what a plugin changes for others meanwhile; for code that imports or makes one."""
        if planned.distribution == DISTRIBUTION:  # the kit watches these; a start need not pay for it
            yield
            return
        own_module = planned.target.partition(":")[0]
        state = ProcessState.now()
        with watching(skip=own_module) as before, registrations(own_module) as registered, one_process():
            yield
        changed = detect_monkeypatches(before, skip=own_module)
        ours = [name for name in changed if name.partition(".")[0] in CORE]
        if ours:
            self._note(f"{describe(planned)} changed {', '.join(ours)} of Dovetail itself")
        if others := [name for name in changed if name not in ours]:
            self._note(f"{describe(planned)} changed {', '.join(others)}, which all code of the process goes through")
        if left := state.shared_differences(ProcessState.now()) + registered:
            self._note(f"{describe(planned)} left {', '.join(left)} behind, which all code of the process shares")

    def _note(self, line: str) -> None:
        self.monkeypatches.append(line)
        logger.warning("%s", line)

    def check_torch(self) -> None:
        """Refuse to serve with other defaults of torch than it begins with, once everything is made.

        Raises:
            PluginError: A plugin has set one, when it was imported or made; who may have is named.
        """
        left = torch_differences(TORCH, torch_defaults())
        strangers = [describe(planned) for planned in self._planned if planned.distribution != DISTRIBUTION]
        if left and strangers:
            raise PluginError(
                f"{' or '.join(strangers)} left {', '.join(left)} behind, of which requests of all others fail; a "
                "plugin must undo what it sets for itself: report this to its author, or leave the plugin out"
            )


@contextmanager
def one_process() -> Iterator[None]:
    """End the copies of this process that a plugin's code makes (`os.fork`): each would go on as a second server."""
    process = os.getpid()
    try:
        yield
    finally:
        if os.getpid() != process:
            os._exit(0)


@contextmanager
def naming_plugin(loaded: LoadedPlugins) -> Iterator[None]:
    """Turn an exception that passes through a plugin's code into a `PluginError` that names the plugin.

    For code that makes or starts what plugins provide. Dovetail's own errors, and exceptions in which no plugin had a
    part, pass unchanged.

    Raises:
        PluginError: A plugin's code raised.
    """
    try:
        with catching_signals():
            yield
    except (DovetailError, Signalled, Interrupted):
        raise
    except BaseException as error:  # a stranger's code may raise anything; the cause is kept
        frames = [frame for frame, _ in traceback.walk_tb(error.__traceback__)]
        found = nearest_plugin(frames[::-1], loaded.plan)
        if found is None:
            raise
        planned, frame = found
        logger.debug("%s failed", describe(planned), exc_info=True)
        reason = f"{frame.f_code.co_qualname} raised {described(error)}"
        raise unfit(planned, reason, f"upgrade {planned.distribution} or report this to its author") from error


def nearest_plugin(frames: Sequence[FrameType], plan: PluginPlan) -> tuple[PlannedPlugin, FrameType] | None:
    """Return the first of some frames that is a plugin's code, and whose: its own module's, or else its package's."""
    modules = {planned.target.partition(":")[0]: planned for planned in reversed(plan.plugins)}  # the first counts
    tops = {planned.target.partition(".")[0].partition(":")[0]: planned for planned in reversed(plan.plugins)}
    for frame in frames:
        home = str(frame.f_globals.get("__name__", ""))
        top = home.partition(".")[0]
        planned = modules.get(home) or (None if top in CORE else tops.get(top))
        if planned is not None:
            return planned, frame
    return None


def import_planned(planned: PlannedPlugin, timeout_s: float = DEFAULT_TIMEOUT_S) -> Any:
    """Import one plugin, check it against the plan and its kind's contract, and give it its options.

    Raises:
        PluginError: See `load`.
    """
    kind = KINDS[planned.kind]
    _check_version(planned)
    with time_limit(f"{describe(planned)}: importing {planned.target.partition(':')[0]}", timeout_s), one_process():
        loaded = _import_target(planned)
    if planned.api < kind.api:
        loaded = _adapt(planned, loaded)
    if what := kind.too_new(loaded):
        raise PluginError(f"{describe(planned)}: {what}")
    if kind.contract is not None:
        module, attr = kind.contract.split(":")
        _check_contract(planned, loaded, getattr(import_module(module), attr))
        loaded = _with_options(planned, loaded)
    return loaded


def describe(planned: PlannedPlugin) -> str:
    """Name a plugin with its package, as every message about it begins: "hooks 'acme' of acme 1.0"."""
    package = f"{planned.distribution} {planned.version}".strip() or "no package"
    return f"{planned.kind} {planned.name!r} of {package}"


def options_of(planned: PlannedPlugin, options: type[Any]) -> Any:
    """Return an instance of a plugin's `Options` from what the plan holds for it.

    Raises:
        OptionError: An option is unknown or has a wrong value; names the plugin.
        PluginError: The class cannot hold options.
    """
    try:
        return make_options(options, planned.options)
    except OptionError as error:
        raise OptionError(error.name, error.reason, describe(planned), planned.name) from None
    except PluginError as error:
        raise unfit(planned, str(error), "correct its options") from None


def _adapt(planned: PlannedPlugin, loaded: Any) -> Any:
    try:
        return adapt(planned.kind, planned.api, loaded)
    except Exception as error:  # it works on a stranger's class, which may be anything
        reason = f"adapting it from API {planned.api} raised {described(error)}"
        raise unfit(planned, reason, f"upgrade {planned.distribution}") from error


def _with_options(planned: PlannedPlugin, loaded: Any) -> Any:
    """Return a subclass that holds the options; the class itself where it declares none."""
    if loaded.Options is None:
        for name in planned.options:
            raise OptionError(name, "unknown; this plugin has no options", describe(planned), planned.name)
        return loaded
    made = options_of(planned, loaded.Options)
    return type(
        loaded.__name__, (loaded,), {"options": made, "__module__": loaded.__module__, "__doc__": loaded.__doc__}
    )


def _check_version(planned: PlannedPlugin) -> None:
    if planned.file or not planned.distribution:
        return
    found = installed_version(planned.distribution)
    if found is None:
        raise unfit(planned, "its distribution is not installed in this process's environment", "reinstall it")
    if found != planned.version:
        raise unfit(planned, f"version {found} is installed now", "restart the server so that it plans anew")


def _import_target(planned: PlannedPlugin) -> Any:
    module_name, _, path = planned.target.partition(":")
    try:
        loaded: Any = load_file(planned.file, planned.version) if planned.file else import_module(module_name)
    except PluginFileError as error:
        raise unfit(planned, str(error), "restart the server so that it plans anew") from None
    except (Signalled, Interrupted):
        raise
    except BaseException as error:  # a stranger's module may raise anything; the cause is kept
        reason = f"importing {module_name} raised {described(error)}"
        raise unfit(planned, reason, _import_fix(planned, error)) from error
    for attr in path.split("."):
        try:
            loaded = getattr(loaded, attr)
        except AttributeError:
            fix = "correct the entry point and reinstall the package"
            raise unfit(planned, f"{module_name} has no attribute {path!r}", fix) from None
    return loaded


def _import_fix(planned: PlannedPlugin, error: BaseException) -> str:
    if moved := where_now(error):
        return f"{moved}, or upgrade {planned.distribution}"
    if isinstance(error, ModuleNotFoundError) and error.name is not None:
        top = error.name.partition(".")[0]
        if top != planned.target.partition(":")[0].partition(".")[0]:
            if top in sys.modules:
                other = "dovetail-llm" if top == "dovetail" else top
                return f"install versions of {planned.distribution} and {other} that fit each other"
            return f"install the package that provides {top!r}, which {planned.distribution} needs"
        return f"reinstall {planned.distribution}: its entry point names a module that it does not contain"
    return f"upgrade {planned.distribution} or report this to its author"


def _check_contract(planned: PlannedPlugin, loaded: Any, contract: type) -> None:
    if not isinstance(loaded, type) or not issubclass(loaded, contract):
        what = f"{planned.target} is not a subclass of {contract.__module__}.{contract.__qualname__}"
        raise unfit(planned, what, "subclass it, or correct the entry point")
    missing = sorted(getattr(loaded, "__abstractmethods__", ()))
    if missing:
        raise unfit(planned, f"{loaded.__qualname__} does not implement {', '.join(missing)}", "implement them")
    devices = getattr(loaded, "devices", None)
    if isinstance(devices, str):  # each of its letters would be a device
        raise unfit(planned, f"devices = {devices!r} is no set of names", f"give frozenset({{{devices!r}}})")


def unfit(planned: PlannedPlugin, reason: str, fix: str) -> PluginError:
    """Return the error that says why a plugin cannot be used, and what to do."""
    return PluginError(f"{describe(planned)}: {reason}; {fix}")
