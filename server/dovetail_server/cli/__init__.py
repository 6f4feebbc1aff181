"""The command `dovetail`: finds the subcommand and imports only that."""

from __future__ import annotations

import difflib
import os
import sys
from importlib import import_module

COMMANDS = {
    "serve": ("dovetail_server.cli.serve", "serve a model over HTTP"),
    "plugin": ("dovetail_server.cli.plugin", "list, inspect and check plugins"),
    "bench": ("dovetail_server.cli.bench", "measure speed"),
    "version": ("dovetail_server.cli.version", "print the version"),
}


def usage() -> str:
    """Return the text of `dovetail --help`."""
    lines = ["usage: dovetail COMMAND …", "", "LLM serving where every part is a plugin.", "", "commands:"]
    lines += [f"  {name:<9}{about}" for name, (_, about) in COMMANDS.items()]
    lines += ["", "`dovetail COMMAND --help` shows a command's options. `dovetail serve` alone serves the demo model."]
    return "\n".join(lines)


def main(argv: list[str] | None = None) -> int:
    """Run one command and return its exit code."""
    try:
        return run(sys.argv[1:] if argv is None else argv)
    except BrokenPipeError:  # `dovetail --help | head`
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0


def run(args: list[str]) -> int:
    """Find the command and hand over the rest of the arguments."""
    if not args or args[0] in {"-h", "--help", "help"}:
        print(usage())
        return 0
    name = "version" if args[0] in {"--version", "-V"} else args[0]
    if name not in COMMANDS:
        near = difflib.get_close_matches(name, COMMANDS, n=1)
        hint = f"did you mean {near[0]!r}?" if near else f"commands: {', '.join(COMMANDS)}"
        print(f"dovetail: {name!r} is no command; {hint}", file=sys.stderr)
        return 2
    return int(import_module(COMMANDS[name][0]).main(args[1:]))
