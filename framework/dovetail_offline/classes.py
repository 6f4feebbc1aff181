"""Classes that are given in place of a plugin's name, to `LLM`."""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from importlib import import_module
from typing import Any

from dovetail.contracts.errors import ConfigError
from dovetail.plugins import Registry
from dovetail.plugins.kinds import KINDS, PluginKind

Classes = Mapping[str, type | list[str | type]]
"""By setting: a class in place of a name, or a list in which some names are classes."""


def register_classes(classes: Classes, registry: Registry) -> dict[str, str | list[str]]:
    """Register classes that were given in place of names, and return their names by setting.

    Args:
        classes: By the setting that names a plugin of their kind.
        registry: Where they go.

    Raises:
        ConfigError: One is not of its kind's contract, is not complete, or cannot be imported by its name.
    """
    kinds = {kind.setting: kind for kind in KINDS.values() if kind.setting}

    def named(setting: str, given: str | type) -> str:
        return given if isinstance(given, str) else _register(registry, kinds[setting], setting, given)

    return {
        setting: [named(setting, each) for each in given] if isinstance(given, list) else named(setting, given)
        for setting, given in classes.items()
    }


def _register(registry: Registry, kind: PluginKind, setting: str, cls: type) -> str:
    module, _, attribute = (kind.contract or "").partition(":")
    contract: type = getattr(import_module(module), attribute)
    where = f"{setting}={cls.__qualname__}"
    if not issubclass(cls, contract):
        raise ConfigError(f"{where}: is no subclass of dovetail.contracts.{attribute}; give one, or a plugin's name")
    if missing := sorted(getattr(cls, "__abstractmethods__", ())):
        raise ConfigError(f"{where}: does not implement {', '.join(missing)}; implement them")
    if "<" in cls.__qualname__:
        raise ConfigError(f"{where}: is defined inside a function; define it at the top of a module")
    if cls.__module__ == "__main__" and "compiler" in kind.roles:
        raise ConfigError(f"{where}: is defined in the script itself, and other processes load it; move it to a module")
    name = f"{cls.__module__}.{cls.__qualname__}"
    registry.add(kind.name, name, f"{cls.__module__}:{cls.__qualname__}")
    return name


def classes_of(values: dict[str, Any]) -> dict[str, type | list[str | type]]:
    """Take the classes out of arguments that may be names of plugins, and return them by setting."""
    settings = [kind.setting for kind in KINDS.values() if kind.setting]
    return {name: _in_list(values.pop(name)) for name in settings if _has_class(values.get(name))}


def _has_class(given: Any) -> bool:
    return inspect.isclass(given) or (isinstance(given, list | tuple) and any(map(inspect.isclass, given)))


def _in_list(given: Any) -> Any:
    return list(given) if isinstance(given, tuple) else given
