"""The page `reference/sdk.md`: what plugins are built with, from the code."""

from __future__ import annotations

from importlib import import_module
from itertools import groupby
from pathlib import Path

from stage import load

from dovetail.plugins.kinds import SDK_API, SDK_MINOR

CONTRACTS = load(Path(__file__).parent / "contracts.py")
HEAD = f"""\
# SDK

What plugins are built with beside the [contracts](plugins.md): layers of models, forms of packed weights, reading of
`config.json`, machinery of output formats, JSON Schema. Each module is imported by its own name; formats, masks
and schemas import no torch. Its version is {SDK_API}.{SDK_MINOR}; `needs_sdk` says which minor version a plugin needs.
"""


def page() -> str:
    """Return the whole page."""
    parts = [HEAD]
    for home, names in groupby(CONTRACTS.API.sdk_names(), key=lambda found: found[0]):
        parts += [f"\n## `dovetail.{home}`\n", CONTRACTS.prose(import_module(f"dovetail.{home}")) + "\n"]
        for _, name, value in names:
            parts += CONTRACTS.of_class(name, value)
    return CONTRACTS.joined(parts)
