"""Flags of SGLang and vLLM on the command line: rewritten as ours, dropped where they change nothing, or refused."""

from __future__ import annotations

import re
from collections.abc import Collection, Sequence
from typing import Any

from dovetail.contracts.errors import ConfigError
from dovetail_server.compat.flags import SHORT, Flag, find

NUMBER = re.compile(r"-?\d+(\.\d+)?")
LEVEL = re.compile(r"-O(\d+)")


class ArgumentTranslation:
    """Reads arguments once, front to back.

    Attributes:
        argv: Arguments of our own, as they were or as the peer's flags stand for them.
        notes: A line for each flag that was accepted and changes nothing.
    """

    def __init__(self, argv: Sequence[str], known: Collection[str]) -> None:
        """Translate; `known` are our own option strings.

        Raises:
            ConfigError: A peer's flag at a value that nothing here does.
        """
        self.argv: list[str] = []
        self.notes: list[str] = []
        self._rest = list(argv)
        while self._rest:
            arg = self._rest.pop(0)
            shown, equals, value = _split(arg)
            if (ours := f"--{SHORT.get(shown)}") in known:
                shown = ours
            if shown in known:
                self.argv.append(shown + equals + value)
                continue
            flag = find(_long_name(shown)) if shown.startswith("-") else None
            if flag is None:
                self.argv.append(arg)
            else:
                self._apply(shown, flag, value if equals else None)

    def _apply(self, shown: str, flag: Flag, value: str | None) -> None:
        if flag.is_switch:
            value = ""
        elif value is None and (flag.at != () or flag.sets or flag.rewrite):
            value = self._take_value(shown)
        if flag.rewrite is not None:
            self.argv += flag.rewrite(value or "")
            return
        ours = dict(flag.sets).get(value or "")
        if ours is not None:
            self.argv.append(ours)
        elif flag.at is None:
            self.notes.append(f"{shown} changes nothing here: {flag.why}.")
        elif not flag.means_nothing(value):
            given = f" {value}" if value else ""
            raise ConfigError(f"{shown}{given} is not supported: {flag.why}")

    def _take_value(self, shown: str) -> str:
        if not self._rest or (self._rest[0].startswith("-") and not NUMBER.fullmatch(self._rest[0])):
            raise ConfigError(f"{shown}: expected a value")
        value = self._rest.pop(0)
        while self._rest and NUMBER.fullmatch(self._rest[0]):
            self._rest.pop(0)  # a list of numbers
        return value


def _split(arg: str) -> tuple[str, str, str]:
    """Split `--name=value`, the name with its words joined by dashes; of `-O3` the value follows at once."""
    if level := LEVEL.fullmatch(arg):
        return "-O", "=", level[1]
    name, equals, value = arg.partition("=")
    return (name.replace("_", "-") if name.startswith("--") else name), equals, value


def _long_name(shown: str) -> str:
    """Return a flag's name without dashes; the part before the dot of `--compilation-config.mode`."""
    name = shown[2:] if shown.startswith("--") else SHORT.get(shown.partition(".")[0], "")
    return name.partition(".")[0]


def file_value(key: str, value: Any) -> bool:
    """Tell whether a key of a configuration file is a peer's that changes nothing at this value.

    Raises:
        ConfigError: A peer's, at a value that nothing here does.
    """
    flag = find(key.replace("_", "-"))
    if flag is None:
        return False
    is_off = flag.is_switch and value is False
    if is_off or flag.at is None or flag.means_nothing(str(value)):
        return True
    raise ConfigError(f"{key!r} in the configuration file is not supported at {value!r}: {flag.why}")
