"""The subcommands of `dovetail`, and what is said of them."""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Mapping

COMMANDS = {
    "serve": ("dovetail_server.cli.serve", "serve a model over HTTP"),
    "gateway": ("dovetail_server.cli.gateway", "put one address in front of several servers"),
    "chat": ("dovetail_server.cli.chat", "chat with a model in the terminal"),
    "top": ("dovetail_server.cli.top", "watch a server at work"),
    "plugin": ("dovetail_server.cli.plugin", "list, inspect, check, write and lock plugins"),
    "info": ("dovetail_server.cli.info", "show what the server makes of a model"),
    "plan": ("dovetail_server.cli.plan", "show how memory would be divided, without loading weights"),
    "warm": ("dovetail_server.cli.warm", "compile a model's kernels into the cache, for images"),
    "quantize": ("dovetail_server.cli.quantize", "write a model's checkpoint in 8 or 4 bits"),
    "hash-key": ("dovetail_server.cli.hash_key", "print the hash of an API key, for --keys-file"),
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


def hint(name: str, commands: Iterable[str]) -> str:
    """Return what to type instead."""
    known = list(commands)
    near = difflib.get_close_matches(name, known, n=1)
    return f"did you mean {near[0]!r}?" if near else f"commands: {', '.join(known)}"
