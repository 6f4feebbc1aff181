"""What is given to a start: flags of every command, settings with their variables and bounds, exit codes."""

from __future__ import annotations

import argparse
import ast
import contextlib
import io
import re
from collections.abc import Iterator
from functools import cache
from importlib import import_module
from pathlib import Path
from typing import Any
from unittest import mock

from pydantic import TypeAdapter
from schema_lines import lines

ROOT = Path(__file__).parents[2]
PRODUCT = ("framework", "server/dovetail_server", "plugins")
BENCHMARKS = ("serve", "latency", "grammar", "throughput")
READS = {"get", "getenv", "setdefault", "pop"}
OPTION = re.compile(r"(?<![\w-])--[a-z][a-z0-9-]+")


def page() -> Iterator[str]:
    """Yield the lines of flags, settings, variables and exit codes."""
    yield "# Flags, by command: the names of each, and what follows it"
    yield from commands()
    yield "\n# Settings of `dovetail serve`, with the variable of each; --no- turns a switch off"
    yield from settings()
    yield "\n# Options of the built-in plugins"
    yield from plugin_options()
    yield "\n# Environment variables that are read by their own names"
    yield from (f"variable {name}: read" for name in variables())
    yield "\n# Flags, fields, variables and paths of SGLang, vLLM and others, known without being served"
    yield from known_to_compat()
    yield "\n# Exit codes"
    yield from exit_codes()


def commands() -> Iterator[str]:
    """Yield the flags of each command, from its parsers; from its help where it has none."""
    from dovetail_server.cli.commands import COMMANDS

    for name in COMMANDS:
        yield f"command {name}: of dovetail"
        for rest in ([], *([one] for one in BENCHMARKS)) if name == "bench" else [[]]:
            yield from flags_of(name, rest)


def flags_of(name: str, rest: list[str]) -> Iterator[str]:
    """Yield the flags of one command."""
    from dovetail_server.cli.commands import COMMANDS

    parsers: list[argparse.ArgumentParser] = []
    make = argparse.ArgumentParser.__init__

    def noting(self: argparse.ArgumentParser, *args: Any, **kwargs: Any) -> None:
        parsers.append(self)
        make(self, *args, **kwargs)

    said = io.StringIO()
    with (
        mock.patch.object(argparse.ArgumentParser, "__init__", noting),
        contextlib.redirect_stdout(said),
        contextlib.suppress(SystemExit),
    ):
        asked = "--help=all" if name == "serve" else "--help"
        import_module(COMMANDS[name][0]).main([*rest, asked])
    if not parsers:
        yield from (
            f"{' '.join([name, *rest])} {flag}: in its help" for flag in sorted(set(OPTION.findall(said.getvalue())))
        )
    seen = set()
    for parser in parsers:
        where = parser.prog.removeprefix("dovetail ")
        for action in parser._actions:
            if (line := flag_line(where, action)) is not None and line not in seen:
                seen.add(line)
                yield line


def flag_line(where: str, action: argparse.Action) -> str | None:
    """Return the line of a flag or an argument."""
    if isinstance(action, argparse._SubParsersAction | argparse._HelpAction):
        return None
    *others, last = action.option_strings or [f"<{action.dest}>"]
    takes = "nothing" if action.nargs == 0 else {None: "a value", "?": "a value or nothing"}.get(action.nargs, "values")  # type: ignore[call-overload]
    facts = [takes, *([f"one of {', '.join(map(str, action.choices))}"] if action.choices else [])]
    default = action.default
    if default not in (None, False, argparse.SUPPRESS) and isinstance(default, str | int | float):
        facts.append(f"= {default!r}")
    return f"{where} {' '.join([*others, last])}: {', '.join(facts)}" + (
        ", required" if action.required and action.option_strings else ""
    )


def settings() -> Iterator[str]:
    """Yield the settings of a server."""
    from dovetail.processing.plugin_settings import ENV_PREFIX
    from dovetail_server.settings.serve import ServeSettings

    document = ServeSettings.model_json_schema()
    for path, text in lines(document, document.get("$defs", {})):
        variable = f"{ENV_PREFIX}{path.upper()} " if path.isidentifier() else ""
        yield f"setting {variable}{path}: {text}"


def plugin_options() -> Iterator[str]:
    """Yield the options of the built-in plugins that have some."""
    from importlib.metadata import entry_points

    from dovetail.base.distribution import DISTRIBUTION

    for kind in ("logits_processors", "speculators", "schedule_policies", "grammar_backends", "hooks"):
        for point in sorted(entry_points(group=f"dovetail.{kind}.v1"), key=lambda point: point.name):
            if point.dist is None or point.dist.name != DISTRIBUTION:
                continue
            found = point.load()
            options = found.dovetail_settings() if kind == "hooks" else found.Options
            if options is not None:
                document = TypeAdapter(options).json_schema()
                for path, text in lines(document, document.get("$defs", {})):
                    yield f"option --{point.name}.{path.replace('_', '-')}: {text}"


def variables() -> list[str]:
    """Return the environment variables that the sources read, or name in full."""
    return sorted({name for path in sources() for name in read_by(path)})


def sources() -> Iterator[Path]:
    """Yield the files of the product."""
    for folder in PRODUCT:
        yield from sorted((ROOT / folder).rglob("*.py"))


@cache
def tree_of(path: Path) -> ast.Module:
    """Parse a file once."""
    return ast.parse(path.read_bytes())


def read_by(path: Path) -> Iterator[str]:
    """Yield the variables of one file: constants in the place of a name, and Dovetail's own wherever they stand."""
    if b"environ" not in (text := path.read_bytes()) and b"getenv" not in text and b"DOVETAIL_" not in text:
        return
    for node in ast.walk(tree_of(path)):
        names: list[ast.expr] = []
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr in READS:
            names = node.args[:1] if "environ" in ast.unparse(node.func) or node.func.attr == "getenv" else []
        elif isinstance(node, ast.Subscript) and "environ" in ast.unparse(node.value):
            names = [node.slice]
        elif isinstance(node, ast.Compare) and "environ" in ast.unparse(node.comparators[-1]):
            names = [node.left]
        elif isinstance(node, ast.Constant) and re.fullmatch(r"DOVETAIL_[A-Z][A-Z_]*[A-Z]", str(node.value)):
            names = [node]
        yield from (str(one.value) for one in names if isinstance(one, ast.Constant) and str(one.value).isupper())


def known_to_compat() -> Iterator[str]:
    """Yield what is known of others, and when it is taken."""
    from dovetail_server.compat import endpoints, environment, flags
    from dovetail_server.compat.known import FIELDS

    for what, table in (("peer-flag", flags.TABLE), ("peer-field", FIELDS)):
        for name, known in sorted(table.items()):
            taken = "any value" if known.at is None else " ".join(map(repr, known.at)) or "no value"
            sets = f", sets {' '.join(dict(known.sets).values())}" if getattr(known, "sets", ()) else ""
            yield f"{what} {name}: {taken}{sets}"
    yield from (f"peer-flag {short}: as --{name}" for short, name in sorted(flags.SHORT.items()))
    yield from (f"peer-variable {name}: refused" for name in sorted(environment.RELIED_ON))
    yield from (f"peer-path {path}: told" for path in sorted(endpoints.PATHS))


def exit_codes() -> Iterator[str]:
    """Yield what each kind of end becomes."""
    from dovetail.contracts import errors
    from dovetail_server import cli
    from dovetail_server.cli.exits import exit_code

    def fails(error: BaseException) -> int:
        def work() -> int:
            raise error

        return exit_code("x", work)

    kinds = [
        kind for kind in vars(errors).values() if isinstance(kind, type) and issubclass(kind, errors.DovetailError)
    ]
    with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(io.StringIO()):
        codes = {kind.__name__: fails(kind("x")) for kind in kinds} | {"KeyboardInterrupt": fails(KeyboardInterrupt())}
        for text in ("--help", "--version", "no-such-command", "hash-key --help", "serve --no-such-flag", "bench"):
            codes[f"`dovetail {text}`"] = cli.main(text.split())
    yield from (f"exit {name}: {code}" for name, code in codes.items())
