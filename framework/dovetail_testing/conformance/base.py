"""What every kind of plugin must do: be listed without being imported, load twice, load in a child, touch nothing."""

from __future__ import annotations

import inspect
import sys
from collections.abc import Iterator, Mapping
from typing import Any, ClassVar

import pytest

from dovetail.contracts.errors import PluginError
from dovetail.plugins import KINDS, Registry
from dovetail.plugins.kinds import split_qualified
from dovetail.plugins.loader import import_planned
from dovetail.plugins.plan import PlannedPlugin, PluginPlan, make_plan
from dovetail.plugins.records import PluginRecord
from dovetail.plugins.time_limit import time_limit
from dovetail_testing.checks import UNLOADED, as_failure, check, fail, no_error, raised, shown
from dovetail_testing.child import ChildReport, run_child

_KIT = "dovetail_testing."


class Conformance:
    """Base of the classes for each kind. A subclass states the plugin; each method `test_…` is a standard test.

    A standard test that a plugin cannot pass is overridden and marked `@pytest.mark.xfail(reason="…")`; overriding it
    without that mark is an error at collection.

    Attributes:
        kind: A key of `KINDS`.
        name: The plugin's name as registered by an installed package.
        plugin_class: The class itself (for hooks: the module or object), for code that is not installed; the tests
            that need an installation are skipped.
        options: Values of the plugin's own settings to test with; None: their defaults.
        time_limit_s: Each test ends after this time, and says so.
    """

    kind: ClassVar[str]
    name: ClassVar[str | None] = None
    plugin_class: ClassVar[Any] = None
    options: ClassVar[Mapping[str, Any] | None] = None
    time_limit_s: ClassVar[float] = 240.0

    def __init_subclass__(cls, **kwargs: Any) -> None:
        """Refuse a subclass that silently drops a standard test.

        Raises:
            TypeError: A standard test is overridden without `xfail(reason=…)`.
        """
        super().__init_subclass__(**kwargs)
        if not cls.__module__.startswith(_KIT):
            _refuse_silent_overrides(cls)

    @pytest.fixture(autouse=True)
    def _time_limit(self, request: pytest.FixtureRequest) -> Iterator[None]:
        """End a test that hangs, with its name."""
        with time_limit(request.node.name, self.time_limit_s, advice="the plugin hangs or is very slow"):
            yield

    @pytest.fixture(autouse=True)
    def _one_thread(self) -> Iterator[None]:
        """Compute with one thread: the tensors are tiny, and threads that wait for each other only cost time."""
        torch = sys.modules.get("torch")  # a kit that needs none imports none
        before = torch.get_num_threads() if torch is not None else 0
        if torch is not None:
            torch.set_num_threads(1)
        yield
        if torch is not None:
            torch.set_num_threads(before)

    @classmethod
    def planned(cls) -> PlannedPlugin:
        """Return the plugin as a server's plan would hold it."""
        if cls.plugin_class is not None or cls.name is None:
            return cls._planned_by_hand()
        registry = Registry.scan()
        record = meant_by(registry, cls.kind, cls.name)
        argument: Any = [record.qualified] if cls.kind == "hooks" else record.qualified
        keywords: dict[str, Any] = {cls.kind: argument, "options": {record.name: dict(cls.options or {})}}
        plan = make_plan(registry, **keywords)
        return next(planned for planned in plan.plugins if planned.kind == cls.kind)

    @classmethod
    def plugin(cls) -> Any:
        """Return what the entry point names, imported and with its options: a class, or for hooks an object."""
        if "_plugin" not in vars(cls):
            cls._plugin = cls._loaded()
        return cls._plugin

    @classmethod
    def made(cls) -> Any:
        """Make the plugin as an engine does."""
        with no_error("making it"):
            return cls.plugin()()

    _plugin: ClassVar[Any]
    _report: ClassVar[ChildReport]
    _first_report: ClassVar[ChildReport]

    @classmethod
    def _loaded(cls) -> Any:
        planned = cls.planned()
        if cls.plugin_class is None:  # before this process: what loading it here changes, or ends, a fork would inherit
            cls._first_report = run_child(PluginPlan(plugins=(planned,)), planned.roles[0])
            check(not cls._first_report.ended, f"loading it failed: {cls._first_report.error}")
        if cls.plugin_class is None:
            return import_planned(planned)
        return with_options(cls.plugin_class, planned.options) if cls.kind != "hooks" else cls.plugin_class

    @classmethod
    def _planned_by_hand(cls) -> PlannedPlugin:
        if cls.plugin_class is None:
            fail(f"{cls.__name__}: say which plugin: name = '…' (installed) or plugin_class = … (not installed)")
        target = cls.plugin_class
        module = getattr(target, "__module__", None) or getattr(target, "__name__", "unknown")
        return PlannedPlugin(
            kind=cls.kind,
            name=str(cls.name or getattr(target, "__name__", type(target).__name__)),
            target=f"{module}:{getattr(target, '__qualname__', '')}",
            distribution="",
            version="",
            api=KINDS[cls.kind].api,
            roles=KINDS[cls.kind].roles,
            options=dict(cls.options or {}),
        )

    @classmethod
    def _child(cls) -> ChildReport:
        """Return what a fresh process found; it is asked once per class."""
        if cls.plugin_class is not None:
            pytest.skip("not installed: give `name` instead of `plugin_class` to test this")
        if "_report" not in vars(cls):
            cls._report = run_child(PluginPlan(plugins=(cls.planned(),)), cls.planned().roles[0])
        return cls._report

    # The standard tests of every kind.

    def test_it_is_found_and_implements_its_contract(self) -> None:
        """The plugin is installed under its name, imports, and implements every method of its contract."""
        with as_failure(PluginError, UNLOADED):
            loaded = self.plugin()
        contract = KINDS[self.kind].contract
        if contract is not None:
            check(inspect.isclass(loaded), f"{shown(loaded)} is no class; name the class itself")
            missing = sorted(getattr(loaded, "__abstractmethods__", ()))
            check(not missing, f"{loaded.__qualname__} does not implement {', '.join(missing)}")

    def test_listing_imports_nothing(self) -> None:
        """`dovetail plugin list` finds the plugin without importing it, torch or anything heavy."""
        report = self._child()
        check(
            not report.heavy_at_start,
            f"{', '.join(report.heavy_at_start)} is imported as soon as Python starts (by a .pth file or a "
            "sitecustomize module): listing plugins must import nothing",
        )
        check(report.listed, f"{self.kind} {self.name!r} is not among the plugins that are listed")
        imported = ", ".join(report.imported_by_listing)
        check(not imported, f"listing imports {imported}: what is installed must be known from metadata alone")

    def test_loads_in_a_child_process(self) -> None:
        """A fresh process that is given the plan loads the plugin: nothing lives only in the main process."""
        report = self._child()
        check(report.error is None, f"loading in a child process failed: {report.error}")

    def test_loads_twice(self) -> None:
        """Loading and making the plugin a second time in one process works like the first."""
        report = self._child()
        self.test_loads_in_a_child_process()
        check(report.second_error is None, f"loading it a second time failed: {report.second_error}")

    def test_core_is_unchanged_after_load(self) -> None:
        """Loading the plugin replaces, adds or removes no attribute of Dovetail's own modules and classes."""
        report = self._child()
        check(
            not report.changed,
            f"loading it changed the core: {', '.join(report.changed)}; plugins must not patch Dovetail, use a hook "
            "or a contract",
        )

    def test_nothing_is_left_behind(self) -> None:
        """Loading the plugin starts no threads or processes, sets no signal handlers, and leaves torch's defaults."""
        report = self._child()
        if report.error is None:
            self.plugin()
            report = self._first_report
        check(
            not report.left,
            f"loading it leaves behind {', '.join(report.left)}: all code of the process shares that; start what you "
            "need when you are used, and undo it",
        )

    def test_options_round_trip(self) -> None:
        """The plugin's settings have defaults, and every value that is given reaches the object unchanged."""
        self._check_options()

    def _check_options(self) -> None:
        check_options(self.plugin(), self.options)


def meant_by(registry: Registry, kind: str, name: str) -> PluginRecord:
    """Return the plugin that a class tests: of several with its name a third party's, whose author wrote the class.

    Raises:
        PluginError: The name is unknown, or of several packages.
    """
    distribution, bare = split_qualified(name)
    others = {r.qualified for r in registry.of_kind(kind) if r.answers_to(bare) and r.usable and not r.builtin}
    if distribution is None and len(others) > 1:
        fail(f"{kind} {name!r} is provided by several packages; give name = {' or '.join(map(repr, sorted(others)))}")
    return registry.resolve(kind, others.pop() if distribution is None and others else name)


def with_options(plugin: type[Any], given: Mapping[str, Any]) -> type[Any]:
    """Return `plugin` with `options` set, as the loader would."""
    declared = getattr(plugin, "Options", None)
    if declared is None:
        if given:
            fail(f"options {sorted(given)} are given, and {plugin.__qualname__} declares no Options")
        return plugin
    from dovetail.plugins.options import make_options

    try:
        made = make_options(declared, given)
    except Exception as error:  # a stranger's class; the message says what it did
        fail(f"{plugin.__qualname__}.Options cannot be made from {dict(given)}: {raised(error)}")
    return type(plugin.__name__, (plugin,), {"options": made, "__module__": plugin.__module__})


def _refuse_silent_overrides(cls: type) -> None:
    standard = {
        name
        for base in cls.__mro__[1:]
        if base.__module__.startswith(_KIT)
        for name in vars(base)
        if name.startswith("test_")
    }
    for name in sorted(standard & vars(cls).keys()):
        marks = getattr(vars(cls)[name], "pytestmark", [])
        if not any(mark.name == "xfail" and mark.kwargs.get("reason") for mark in marks):
            raise TypeError(
                f"{cls.__name__}.{name} overrides a standard test of the conformance kit: mark it "
                '@pytest.mark.xfail(reason="…") to say why the plugin cannot pass it, or give your test another name'
            )


# Checks of a plugin's own settings.


def check_options(plugin: Any, given: Mapping[str, Any] | None) -> None:
    """Check `plugin.Options`: describable, defaults for all, and given values arrive.

    Args:
        plugin: The loaded class.
        given: Values that the author wants tested, as a configuration file holds them; None for the defaults.
    """
    declared = getattr(plugin, "Options", None)
    if declared is None:
        check(not given, f"options {sorted(given or {})} are given, and the plugin declares no Options")
        return
    check_round_trip(declared, given or {})
    held = getattr(plugin, "options", None)
    check(
        isinstance(held, declared),
        f"plugin.options is {shown(held)}, not an instance of {declared.__qualname__}: leave `options` to the loader",
    )
    _compare(declared, plain(declared, held), given or {}, "plugin.options")


def check_round_trip(declared: type[Any], given: Mapping[str, Any]) -> None:
    """Check that an `Options` class keeps what it is given and comes back from its own plain values."""
    from dovetail.plugins.options import describe_options

    with as_failure(PluginError, "options cannot become flags: "):
        described = describe_options(declared)
    for option in described:
        check(option.name.isidentifier() and not option.name.startswith("_"), f"option {option.name!r}: not a name")
    defaults = plain(declared, _made(declared, {}))
    _compare(declared, defaults, {}, "the defaults")
    check(
        defaults.keys() == {option.name for option in described},
        f"{declared.__qualname__}: fields {sorted(o.name for o in described)} became {sorted(defaults)}",
    )
    for name, value in [*defaults.items(), *_altered(defaults).items(), *given.items()]:
        _keeps(declared, name, value)
    again = plain(declared, _made(declared, defaults))
    check(again == defaults, f"{declared.__qualname__} lost options on the way: {defaults} came back as {again}")


def plain(declared: type[Any], made: Any) -> dict[str, Any]:
    """Return an instance's values as JSON values."""
    from dovetail.plugins.options import plain_options

    with as_failure(Exception, f"options of {declared.__qualname__} cannot travel to another process: "):
        return plain_options(declared, made)


def _made(declared: type[Any], values: Mapping[str, Any]) -> Any:
    from dovetail.plugins.options import make_options

    try:
        return make_options(declared, values)
    except Exception as error:  # a stranger's class; the message says what it did
        fail(f"{declared.__qualname__} cannot be made from {dict(values)}: {raised(error)}")


def _altered(defaults: Mapping[str, Any]) -> dict[str, Any]:
    """Return values unlike the defaults where the type tells what else is possible."""
    return {name: not value for name, value in defaults.items() if isinstance(value, bool)}


def _keeps(declared: type[Any], name: str, value: Any) -> None:
    made = plain(declared, _made(declared, {name: value}))
    _compare(declared, made, {name: value}, declared.__qualname__)


def _compare(declared: type[Any], found: Mapping[str, Any], given: Mapping[str, Any], where: str) -> None:
    for written, value in given.items():
        name = written.replace("-", "_")
        if name not in found:
            fail(f"option {written!r} is lost: {declared.__qualname__} has no such field; it has {sorted(found)}")
        same = found[name] == value or str(found[name]) == str(value)
        check(same, f"option {written!r} is lost: {value!r} was given and {where} holds {found[name]!r}")
