"""What Dovetail's next minor version ends and this one lets pass: the rules of `dovetail plugin check --next-minor`.

A rule is a claim about a package that works with the next minor version, and what finds the faults. Beside the rules
the whole kit runs with deprecations as errors. What is announced for the next minor version gets a line in `ENDING`,
and goes when that version is made.
"""

from __future__ import annotations

import ast
import re
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from importlib.util import find_spec
from pathlib import Path
from typing import NamedTuple

from dovetail.plugins.kinds import KINDS
from dovetail.plugins.records import PluginRecord
from dovetail.plugins.scan import unmet_by_next

# What a plugin's package imports of the core beside contracts and SDK, which may change in any release.
#
# Sources are read, not imported: an import within a function counts, too.

CORE = "dovetail"
PUBLIC = ("contracts", "sdk", "plugins.hookspecs")
"""Rooms of the core that plugins stand on, and the hooks' declarations."""


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
            tree = ast.parse(path.read_text(encoding="utf-8"))
        except (SyntaxError, UnicodeDecodeError):
            continue  # who imports it is told
        for module in _imported(tree):
            found.setdefault(module, path.name)
    return dict(sorted(found.items()))


def _sources(package: str) -> Iterator[Path]:
    """Yield the source files of a top-level package or module."""
    spec = find_spec(package)
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


ENDING = {"dovetail.plugins.hookspecs": "import hookimpl and what hooks are given from dovetail.contracts"}
"""Modules that plugins may import of this minor version and not of the next, each with what to do."""

DEPRECATIONS = (DeprecationWarning, PendingDeprecationWarning, FutureWarning)


class MinorRule(NamedTuple):
    """What holds of a plugin that works with the next minor version.

    Attributes:
        claim: The sentence.
        faults: Returns what speaks against it, a line each with what to do.
    """

    claim: str
    faults: Callable[[PluginRecord], list[str]]


def _requirements(record: PluginRecord) -> list[str]:
    why = None if record.file else unmet_by_next(record.distribution)
    return [f"{why}; leave the upper bound out"] if why else []


def _private(record: PluginRecord) -> list[str]:
    found = private_imports(record)
    return [f"it imports {', '.join(found)}; use dovetail.contracts and dovetail.sdk"] if found else []


def _ending(record: PluginRecord) -> list[str]:
    return [
        f"it imports {module} ({file}); {fix}"
        for module, file in core_imports(record).items()
        for ended, fix in ENDING.items()
        if is_within(module, ended)
    ]


def _api(record: PluginRecord) -> list[str]:
    kind = KINDS[record.kind]
    if record.api is None or record.api >= kind.api:
        return []
    return [f"it is written for API {record.api} of {kind.name}; register it in {kind.entry_point_group}, too"]


RULES = (
    MinorRule("The requirements of its package admit the next minor version.", _requirements),
    MinorRule("It imports of Dovetail only what plugins may rely on.", _private),
    MinorRule("It imports nothing that ends with this minor version.", _ending),
    MinorRule("It is written for an API version that the next minor version speaks.", _api),
)


@contextmanager
def deprecations_raise(record: PluginRecord) -> Iterator[None]:
    """Turn warnings of what is deprecated into errors where the plugin's own code causes them.

    Warnings of other packages stay warnings: their authors hear of them, and the plugin's cannot mend them.
    """
    package = re.escape(record.target.partition(":")[0].partition(".")[0])
    with warnings.catch_warnings():
        for category in DEPRECATIONS:
            warnings.filterwarnings("error", category=category, module=rf"{package}(\.|$)")
        yield
