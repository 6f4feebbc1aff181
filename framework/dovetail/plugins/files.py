"""`--plugin-file my_parser.py`: a plugin without a package, for one-off work.

The file is run once in the main process to see what it defines, and again by each process that the plan sends it to.
Each class of a contract that it defines is registered: a model under its architectures, anything else under its class
attribute `plugin_name`, or else its class name in kebab case (`AcmeR2` is `acme-r2`). Functions with `@hookimpl` make
the file a hooks plugin too, which needs no `--plugin`. Whatever is wrong with it stops the start.
"""

from __future__ import annotations

import hashlib
import importlib.util
import inspect
import re
import sys
from collections.abc import Iterator
from importlib import import_module
from pathlib import Path
from types import ModuleType
from typing import Any

from dovetail.errors import PluginError
from dovetail.plugins.guard import DEFAULT_TIMEOUT_S, time_limit
from dovetail.plugins.kinds import KINDS
from dovetail.plugins.registry import Registry

DIGEST_LEN = 12
SELF = "__dovetail_module__"
"""Attribute that holds the file's module itself: the target of its hooks plugin."""


class PluginFileError(PluginError):
    """A plugin file is gone, or is not what was planned."""


def module_name(path: Path) -> str:
    """Return the name under which a file's module is imported."""
    return "dovetail_plugin_file_" + re.sub(r"\W", "_", path.stem)


def digest(path: Path) -> str:
    """Return the start of a file's SHA-256, which serves as its version.

    Raises:
        PluginFileError: It cannot be read.
    """
    try:
        return hashlib.sha256(path.read_bytes()).hexdigest()[:DIGEST_LEN]
    except OSError as error:
        raise PluginFileError(f"--plugin-file {str(path)!r}: {error.strerror}; give a readable Python file") from None


def load_file(path: str, version: str) -> ModuleType:
    """Import a plugin file, once per process.

    Raises:
        PluginFileError: It is gone or has changed since the plan was made.
    """
    file = Path(path)
    if digest(file) != version:
        raise PluginFileError(f"{path} has changed since it was planned")
    name = module_name(file)
    found = sys.modules.get(name)
    if found is not None and getattr(found, "__file__", None) == path:
        return found
    spec = importlib.util.spec_from_file_location(name, path)
    if spec is None or spec.loader is None:
        raise PluginFileError(f"{path} is not a Python file")
    module = importlib.util.module_from_spec(spec)
    setattr(module, SELF, module)
    sys.modules[name] = module
    try:
        spec.loader.exec_module(module)
    except BaseException:
        del sys.modules[name]
        raise
    return module


def add_file(registry: Registry, path: Path, timeout_s: float = DEFAULT_TIMEOUT_S) -> str | None:
    """Run a plugin file and register what it defines.

    Returns:
        The name of its hooks plugin, or None where it defines no hook.

    Raises:
        PluginError: It cannot be read or run, or defines nothing.
    """
    path = path.resolve()
    if path.suffix != ".py":
        raise PluginError(f"--plugin-file {str(path)!r}: is not a .py file; install packages with pip")
    version = digest(path)
    what = f"--plugin-file {path.name}"
    try:
        with time_limit(f"{what}: running it", timeout_s):
            module = load_file(str(path), version)
    except PluginError:
        raise
    except (Exception, SystemExit) as error:  # a stranger's module may raise anything; the cause is kept
        text = f"{what}: running it raised {type(error).__name__}: {error}; correct the file"
        raise PluginError(" ".join(text.split())) from error
    owner: dict[str, Any] = {"distribution": path.name, "version": version, "file": str(path)}
    found = [registry.add(kind, name, f"{module.__name__}:{attr}", **owner) for kind, name, attr in _classes(module)]
    if _has_hooks(module):
        name = path.stem.replace("_", "-")
        found.append(registry.add("hooks", name, f"{module.__name__}:{SELF}", **owner))
        return f"{path.name}:{name}"
    if not found:
        contracts = ", ".join(kind.contract.partition(":")[2] for kind in KINDS.values() if kind.contract)
        raise PluginError(f"{what}: defines no plugin; subclass one of {contracts}, or write a function with @hookimpl")
    return None


def _classes(module: ModuleType) -> Iterator[tuple[str, str, str]]:
    """Yield (kind, name, attribute) of each concrete class of a contract defined in the module."""
    for attr, value in list(vars(module).items()):
        if not isinstance(value, type) or value.__module__ != module.__name__ or inspect.isabstract(value):
            continue
        for kind in KINDS.values():
            if kind.contract is None:
                continue
            home, _, contract = kind.contract.partition(":")
            if issubclass(value, getattr(import_module(home), contract)):
                given = getattr(value, "plugin_name", None)
                default = (given or _kebab(attr),)
                for name in getattr(value, "architectures", default) if kind.name == "model" else default:
                    yield kind.name, str(name), attr


def _has_hooks(module: ModuleType) -> bool:
    return any(hasattr(value, "dovetail_impl") for value in vars(module).values() if inspect.isfunction(value))


def _kebab(name: str) -> str:
    return re.sub(r"(?<=[a-z0-9])(?=[A-Z])|(?<=[A-Z])(?=[A-Z][a-z])", "-", name).lower()
