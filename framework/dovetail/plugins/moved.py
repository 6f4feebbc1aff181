"""Where a name of the core stands now that a plugin imports from where it stood: its author is told in the error."""

from __future__ import annotations

import json
import re
from importlib.util import find_spec
from pathlib import Path

from dovetail.plugins.monkeypatches import CORE

_MISSING = re.compile(r"cannot import name '(\w+)' from '([\w.]+)'")
_DATA: dict[str, dict[str, str]] = json.loads(Path(__file__).with_name("moved.json").read_text("utf-8"))
MODULES = _DATA["modules"]
"""Modules that have moved whole: where plugins may have imported them from, and where each is."""
RENAMED = _DATA["renamed"]
"""Names that are called otherwise in the module that has them."""
REPLACED = _DATA["replaced"]
"""Names that are gone, with what to do instead."""


def where_now(error: BaseException) -> str:
    """Return the fix for an import that fails as a name or a module has moved, "" for any other error."""
    if isinstance(error, ModuleNotFoundError):
        return f"{error.name} is {MODULES[error.name]} now: import it from there" if error.name in MODULES else ""
    found = _MISSING.search(str(error)) if isinstance(error, ImportError) else None
    if found is not None and (new := RENAMED.get(f"{found[2]}.{found[1]}")):
        return f"{found[1]} of {found[2]} is called {new} now"
    if found is not None and (instead := REPLACED.get(f"{found[2]}.{found[1]}")):
        return f"{found[1]} of {found[2]} is gone: {instead}"
    return _name_now(*found.groups()) if found is not None and found[2].partition(".")[0] in CORE else ""


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
