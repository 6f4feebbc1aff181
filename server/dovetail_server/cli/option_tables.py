"""Options of commands from tables: what adds them, reads their values and tells mistakes in one line."""

from __future__ import annotations

import argparse
import difflib
import math
from collections.abc import Callable, Sequence
from dataclasses import fields
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn, TypeVar

from dovetail.contracts.errors import ConfigError
from dovetail.contracts.tables import table

if TYPE_CHECKING:
    from dovetail_server.bench.workloads import Span

T = TypeVar("T")


class CommandParser(argparse.ArgumentParser):
    """Raises instead of exiting."""

    def __init__(self, prog: str, **more: Any) -> None:
        super().__init__(prog=prog, allow_abbrev=False, **more)

    def error(self, message: str) -> NoReturn:
        """Turn argparse's complaint into ours.

        Raises:
            ConfigError: Always.
        """
        hint = f"; `{self.prog} --help` shows what can be given" if "arguments are required" in message else ""
        raise ConfigError(message.removeprefix("argument ") + hint)


class BenchParser(CommandParser):
    """Names the nearest option for an unknown one."""

    def __init__(self, name: str) -> None:
        """Take the options of a benchmark from `bench.json`."""
        found = table(__file__, "bench.json")[name]
        super().__init__(
            f"dovetail bench {name}",
            description=found["about"],
            formatter_class=lambda prog: argparse.HelpFormatter(prog, max_help_position=32, width=110),
        )
        for title, options in found["groups"].items():
            add_options(self.add_argument_group(title) if title else self, options)

    def options(self) -> list[str]:
        """List every option."""
        return [name for action in self._actions for name in action.option_strings if name.startswith("--")]

    def read(self, argv: Sequence[str]) -> argparse.Namespace:
        """Parse everything.

        Raises:
            ConfigError: An option is unknown, or a value is wrong.
        """
        found, rest = self.parse_known_args(with_dashes(argv))
        if rest:
            raise ConfigError(unknown(rest[0], self.options(), self.prog))
        return found


def add_options(parser: argparse._ActionsContainer, options: dict[str, dict[str, Any]]) -> None:
    """Add the options of a table, each with what argparse takes of it. Of `alone` ones only one can be given."""
    alone = None
    for flags, spec in options.items():
        own = parser
        if spec.pop("alone", False):
            own = alone = alone or parser.add_mutually_exclusive_group()
        if (kind := spec.pop("type", None)) == "switch":
            spec["action"] = argparse.BooleanOptionalAction
        elif kind is not None:
            spec["type"] = TYPES[kind]
        own.add_argument(*flags.split(), **spec)


def filled(options: type[T], args: argparse.Namespace, **others: Any) -> T:
    """Make a dataclass of options: of `others`, and of the arguments given that are named as its fields."""
    names = {field.name for field in fields(options)} & vars(args).keys()  # type: ignore[arg-type]
    return options(**{name: getattr(args, name) for name in names if getattr(args, name) is not None} | others)


def unknown(arg: str, known: Sequence[str], prog: str) -> str:
    """Say what to type instead of an unknown argument."""
    if not arg.startswith("-"):
        return f"{arg!r}: unexpected; `{prog} --help` lists the options"
    near = difflib.get_close_matches(arg.split("=", 1)[0], known, n=1, cutoff=0.5)
    hint = f"did you mean {near[0]}?" if near else f"`{prog} --help` lists the options"
    return f"{arg.split('=', 1)[0]}: unknown option; {hint}"


def cut_at_dashes(argv: Sequence[str]) -> tuple[list[str], list[str]]:
    """Return the command's own arguments, and those behind `--`."""
    at = list(argv).index("--") if "--" in argv else len(argv)
    return list(argv[:at]), list(argv[at + 1 :])


def with_dashes(argv: Sequence[str]) -> list[str]:
    """Write `_` in options as `-`."""
    result = []
    for arg in argv:
        name, equals, value = arg.partition("=")
        result.append((name.replace("_", "-") if name.startswith("--") else name) + equals + value)
    return result


def count(text: str) -> int:
    """Read a whole number of at least 1."""
    return at_least(text, 1)


def whole(text: str) -> int:
    """Read a whole number of at least 0."""
    return at_least(text, 0)


def at_least(text: str, low: int) -> int:
    """Read a whole number with a lower bound."""
    try:
        value = int(text)
    except ValueError:
        value = low - 1
    if value < low:
        raise argparse.ArgumentTypeError(f"expected a whole number of at least {low}, not {text!r}")
    return value


def positive(text: str) -> float:
    """Read a finite number above 0."""
    try:
        value = float(text)
    except ValueError:
        value = 0.0
    if not 0 < value < math.inf:
        raise argparse.ArgumentTypeError(f"expected a number above 0, not {text!r}")
    return value


def bandwidth(text: str) -> float:
    """Read gigabytes a second; returns bytes."""
    return positive(text) * 1e9


def rate(text: str) -> float:
    """Read a number above 0; `inf` means everything at once."""
    return math.inf if text == "inf" else positive(text)


def temperature(text: str) -> float:
    """Read a finite number of at least 0."""
    try:
        value = float(text)
    except ValueError:
        value = -1.0
    if not 0 <= value < math.inf:
        raise argparse.ArgumentTypeError(f"expected a number of at least 0, not {text!r}")
    return value


def probability(text: str) -> float:
    """Read a number above 0, at most 1."""
    value = positive(text)
    if value > 1:
        raise argparse.ArgumentTypeError(f"expected a number above 0, at most 1, not {text!r}")
    return value


def span(text: str) -> Span:
    """Read `512`, or `30:50` for lengths between the two."""
    low, colon, high = text.partition(":")
    try:
        found = int(low), int(high if colon else low)
    except ValueError:
        found = (0, 0)
    if not 1 <= found[0] <= found[1]:
        raise argparse.ArgumentTypeError(f"expected tokens such as 512, or LOW:HIGH such as 30:50, not {text!r}")
    return found


def counts(text: str) -> list[int]:
    """Read `1,16,64`."""
    return [count(part) for part in text.split(",")]


def folder(text: str) -> Path:
    """Read the path of a folder that exists."""
    if not Path(text).is_dir():
        raise argparse.ArgumentTypeError(f"{text!r} is no folder")
    return Path(text)


TYPES: dict[str, Callable[[str], Any]] = {"path": Path, "float": float} | {
    read.__name__: read
    for read in (count, whole, positive, bandwidth, rate, temperature, probability, span, counts, folder)
}
"""What reads the values of options, by the names in the tables."""
