"""Where a name of the core stands now that a plugin imports from where it stood: its author is told in the error."""

from __future__ import annotations

import re
from importlib.util import find_spec
from pathlib import Path

from dovetail.plugins.monkeypatches import CORE

_MISSING = re.compile(r"cannot import name '(\w+)' from '([\w.]+)'")


def where_now(error: BaseException) -> str:
    """Return the fix for an import that fails as a name has moved, "" for any other error.

    Sources are read, not imported: the room of the module that had it first, then its neighbours.
    """
    found = _MISSING.search(str(error)) if isinstance(error, ImportError) else None
    if found is None or found[2].partition(".")[0] not in CORE:
        return ""
    name, module = found.groups()
    home = re.compile(rf"^(?:class |def ){name}\b|^{name}\b(?::.*)? =", re.MULTILINE)
    package = module.rpartition(".")[0] or module
    spec = find_spec(package)
    for folder in (spec and spec.submodule_search_locations) or ():
        for file in sorted(Path(folder).rglob("*.py")):
            if home.search(file.read_text(encoding="utf-8")):
                path = ".".join(file.relative_to(folder).with_suffix("").parts)
                return f"{name} is in {package}.{path.removesuffix('.__init__')} now: import it from there"
    return ""
