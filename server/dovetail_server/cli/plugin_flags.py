"""Options of plugins on the command line and in the environment: `--acme.top-k 5`, `DOVETAIL_PLUGIN__ACME__TOP_K=5`.

The command line is read in two phases. Here, before any plugin is known, a flag with a dot is set aside with its value
as text. Once the plugins are chosen, `dovetail_server.plugins` asks their classes what options exist and of what type.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any

from dovetail.errors import ConfigError
from dovetail.plugins.options import option_key
from dovetail_server.setting_types import GivenOption
from dovetail_server.settings import ENV_PREFIX

Given = dict[str, dict[str, GivenOption]]
"""Options by plugin and name, both normalised."""

PLUGIN_FLAG = re.compile(r"--([A-Za-z0-9][\w-]*)\.([A-Za-z][\w-]*)(?:=(.*))?", re.DOTALL)
ENV_OPTION = f"{ENV_PREFIX}PLUGIN__"


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


def from_environment(environment: Mapping[str, str]) -> Given:
    """Return the options that environment variables hold; an empty variable is none.

    Raises:
        ConfigError: A variable names no plugin or no option.
    """
    given: Given = {}
    for variable, value in environment.items():
        if not variable.startswith(ENV_OPTION) or not value:
            continue
        plugin, _, option = variable.removeprefix(ENV_OPTION).lower().partition("__")
        if not plugin or not option:
            raise ConfigError(f"environment variable {variable}: expected {ENV_OPTION}<PLUGIN>__<OPTION>")
        given.setdefault(option_key(plugin), {})[option] = GivenOption(value, f"environment variable {variable}")
    return given


def merge_options(weaker: Mapping[str, dict[str, Any]], stronger: Mapping[str, dict[str, Any]]) -> Given:
    """Return both, `stronger` where they disagree."""
    return {plugin: {**weaker.get(plugin, {}), **stronger.get(plugin, {})} for plugin in {*weaker, *stronger}}
