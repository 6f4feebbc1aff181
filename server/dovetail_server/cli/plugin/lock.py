"""`dovetail plugin lock`: write down every package that provides plugins, for `--plugins-locked`."""

from __future__ import annotations

import argparse
import json
from pathlib import Path

from dovetail.contracts.errors import PluginError
from dovetail.plugins.lock import DEFAULT_FILE, make_lock
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
