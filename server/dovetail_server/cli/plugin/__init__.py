"""`dovetail plugin`: what is installed, from where, and why something is not used.

Each command has a file of its own, imported when it is typed: `list` imports no plugin and no torch.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
from collections.abc import Sequence
from importlib import import_module
from pathlib import Path

from dovetail.base.word_lists import split_names
from dovetail.contracts.errors import DovetailError
from dovetail.plugins.kinds import KINDS
from dovetail.plugins.records import PluginRecord
from dovetail.plugins.registry import Registry
from dovetail_server.cli.option_tables import add_options

_COLUMNS = ("KIND", "NAME", "STATE", "DISTRIBUTION", "VERSION", "NOTES")


def main(argv: list[str]) -> int:
    """Run `dovetail plugin …`.

    Args:
        argv: The arguments after `plugin`.

    Returns:
        The exit code: 0, 1 for problems found, 2 for what cannot be done; wrong arguments exit through `SystemExit`.
    """
    args = build_parser().parse_args(argv)
    try:
        if args.command == "list":
            return list_plugins(registry_of(args), as_json=args.json)
        return int(import_module(f"{__name__}.{args.command}").run(args))
    except DovetailError as error:
        print(f"dovetail plugin {args.command}: error: {error}", file=sys.stderr)
        return 2


def build_parser() -> argparse.ArgumentParser:
    """Build the parser of all commands."""
    parser = argparse.ArgumentParser(
        prog="dovetail plugin", description="Show, check and write plugins.", allow_abbrev=False
    )
    commands = parser.add_subparsers(dest="command", metavar="COMMAND", required=True)

    text = Path(__file__).with_name("options.json").read_text("utf-8").replace("{kinds}", ", ".join(KINDS))
    for name, table in json.loads(text).items():
        command = commands.add_parser(name, help=table["help"], description=table["about"], allow_abbrev=False)
        add_options(command, table["options"])
    return parser


def registry_of(args: argparse.Namespace) -> Registry:
    """Return what is installed, and what the plugin files and folders of them define that a command was given.

    Raises:
        PluginError: A file or folder cannot be used.
    """
    registry = scan_as_configured()
    if args.plugin_file or args.plugins_dir:
        from dovetail.plugins.files import add_file  # packages are listed without what runs plugins

        for file, given in files_of(args).items():
            add_file(registry, file, given=given)
    return registry


def files_of(args: argparse.Namespace) -> dict[Path, str]:
    """Return the plugin files that a command was given, alone and by their folders, each with how it was given.

    Raises:
        PluginError: A folder cannot be used.
    """
    from dovetail.plugins.files import given_files

    return given_files(split_names(args.plugin_file), split_names(args.plugins_dir))


def scan_as_configured() -> Registry:
    """Scan under the deny and allow lists that the environment holds, as `dovetail serve` would."""
    deny, allow = (os.environ.get(f"DOVETAIL_PLUGIN_{rule}", "") for rule in ("DENY", "ALLOW"))
    return Registry.scan(deny=split_names(deny), allow=split_names(allow))


def find(registry: Registry, name: str, kind: str | None) -> PluginRecord:
    """Return the plugin that a user means.

    Raises:
        PluginError: There is none, several kinds have the name, or it cannot be used.
    """
    from dovetail.contracts.errors import PluginError
    from dovetail.plugins.kinds import split_qualified

    if kind is not None and kind not in KINDS:
        raise PluginError(f"--kind {kind!r}: unknown; possible: {', '.join(KINDS)}")
    bare = split_qualified(name)[1]
    having = [k for k in KINDS if kind in (None, k) and any(r.answers_to(bare) for r in registry.of_kind(k))]
    if len(having) > 1:
        raise PluginError(f"{name!r} is the name of {' and '.join(having)}; add --kind {having[0]}")
    if not having:
        known = sorted({n for k in KINDS for n in registry.names(k)})
        raise PluginError(f"plugin {name!r}: not installed; installed: {', '.join(known) or 'none'}")
    return registry.resolve(having[0], name)


def list_plugins(registry: Registry, *, as_json: bool) -> int:
    """Print every plugin, those of plugin files and folders of them among the installed ones."""
    if as_json:
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
