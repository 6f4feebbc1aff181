"""Commands that hook plugins add: `dovetail --plugin acme acme-tune …`."""

from __future__ import annotations

import sys
from importlib import import_module

from dovetail.contracts.errors import DovetailError, PluginError
from dovetail.contracts.hooks import CliCommand, CliCommands
from dovetail.plugins.manager import HookManager
from dovetail_server.cli.commands import COMMANDS, HELP, hint, usage
from dovetail_server.cli.plugin import scan_as_configured


def run_command(name: str, argv: list[str], plugins: list[str]) -> int:
    """Run a plugin's command, or show the help.

    Args:
        name: What was typed.
        argv: Its arguments.
        plugins: Names of the enabled hook plugins.

    Returns:
        The exit code: the command's own, or 2 where there is no such command or a plugin cannot be used.
    """
    try:
        commands = CliCommands(reserved=frozenset(COMMANDS))
        HookManager.enable(scan_as_configured(), plugins).cli_commands(commands)
        found = commands.commands
        if name in HELP:
            print(usage({command.name: f"{command.help} ({command.plugin})" for command in found.values()}))
            return 0
        if name not in found:
            print(f"dovetail: {name!r} is no command; {hint(name, [*COMMANDS, *found])}", file=sys.stderr)
            return 2
        return _call(found[name], argv)
    except DovetailError as error:
        print(f"dovetail: error: {error}", file=sys.stderr)
        return 2


def _call(command: CliCommand, argv: list[str]) -> int:
    module, _, attr = command.target.partition(":")
    try:
        function = getattr(import_module(module), attr)
    except (ImportError, AttributeError) as error:
        raise PluginError(
            f"command {command.name!r} of {command.plugin}: {command.target} cannot be imported: {error}; "
            "report this to its author"
        ) from error
    return int(function(argv) or 0)
