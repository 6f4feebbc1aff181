"""What a plugin's package imports of the core beside contracts and SDK, which may change in any release.

Sources are read, not imported: an import within a function counts, too.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path

from dovetail.plugins.records import PluginRecord

CORE = "dovetail"
PUBLIC = ("contracts", "sdk", "plugins.hookspecs")
"""Rooms of the core that plugins stand on, and the hooks' declarations."""
ADVICE = "use dovetail.contracts and dovetail.sdk"


def private_imports(record: PluginRecord) -> list[str]:
    """Return the private modules of the core that the package of a plugin imports, each with a file that does."""
    return [
        f"{module} ({file})"
        for module, file in core_imports(record).items()
        if not any(is_within(module, f"{CORE}.{room}") for room in PUBLIC)
    ]


def is_within(module: str, room: str) -> bool:
    """Whether a module is `room` or stands in it."""
    return f"{module}.".startswith(f"{room}.")


def core_imports(record: PluginRecord) -> dict[str, str]:
    """Return the modules of the core that a plugin's package, or its file, imports, each with a file that does."""
    found: dict[str, str] = {}
    package = record.target.partition(":")[0].partition(".")[0]
    for path in [Path(record.file)] if record.file else _sources(package):
        try:
            text = path.read_text(encoding="utf-8")
            tree = ast.parse(text) if CORE in text else None  # a large package has few files of ours
        except (OSError, SyntaxError, ValueError, RecursionError):
            continue  # its import says so, if there is one
        for module in () if tree is None else _imported(tree):
            found.setdefault(module, path.name)
    return dict(sorted(found.items()))


def _sources(package: str) -> Iterator[Path]:
    """Yield the source files of a top-level package or module."""
    try:
        spec = find_spec(package)
    except ValueError:  # of `__main__`, or made by hand
        spec = None
    if spec is None:
        return
    for folder in spec.submodule_search_locations or ():
        yield from sorted(Path(folder).rglob("*.py"))
    if spec.submodule_search_locations is None and spec.origin and spec.origin.endswith(".py"):
        yield Path(spec.origin)


def _imported(tree: ast.AST) -> Iterator[str]:
    """Yield the modules of the core that a file imports; `from dovetail import NAME` is one if NAME is a module."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (name.name for name in node.names if name.name.startswith(f"{CORE}."))
        elif isinstance(node, ast.ImportFrom) and node.level == 0 and node.module:
            if node.module == CORE:
                names = (f"{CORE}.{name.name}" for name in node.names)
                yield from (name for name in names if find_spec(name) is not None)
            elif node.module.startswith(f"{CORE}."):
                yield node.module
