"""The command `dovetail`: finds the subcommand and imports only that."""

from __future__ import annotations

import difflib
import os
import sys
from collections.abc import Iterable, Mapping
from importlib import import_module

COMMANDS = {
    "serve": ("dovetail_server.cli.serve", "serve a model over HTTP"),
    "plugin": ("dovetail_server.cli.plugin", "list, inspect, check, write and lock plugins"),
    "info": ("dovetail_server.cli.info", "show what the server makes of a model"),
    "plan": ("dovetail_server.cli.plan", "show how memory would be divided, without loading weights"),
    "run-batch": ("dovetail_server.cli.run_batch", "answer the requests of a file, without a server"),
    "bench": ("dovetail_server.cli.bench", "measure speed, of a server or of the engine"),
    "version": ("dovetail_server.cli.version", "print the version"),
}

HELP = frozenset({"-h", "--help", "help"})


def usage(more: Mapping[str, str] | None = None) -> str:
    """Return the text of `dovetail --help`; `more` are the commands of plugins."""
    lines = ["usage: dovetail COMMAND …", "", "LLM serving where every part is a plugin.", "", "commands:"]
    lines += [f"  {name:<11}{about}" for name, (_, about) in COMMANDS.items()]
    if more:
        lines += ["", "commands of plugins:", *(f"  {name:<11}{about}" for name, about in more.items())]
    lines += ["", "`dovetail COMMAND --help` shows a command's options. `dovetail serve` alone serves the demo model."]
    lines += ["`dovetail --plugin NAME …` adds the commands of a plugin."]
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


def hint(name: str, commands: Iterable[str]) -> str:
    """Return what to type instead."""
    known = list(commands)
    near = difflib.get_close_matches(name, known, n=1)
    return f"did you mean {near[0]!r}?" if near else f"commands: {', '.join(known)}"
