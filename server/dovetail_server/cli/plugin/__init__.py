"""`dovetail plugin`: what is installed, from where, and why something is not used.

Each command has a file of its own, imported when it is typed: `list` imports no plugin and no torch.
"""

from __future__ import annotations

import argparse
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

    def add(name: str, help: str, description: str) -> argparse.ArgumentParser:
        return commands.add_parser(name, help=help, description=description, allow_abbrev=False)

    kinds = ", ".join(KINDS)
    listing = add(
        "list",
        "list every plugin with its state and package",
        "List every installed plugin from package metadata; nothing is imported. Plugin files are run: only then is "
        "known what they define.",
    )
    listing.add_argument("--json", action="store_true", help="print what GET /v1/plugins returns")
    _add_file_flags(listing)
    info = add("info", "show one plugin, its package and its options", "Show one plugin; imports it for its options.")
    info.add_argument("name", metavar="NAME", help="a name, an alias, or distribution:name")
    info.add_argument("--kind", help=f"where several kinds have the name: {kinds}")
    _add_file_flags(info)
    doctor = add(
        "doctor",
        "explain everything that is wrong",
        "Look for hidden installs, conflicts, missing packages and changed files, and load each package's plugins in "
        "a process of its own to find what fails, hangs, or changes Dovetail.",
    )
    doctor.add_argument("--no-load", action="store_true", help="read metadata only; import nothing")
    doctor.add_argument("--timeout", type=float, default=60.0, help="seconds that one plugin may take [60]")
    _add_file_flags(doctor)
    check = add("check", "run the conformance kit on a plugin", "Run the conformance kit; needs pytest.")
    check.add_argument("name", metavar="NAME", help="a name, an alias, or distribution:name")
    check.add_argument("--kind", help=f"where several kinds have the name: {kinds}")
    check.add_argument(
        "--next-minor",
        action="store_true",
        help="by the rules of Dovetail's next minor version: what it ends fails, and deprecations are errors",
    )
    _add_file_flags(check)
    validate = add(
        "validate",
        "check a plugin's project without installing it",
        "Read a project's pyproject.toml as if it were installed, and run the conformance kit on each of its plugins.",
    )
    validate.add_argument("folder", metavar="DIR", help="the folder of its pyproject.toml")
    new = add("new", "write the package of a new plugin", "Write a package that installs and passes its test.")
    new.add_argument("kind", metavar="KIND", help=kinds)
    new.add_argument("name", metavar="NAME", help="the plugin's name, such as acme-r2; for a model, its architecture")
    new.add_argument("--dir", help="the folder to write; dovetail-NAME if not given")
    lock = add("lock", "write down what is installed, for --plugins-locked", "Write name, version and RECORD hash.")
    lock.add_argument("--output", help="the file; dovetail-plugins.lock if not given, - for standard output")
    return parser


def _add_file_flags(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--plugin-file", action="append", default=[], metavar="FILE", help="as of `dovetail serve`")
    parser.add_argument("--plugins-dir", action="append", default=[], metavar="DIR", help="as of `dovetail serve`")


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
