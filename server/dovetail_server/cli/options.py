"""From the command line to `ServeSettings`: the flags are generated from the settings class.

Every mistake becomes a `ConfigError` whose one line says what was given and what to do.
"""

from __future__ import annotations

import argparse
import ast
import difflib
import functools
import inspect
import json
import os
import re
from collections.abc import Mapping, Sequence
from contextlib import suppress
from itertools import pairwise
from typing import Any, Literal, NoReturn, get_args, get_origin

from pydantic import ValidationError
from pydantic.fields import FieldInfo
from pydantic_core import PydanticUndefined

from dovetail.base.config_file import field_aliases
from dovetail.base.settings import Settings
from dovetail.contracts.errors import ConfigError
from dovetail.contracts.tables import table
from dovetail.plugins.options import option_key
from dovetail.processing.plugin_settings import (
    ENV_PREFIX,
    Given,
    GivenOption,
    from_environment,
    is_secret,
    merge_options,
)
from dovetail_server.cli.option_tables import CommandParser
from dovetail_server.compat.arguments import ArgumentTranslation
from dovetail_server.compat.environment import check as compat_environment
from dovetail_server.settings.serve import ServeSettings

# Options of plugins on the command line: `--acme.top-k 5`.
#
# The command line is read in two phases. Here, before any plugin is known, a flag with a dot is set aside with its
# value as text. Once the plugins are chosen, `dovetail.processing.plan` asks their classes what options exist and of
# what type.

HELP: dict[str, Any] = table(__file__, "help.json")
GROUPS, METAVARS = HELP["groups"], HELP["metavars"]
"""The settings of each group of flags, and those of each metavar, which says the unit."""
GROUP_OF = {name: title for title, names in GROUPS.items() for name in names.split()}
_METAVAR_OF = {name: metavar for metavar, names in METAVARS.items() for name in names.split()}
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


def object_of(parts: Mapping[str, GivenOption], flag: str, *, is_given: bool) -> dict[str, Any]:
    """Return a setting's object that was given in parts, as for vLLM: `--limit-mm-per-prompt.image 2`.

    Raises:
        ConfigError: It `is_given` whole, too.
    """
    found: dict[str, Any] = {}
    for key, part in parts.items():
        if is_given:
            raise ConfigError(f"{part.source} is a part of {flag}; give {flag} alone")
        found[key] = part.value
        with suppress(ValueError):  # a word is a text
            found[key] = json.loads(str(part.value))
    return found


NEAR = 0.75
"""How alike two names must be for one to be suggested: below it a guess misleads more than it helps."""
WITHOUT_SOURCES = (
    "Dovetail is installed without its Python sources, where the descriptions of settings and fields stand: "
    "--help and /openapi.json list the names alone"
)
"""What a server of compiled files says: the docstrings of fields are read from the source files."""
NOTES = "(notes)"
"""Where parsed flags carry what is to be said of them: no setting has such a name."""


class OptionParser(CommandParser):
    """Says what is wrong with a second model path."""

    def error(self, message: str) -> NoReturn:
        """Turn argparse's complaint into ours."""
        if message.startswith("unrecognized arguments: "):
            raise ConfigError(f"one model path is expected, but there is also {message.split(': ', 1)[1]!r}")
        super().error(message)


class Once(argparse.Action):
    """Stores a value, and refuses a second name of the same setting."""

    def __init__(
        self,
        option_strings: Sequence[str],
        dest: str,
        *,
        is_flag: bool = False,
        is_list: bool = False,
        value: bool = True,
        **kwargs: Any,
    ) -> None:
        super().__init__(option_strings, dest, nargs=0 if is_flag else kwargs.pop("nargs", None), **kwargs)
        self.is_flag = is_flag
        self.is_list = is_list
        self.value = value

    def __call__(
        self, parser: argparse.ArgumentParser, namespace: argparse.Namespace, values: Any, option: str | None = None
    ) -> None:
        """Store the value under the field's name; a list grows each time it is given."""
        if option is None and values is None:
            return  # the positional model path, left out
        used: dict[str, str] = namespace.__dict__.setdefault("_used", {})
        shown = option or "the model path"
        if self.dest in used and used[self.dest] != shown:
            raise ConfigError(f"{used[self.dest]} and {shown} are the same setting; give one of them")
        if self.is_list:
            values = values if isinstance(values, list) else [values]
            values = [*(getattr(namespace, self.dest) if self.dest in used else []), *values]
        used[self.dest] = shown
        setattr(namespace, self.dest, self.value if self.is_flag else values)


def flag_names(name: str, field: FieldInfo) -> list[str]:
    """Return every option string of a setting, the main one first."""
    extra = field.json_schema_extra
    aliases = extra.get("aliases", []) if isinstance(extra, dict) else []
    return [f"--{str(n).replace('_', '-')}" for n in [name, *(aliases if isinstance(aliases, list) else [])]]


def has_flag(field: FieldInfo) -> bool:
    """Tell whether the setting has a flag of its own; the options of plugins have one each."""
    return not (isinstance(field.json_schema_extra, dict) and field.json_schema_extra.get("flag") is False)


def is_common(field: FieldInfo) -> bool:
    """Tell whether plain `--help` shows the setting."""
    return isinstance(field.json_schema_extra, dict) and bool(field.json_schema_extra.get("common"))


def source_notes() -> list[str]:
    """Return what is to be said where no setting has its description."""
    return [] if os.path.exists(inspect.getsourcefile(ServeSettings) or "") else [WITHOUT_SOURCES]


@functools.cache
def descriptions() -> dict[str, str]:
    """Return the docstring of each setting in one line; nothing where the sources are not installed."""
    try:
        trees = [ast.parse(inspect.getsource(each)) for each in ServeSettings.__mro__ if issubclass(each, Settings)]
    except OSError:
        return {}
    return {
        ast.unparse(field.target): " ".join(ast.literal_eval(text.value).split())
        for tree in trees
        for field, text in pairwise(ast.iter_child_nodes(tree.body[0]))
        if isinstance(field, ast.AnnAssign) and isinstance(text, ast.Expr)
    }


def describe(name: str, *, with_choices: bool = True) -> str:
    """Return the help text of a setting, with its default and, unless the metavar has them, its choices."""
    text, field = descriptions().get(name, ""), ServeSettings.model_fields[name]
    if with_choices and (choices := choices_of(field)):
        text += f" One of {', '.join(choices)}."
    default = field.default_factory() if field.default_factory is not None else field.default  # type: ignore[call-arg]
    if default not in (None, "", [], {}) and field.annotation is not bool and default is not PydanticUndefined:
        text += f" Default: {','.join(map(str, default)) if isinstance(default, list) else default}."
    return text.replace("`", "").replace("%", "%%")


def choices_of(field: FieldInfo) -> tuple[str, ...]:
    """Return the values that a setting may have; none where they are not a short list."""
    kinds = [get_args(a) for a in (field.annotation, *get_args(field.annotation)) if get_origin(a) is Literal]
    return tuple(map(str, kinds[0])) if kinds else ()


def metavar_of(name: str, choices: tuple[str, ...] = ()) -> str:
    """Return what the help shows for a setting's value: its choices, its unit, or what it names."""
    return "{" + ",".join(choices) + "}" if choices else _METAVAR_OF.get(name, "NAME")


def build_parser(show_all: bool, *, describes: bool = False) -> OptionParser:
    """Build the parser; `show_all` lists the less common flags in its help too, which it has if it `describes`."""
    more = " These are the common options; --help=all lists all."
    if show_all:
        more = " Flags of SGLang, vLLM and llama.cpp are known too: translated, ignored with a log line, or rejected."
        more += " Options of plugins follow where flags name the plugins; `dovetail plugin info NAME` shows them, too."
    parser = OptionParser(
        "dovetail serve",
        add_help=False,
        usage="dovetail serve [MODEL] [options]",
        description=f"Serve MODEL, a directory or hub name, over HTTP; without MODEL, a small demo model.{more} "
        f"Every option can also be an environment variable ({ENV_PREFIX}PORT) or a line in --config FILE."
        + "".join(f" {note}." for note in source_notes()),
        formatter_class=lambda prog: argparse.HelpFormatter(prog, max_help_position=30, width=110),
    )
    parser.add_argument("model_path", nargs="?", metavar="MODEL", action=Once, help=argparse.SUPPRESS)
    groups = {title: parser.add_argument_group(title) for title in GROUPS}
    shown_last = {name: i for i, name in enumerate(GROUP_OF)}
    for name, field in sorted(ServeSettings.model_fields.items(), key=lambda item: shown_last.get(item[0], -1)):
        if not has_flag(field):
            continue
        group = groups[GROUP_OF[name]]
        is_shown = describes and (show_all or is_common(field))
        shown = describe(name, with_choices=False) if is_shown else argparse.SUPPRESS
        names = flag_names(name, field)
        if field.annotation is bool:
            group.add_argument(*names, dest=name, action=Once, is_flag=True, help=shown)
            off = [f"--no-{flag[2:]}" for flag in names]
            group.add_argument(*off, dest=name, action=Once, is_flag=True, value=False, help=argparse.SUPPRESS)
        elif get_origin(field.annotation) is list:
            # A key takes one word: what follows is more likely the model, and a model taken for a key would be silent.
            nargs, unit = None if is_secret(field) else "+", metavar_of(name)
            group.add_argument(*names, dest=name, action=Once, is_list=True, nargs=nargs, metavar=unit, help=shown)
        else:
            unit = metavar_of(name, choices_of(field))
            group.add_argument(*names, dest=name, action=Once, metavar=unit, help=shown)
    parser.add_argument("-h", "--help", action="store_true", help="Show this help; --help=all lists all options.")
    parser.set_defaults(**dict.fromkeys(ServeSettings.model_fields, argparse.SUPPRESS))
    return parser


def check_names(argv: Sequence[str], known: Sequence[str]) -> list[str]:
    """Return the arguments with `_` in flags written `-`; refuse unknown flags with the nearest name."""
    result = []
    for arg in argv:
        name, equals, value = arg.partition("=")
        if not name.startswith("--") or name == "--":
            result.append(arg)
            continue
        name = name.replace("_", "-")
        if name not in known:
            near = difflib.get_close_matches(name, known, n=1, cutoff=NEAR)
            hint = f"did you mean {near[0]}?" if near else "`dovetail serve --help=all` lists them"
            raise ConfigError(f"{name}: unknown option; {hint}")
        result.append(name + equals + value)
    return result


def parse_flags(argv: Sequence[str]) -> dict[str, Any] | str:
    """Return the settings given as flags, or the help text if that was asked for.

    Raises:
        ConfigError: An unknown flag, a missing value, or two names of one setting.
    """
    show_all = any(arg in {"--help=all", "--help-all"} for arg in argv)
    parser = build_parser(show_all)
    known = [name for action in parser._actions for name in action.option_strings]
    translation = ArgumentTranslation(argv, {*known, "--help-all"})
    argv, plugins = split_plugin_flags(translation.argv)
    if show_all or any(arg in {"-h", "--help"} for arg in argv):
        return build_parser(show_all, describes=True).format_help()
    values = vars(parser.parse_args(check_names(argv, known)))
    given = {k: v for k, v in values.items() if k in ServeSettings.model_fields and v is not argparse.SUPPRESS}
    for name, field in ServeSettings.model_fields.items():
        is_object = get_origin(field.annotation) is dict and has_flag(field)
        if is_object and (parts := plugins.pop(option_key(name), None)):
            given[name] = object_of(parts, f"--{option_key(name)}", is_given=name in given)
    notes = {NOTES: tuple(translation.notes)} if translation.notes else {}
    return {**given, **notes, "plugins": plugins} if plugins else {**given, **notes}


def read_settings(argv: Sequence[str]) -> ServeSettings:
    """Read the options of `dovetail serve` that another command takes beside its own.

    Raises:
        ConfigError: One is unknown or wrong, or a help text is asked for that is none of that command.
    """
    flags = parse_flags(argv)
    if isinstance(flags, str):
        raise ConfigError("`dovetail serve --help=all` lists the options of the model and its engine")
    return load_settings(flags)


def load_settings(flags: dict[str, Any]) -> ServeSettings:
    """Merge flags, environment and configuration file.

    Raises:
        ConfigError: A value is wrong; the message names where it came from.
    """
    check_environment()
    notes = flags.get(NOTES, ())
    flags = {name: value for name, value in flags.items() if name != NOTES}
    if options := merge_options(from_environment(os.environ), flags.get("plugins", {})):
        flags = {**flags, "plugins": options}
    try:
        settings = ServeSettings(**flags)
    except ValidationError as error:
        raise ConfigError(explain(error, flags)) from None
    settings.auto_notes = (
        *notes,
        *source_notes(),
        *compat_environment(os.environ, has_keys=bool(settings.api_key or settings.keys_file)),
    )
    return settings


def check_environment() -> None:
    """Refuse environment variables that look like settings and are none; those of plugins are not ours to judge."""
    known = field_aliases(ServeSettings)
    for name in os.environ:
        key = name.removeprefix(ENV_PREFIX).lower()
        if not name.startswith(ENV_PREFIX) or "__" in key or key in ServeSettings.model_fields:
            continue
        near = [known[k] for k in difflib.get_close_matches(key, known, n=1, cutoff=NEAR)]
        if near:
            raise ConfigError(f"environment variable {name}: unknown; did you mean {ENV_PREFIX}{near[0].upper()}?")


def explain(error: ValidationError, flags: dict[str, Any]) -> str:
    """Say in one line what is wrong with the first bad setting and where it was given."""
    from dovetail.base.word_numbers import wanted

    first = error.errors()[0]
    reason = first["msg"].removeprefix("Value error, ")
    if not first["loc"]:
        return reason  # about several settings, which it names
    name = str(first["loc"][0])
    if first["type"] == "extra_forbidden":
        near = difflib.get_close_matches(name, field_aliases(ServeSettings), n=1, cutoff=NEAR)
        hint = f"did you mean {near[0]!r}?" if near else "`dovetail serve --help=all` lists the settings"
        return f"{name!r} in the configuration file: unknown setting; {hint}"
    if name in flags:
        where = f"--{name.replace('_', '-')}"
    elif f"{ENV_PREFIX}{name.upper()}" in os.environ:
        where = f"environment variable {ENV_PREFIX}{name.upper()}"
    else:
        where = f"{name!r} in the configuration file"
    field = ServeSettings.model_fields[name]
    given = "" if is_secret(field) else f" {first['input']!r}"
    return f"{where}{given}: {wanted(first, field) or reason[0].lower() + reason[1:]}"
