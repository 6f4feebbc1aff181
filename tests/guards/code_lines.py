"""Counts code lines: physical lines that are not blank, no comment, and no part of a string that documents."""

from __future__ import annotations

import ast
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parents[2]
PACKAGES = {
    "dovetail": "framework/dovetail",
    "dovetail_offline": "framework/dovetail_offline",
    "dovetail_testing": "framework/dovetail_testing",
    "dovetail_server": "server/dovetail_server",
    "dovetail_models": "plugins/models/dovetail_models",
    "dovetail_parsers": "plugins/parsers/dovetail_parsers",
    "dovetail_backends": "plugins/backends/dovetail_backends",
    "dovetail_grammar": "plugins/grammar/dovetail_grammar",
}
ROOMS = ("dovetail", "dovetail_server")
"""Packages whose folders are counted, too."""
FACE = ("contracts", "sdk")
"""Rooms of `dovetail` that plugins stand on, which grow; the core is what is left without them."""


def code_lines(source: bytes) -> int:
    """Count the code lines of a file.

    A string that is a statement by itself documents something, whether Python calls it a docstring or it stands behind
    a constant.
    """
    documents = {at for first, last in documented(ast.parse(source)) for at in range(first, last + 1)}
    found = 0
    for at, line in enumerate(source.split(b"\n"), 1):
        text = line.strip()
        found += bool(text) and not text.startswith(b"#") and at not in documents
    return found


def documented(node: ast.AST) -> Iterator[tuple[int, int]]:
    """Yield first and last line of each string that is a statement: of statements alone, as no expression holds one."""
    for blocks in ("body", "orelse", "handlers", "finalbody", "cases"):
        for child in getattr(node, blocks, ()) if isinstance(getattr(node, blocks, ()), list) else ():
            if not isinstance(child, ast.Expr):
                yield from documented(child)
            elif isinstance(child.value, ast.Constant) and isinstance(child.value.value, str):
                yield child.lineno, child.end_lineno or child.lineno


def by_package() -> dict[str, int]:
    """Return the code lines of the product, of each package, of the two large ones' folders, and of the core."""
    counts: Counter[str] = Counter()
    for package, folder in PACKAGES.items():
        for path in sorted((ROOT / folder).rglob("*.py")):
            num = code_lines(path.read_bytes())
            names = [package, "product"]
            if package in ROOMS:
                room = (*path.relative_to(ROOT / folder).parts[:-1], "*.py")[0]
                names.append(f"{package}/{room}")
                names += ["core"] if package == "dovetail" and room not in FACE else []
            counts.update(dict.fromkeys(names, num))
    return dict(sorted(counts.items()))
