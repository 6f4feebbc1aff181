"""`dovetail plugin`: what is installed, from where, and why something is not used. Imports no plugin and no torch."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence

from dovetail.plugins.records import PluginRecord
from dovetail.plugins.registry import Registry

_COLUMNS = ("KIND", "NAME", "STATE", "DISTRIBUTION", "VERSION", "NOTES")


def main(argv: list[str]) -> int:
    """Run `dovetail plugin …`.

    Args:
        argv: The arguments after `plugin`.

    Returns:
        The exit code; wrong arguments exit with 2 through `SystemExit`.
    """
    parser = argparse.ArgumentParser(prog="dovetail plugin", description="Show the plugins that are installed.")
    commands = parser.add_subparsers(dest="command", metavar="COMMAND", required=True)
    listing = commands.add_parser(
        "list",
        help="list every plugin with its state and package",
        description="List every installed plugin from package metadata; nothing is imported.",
    )
    listing.add_argument("--json", action="store_true", help="print what GET /v1/plugins returns")
    args = parser.parse_args(argv)
    registry = Registry.scan()
    if args.json:
        import json  # the table does not need it

        print(json.dumps(registry.listing(), indent=2))
        return 0
    print(table(registry.sorted()))
    for problem in registry.problems:
        print(f"warning: {problem}", file=sys.stderr)
    return 0


def table(records: Sequence[PluginRecord]) -> str:
    """Lay records out in columns, one line each, under a heading."""
    rows = [_COLUMNS, *(_row(record) for record in records)]
    widths = [max(len(row[i]) for row in rows) for i in range(len(_COLUMNS))]
    lines = ("  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)) for row in rows)
    return "\n".join(line.rstrip() for line in lines)


def _row(record: PluginRecord) -> tuple[str, ...]:
    aliases = f"also: {', '.join(record.facts.aliases)}" if record.facts.aliases else ""
    notes = "; ".join(note for note in (aliases, record.reason) if note)
    return record.kind, record.name, record.state.value, record.distribution, record.version, notes


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
