"""What a plugin's package imports of the core beside contracts and SDK, which may change in any release.

Sources are read, not imported: an import within a function counts, too.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path

from dovetail.plugins.records import PluginRecord

CORE = "dovetail"
PUBLIC = ("contracts", "sdk", "plugins.hookspecs")
"""Rooms of the core that plugins stand on, and the hooks' declarations."""
MENTION = re.compile(rf"\b{CORE}\b[\s\\]*(?:\.|import\b)")
"""What a file that imports of the core has in it: a large package, whatever its name, has few such files to parse."""
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
    for path in _sources(record):
        try:
            text = path.read_text(encoding="utf-8")
            tree = ast.parse(text) if MENTION.search(text) else None
        except (OSError, SyntaxError, ValueError, RecursionError):
            continue  # its import says so, if there is one
        for module in () if tree is None else _imported(tree):
            found.setdefault(module, path.name)
    return dict(sorted(found.items()))


def _sources(record: PluginRecord) -> Iterator[Path]:
    """Yield the source files of a plugin's file or folder, or of its package."""
    places = [record.file] if record.file else _places(record.target.partition(":")[0])
    for place in map(Path, places):
        if place.is_dir():
            yield from sorted(place.rglob("*.py"))
        elif place.suffix == ".py":
            yield place


def _places(target: str) -> list[str]:
    """Return the folders of the outermost package of a module, or its file.

    A namespace is no such package: others have parts of it, too.
    """
    for end in re.finditer(r"\.|$", target):
        try:
            spec = find_spec(target[: end.start()])
        except (ImportError, ValueError):  # there is none, it is `__main__`, or it was made by hand
            return []
        if spec is not None and spec.origin is not None:
            return list(spec.submodule_search_locations or [spec.origin])
    return []


def _imported(tree: ast.AST) -> Iterator[str]:
    """Yield the modules of the core that a file imports.

    `from dovetail import NAME` is one if NAME is a module, and so is a name that is one of `PUBLIC`. So is what
    `import_module` is given as text.
    """
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (name.name for name in node.names if name.name.startswith(f"{CORE}."))
        elif isinstance(node, ast.ImportFrom) and node.level == 0 and node.module:
            if node.module == CORE:
                names = (f"{CORE}.{name.name}" for name in node.names)
                yield from (name for name in names if find_spec(name) is not None)
            elif node.module.startswith(f"{CORE}."):
                names = (f"{node.module}.{name.name}" for name in node.names)
                yield from (name if name.removeprefix(f"{CORE}.") in PUBLIC else node.module for name in names)
        elif isinstance(node, ast.Call) and node.args and isinstance(node.args[0], ast.Constant):
            called, given = getattr(node.func, "attr", getattr(node.func, "id", "")), node.args[0].value
            if called in {"import_module", "__import__"} and str(given).startswith(f"{CORE}."):
                yield str(given)
