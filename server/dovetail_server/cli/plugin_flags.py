"""Options of plugins on the command line: `--acme.top-k 5`.

The command line is read in two phases. Here, before any plugin is known, a flag with a dot is set aside with its value
as text. Once the plugins are chosen, `dovetail.processing.plan` asks their classes what options exist and of what type.
"""

from __future__ import annotations

import re
from collections.abc import Sequence

from dovetail.contracts.errors import ConfigError
from dovetail.plugins.options import option_key
from dovetail.processing.plugin_settings import Given, GivenOption

PLUGIN_FLAG = re.compile(r"--([A-Za-z0-9][\w-]*)\.([A-Za-z][\w-]*)(?:=(.*))?", re.DOTALL)


def split_plugin_flags(argv: Sequence[str]) -> tuple[list[str], Given]:
    """Split the arguments into Dovetail's own and the plugins'.

    A flag without `=` takes the next argument, unless that is a flag: then it is a switch, `true`.

    Raises:
        ConfigError: One option is given twice.
    """
    own: list[str] = []
    given: Given = {}
    rest = list(argv)
    while rest:
        arg = rest.pop(0)
        match = PLUGIN_FLAG.fullmatch(arg)
        if match is None:
            own.append(arg)
            continue
        plugin, option, value = match.groups()
        if value is None:
            value = rest.pop(0) if rest and not rest[0].startswith("--") else "true"
        section = given.setdefault(option_key(plugin), {})
        name = option.replace("-", "_")
        if name in section:
            raise ConfigError(f"--{plugin}.{option} is given twice; give it once")
        section[name] = GivenOption(value, f"--{plugin}.{option}")
    return own, given
