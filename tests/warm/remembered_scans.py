"""Scans for plugins that read what is installed once, for a thousand engines and servers of tests."""

from __future__ import annotations

import sys
import sysconfig
from dataclasses import replace
from typing import Any


def remember_metadata() -> None:
    """Have the scan for plugins read what is installed beside pytest once: engines of tests scan a thousand times."""
    from dovetail.plugins import scan

    read, site = scan._read, sysconfig.get_path("purelib")
    known: dict[tuple[str, str], str] = {}

    def remembered(dist: Any, file: str) -> str:
        folder = str(getattr(dist, "_path", ""))
        if not folder.startswith(site):
            return read(dist, file)
        if (folder, file) not in known:
            known[folder, file] = read(dist, file)
        return known[folder, file]

    scan._read = remembered


def remember_plugins() -> None:
    """Have a scan find what the first one found, where the same folders are searched under no rules.

    Engines and servers of tests scan thousands of times, 13 ms each. Every registry gets records of its own.
    """
    from dovetail.plugins import Registry

    scan, folders = Registry.scan, [*sys.path]
    known: list[Registry] = []

    def remembered(**given: Any) -> Registry:
        if given or sys.path != folders:
            return scan(**given)
        if not known:
            known.append(scan())
        return Registry([replace(record) for record in known[0].records], [*known[0].problems])

    Registry.scan = staticmethod(remembered)  # type: ignore[method-assign,assignment]
