"""What a package offers under its own name, and imports on first use only."""

from __future__ import annotations

import ast
from collections.abc import Callable
from importlib import import_module
from pathlib import Path
from typing import Any


def offered(package: str, file: str) -> tuple[list[str], Callable[[str], Any]]:
    """Return `__all__` and `__getattr__` of a package whose stub (`__init__.pyi`) lists its names.

    The stub has lines such as `from package.module import Name as Name`, and no others.

    Args:
        package: The package's `__name__`.
        file: Its `__file__`, beside which the stub stands.
    """
    homes = homes_of(file)

    def find(name: str) -> Any:
        if name not in homes:
            raise AttributeError(f"module {package!r} has no attribute {name!r}")
        return getattr(import_module(homes[name]), name)

    return sorted(homes), find


def homes_of(file: str) -> dict[str, str]:
    """Return the module of each name in the stub beside a package's `__file__`."""
    stub = ast.parse(Path(file).with_suffix(".pyi").read_text("utf-8"))
    return {
        alias.name: str(node.module) for node in stub.body if isinstance(node, ast.ImportFrom) for alias in node.names
    }
