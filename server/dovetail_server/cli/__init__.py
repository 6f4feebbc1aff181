"""The command `dovetail`: finds the subcommand and imports only that."""

from __future__ import annotations

import os
import sys
from importlib import import_module

from dovetail_server.cli.commands import COMMANDS, HELP, hint, usage
from dovetail_server.cli.owners import problem


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
