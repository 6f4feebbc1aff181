"""Where a name of the core stands now that a plugin imports from where it stood: its author is told in the error."""

from __future__ import annotations

import re
from importlib.util import find_spec
from pathlib import Path

from dovetail.contracts.tables import table
from dovetail.plugins.monkeypatches import CORE

_MISSING = re.compile(r"cannot import name '(?P<name>\w+)' from '(?P<of>[\w.]+)'")
_NO_ATTRIBUTE = re.compile(r"module '(?P<of>[\w.]+)' has no attribute '(?P<name>\w+)'")
_DATA: dict[str, dict[str, str]] = table(__file__)
MODULES = _DATA["modules"]
"""Modules that have moved whole: where plugins may have imported them from, and where each is."""
RENAMED = _DATA["renamed"]
"""Names that are called otherwise in the module that has them."""
REPLACED = _DATA["replaced"]
"""Names that are gone, with what to do instead."""


def where_now(error: BaseException) -> str:
    """Return the fix for a name or a module that has moved, "" for any other error."""
    if isinstance(error, ModuleNotFoundError):
        return _module_now(error.name or "")
    pattern = _MISSING if isinstance(error, ImportError) else _NO_ATTRIBUTE
    found = pattern.search(str(error)) if isinstance(error, AttributeError | ImportError) else None
    if found is None:
        return ""
    name, module = found["name"], found["of"]
    old = f"{module}.{name}"
    if new := RENAMED.get(old):
        return f"{name} of {module} is called {new} now"
    if instead := REPLACED.get(old):
        return f"{name} of {module} is gone: {instead}"
    return _module_now(old) or (_name_now(name, module) if module.partition(".")[0] in CORE else "")


def _module_now(name: str) -> str:
    return f"{name} is {MODULES[name]} now: import it from there" if name in MODULES else ""


def _name_now(name: str, module: str) -> str:
    """Read sources, without importing them: the room that had the name first, then what plugins stand on."""
    home = re.compile(rf"^(?:class |def ){name}\b|^{name}\b(?::.*)? =", re.MULTILINE)
    for package in (module.rpartition(".")[0] or module, "dovetail.contracts", "dovetail.sdk"):
        spec = find_spec(package)
        for folder in (spec and spec.submodule_search_locations) or ():
            for file in sorted(Path(folder).rglob("*.py")):
                if home.search(file.read_text(encoding="utf-8")):
                    path = ".".join(file.relative_to(folder).with_suffix("").parts)
                    return f"{name} is in {package}.{path.removesuffix('.__init__')} now: import it from there"
    return ""
