"""The command `dovetail`: finds the subcommand and imports only that."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path

from dovetail_server.cli.commands import COMMANDS, HELP, hint, usage

# Who owns the folder `dovetail/`: Dovetail alone, or another distribution too, such as the index's own `dovetail`.
#
# Installers write two distributions' files into one folder without a word, and remove both with either. The command
# looks before anything of `dovetail` is imported, which could be the other one's code: here nothing of it may be, and
# nothing that takes long to import, as every command begins so.

PACKAGE = "dovetail"
COMMAND = b"dovetail_server.cli:main"
"""The console script by which Dovetail's own distribution is known, whatever it is called."""


def problem() -> str | None:
    """Return what is wrong with the folder that `import dovetail` would take, with the fix; None if nothing is."""
    spec = find_spec(PACKAGE)  # finds a top-level package without importing it
    folders = [Path(folder) for folder in (spec.submodule_search_locations if spec else None) or ()]
    others = sorted({name for folder in folders for name in _strangers(folder)})
    if others:
        names = " ".join(name.partition(" ")[0] for name in others)
        return (
            f"{folders[0]} belongs to another package too: {', '.join(others)}; "
            f"run `pip uninstall {names}`, then install {_own_name()} again"
        )
    if spec is None or spec.origin is None:
        return (
            f"the package {PACKAGE!r} has no __init__.py, as after another one was removed; install {_own_name()} again"
        )
    return None


def _strangers(folder: Path) -> Iterator[str]:
    """Yield `name version` of the distributions beside a folder that have files in it and are not Dovetail."""
    for info in folder.parent.glob("*.dist-info"):
        if f"\n{folder.name}/".encode() in b"\n" + _read(info / "RECORD") and not _is_ours(info):
            yield info.stem.replace("-", " ", 1)


def _is_ours(info: Path) -> bool:
    return COMMAND in _read(info / "entry_points.txt")


def _own_name() -> str:
    from importlib.metadata import distributions  # only here: it takes as long as everything else that a command does

    return next(
        (dist.name for dist in distributions() if COMMAND.decode() in (dist.read_text("entry_points.txt") or "")),
        "Dovetail",
    )


def _read(file: Path) -> bytes:
    """Return a metadata file, or b"" where it is absent or unreadable: a damaged install owns nothing we know of."""
    try:
        return file.read_bytes()
    except OSError:
        return b""


def main(argv: list[str] | None = None) -> int:
    """Run one command and return its exit code."""
    if found := problem():
        print(f"dovetail: {found}", file=sys.stderr)
        return 2
    try:
        return run(sys.argv[1:] if argv is None else argv)
    except BrokenPipeError:  # `dovetail --help | head`
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0


def run(args: list[str]) -> int:
    """Find the command and hand over the rest of the arguments."""
    enabled = os.environ.get("DOVETAIL_PLUGIN", "").split(",")
    while args and (args[0] == "--plugin" or args[0].startswith("--plugin=")):
        taken = 1 if "=" in args[0] else 2
        enabled += (args[0].partition("=")[2] if taken == 1 else args[1] if len(args) > 1 else "").split(",")
        args = args[taken:]
    name = "version" if args[:1] in (["--version"], ["-V"]) else args[0] if args else "--help"
    if name in COMMANDS:
        return int(import_module(COMMANDS[name][0]).main(args[1:]))
    plugins = [plugin.strip() for plugin in enabled if plugin.strip()]
    if plugins:
        from dovetail_server.cli.plugin.commands import run_command

        return run_command(name, args[1:], plugins)
    if name in HELP:
        print(usage())
        return 0
    print(f"dovetail: {name!r} is no command; {hint(name, COMMANDS)}", file=sys.stderr)
    return 2
