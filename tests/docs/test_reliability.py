"""Each command of the fault table runs something that is there."""

from __future__ import annotations

import re
import shlex
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
TABLE = (ROOT / "docs" / "faults.md").read_text(encoding="utf-8")
ROWS = [line for line in TABLE.splitlines() if line.startswith("| ") and not line.startswith(("| ---", "| fault |"))]
COMMANDS = [command for row in ROWS for command in re.findall(r"`([^`]+)`", row.split("|")[-2])]


def test_every_fault_has_a_command() -> None:
    """No row says only what is believed."""
    assert len(ROWS) > 40
    assert len(COMMANDS) >= len(ROWS)


@pytest.mark.parametrize("command", [each for each in COMMANDS if each.startswith("pytest ")])
def test_tests_that_the_table_names_exist(command: str) -> None:
    """The file is there, and each word of `-k` is part of a test's name in it."""
    words = shlex.split(command)[1:]
    names = ""
    for path in [word for word in words if word.endswith(".py")]:
        source = (ROOT / path).read_text(encoding="utf-8")
        names += " ".join(re.findall(r"^def (test_\w+)", source, re.MULTILINE))
    assert names
    if "-k" in words:
        for word in words[words.index("-k") + 1].split(" or "):
            assert word in names, word


@pytest.mark.parametrize("command", [each for each in COMMANDS if each.startswith("python ")])
def test_benchmarks_that_the_table_names_take_these_flags(command: str) -> None:
    """The file is there and knows the flags."""
    _, path, *words = shlex.split(command)
    source = (ROOT / path).read_text(encoding="utf-8")
    for word in words:
        assert not word.startswith("-") or f'"{word}"' in source, word


def test_make_has_the_other_targets() -> None:
    """What is neither is a target of the Makefile."""
    targets = re.findall(r"^(\w+):", (ROOT / "Makefile").read_text(encoding="utf-8"), re.MULTILINE)
    for command in COMMANDS:
        if not command.startswith(("pytest ", "python ")):
            assert command.removeprefix("make ") in targets, command
