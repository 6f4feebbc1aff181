"""`dovetail plugin lock`: write down every package that provides plugins, for `--plugins-locked`."""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

from dovetail.contracts.errors import PluginError
from dovetail.plugins.kinds import normalise_distribution
from dovetail.plugins.lock import DEFAULT_FILE, LOCK_VERSION, record_hash
from dovetail.plugins.registry import Registry
from dovetail_server.cli.plugin import scan_as_configured


def run(args: argparse.Namespace) -> int:
    """Write the lock file."""
    lock = make_lock(scan_as_configured())
    text = json.dumps(lock, indent=2) + "\n"
    if args.output == "-":
        print(text, end="")
        return 0
    path = Path(args.output or DEFAULT_FILE)
    try:
        path.write_text(text, encoding="utf-8")
    except OSError as error:
        raise PluginError(f"--output {str(path)!r}: {error.strerror}") from None
    names = ", ".join(f"{entry['name']} {entry['version']}" for entry in lock["distributions"])
    print(f"{path}: {names}")
    return 0


def make_lock(registry: Registry) -> dict[str, Any]:
    """Return the lock of every usable distribution that registers plugins, as plain JSON values."""
    usable = {(r.distribution, r.version) for r in registry.records if r.usable and not r.file}
    plugins = [
        {
            "name": name,
            "version": version,
            "record": record_hash(name),
            "plugins": sorted(f"{r.kind}:{r.name}" for r in registry.records if r.usable and r.distribution == name),
        }
        for name, version in sorted(usable, key=lambda item: normalise_distribution(item[0]))
    ]
    return {"lock": LOCK_VERSION, "distributions": plugins}
