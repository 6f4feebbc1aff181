"""Checks of a plugin's own settings."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from dovetail.contracts.errors import PluginError
from dovetail_testing.checks import check, fail, raised, shown


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

    try:
        described = describe_options(declared)
    except PluginError as error:
        fail(f"options cannot become flags: {error}")
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

    try:
        return plain_options(declared, made)
    except Exception as error:  # a stranger's class; the message says what it did
        fail(f"options of {declared.__qualname__} cannot travel to another process: {raised(error)}")


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
