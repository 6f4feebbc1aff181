"""Counts that README and docs state are those of the code."""

from __future__ import annotations

import json
import re
import tomllib
from pathlib import Path

import pytest

from dovetail.plugins import Registry

ROOT = Path(__file__).parents[2]


def names_of_others(part: str) -> set[str]:
    """Return what SGLang and vLLM have of one part, as the tests of compatibility list it."""
    files = [ROOT / f"tests/server/compat/{one}.toml" for one in ("sglang", "vllm")]
    return {name for file in files for name in tomllib.loads(file.read_text("utf-8"))[part]}


def foreign_replies() -> list[list[object]]:
    """Return the replies that were put to three servers; the last field is why they differ, empty where they agree."""
    parsers = json.loads((ROOT / "tests/parsers/foreign.json").read_text("utf-8"))
    return [row for rows in parsers.values() for row in rows]


def plugins(kind: str, ending: str = "") -> list[str]:
    """Return the built-in plugins of a kind."""
    found = [one for one in Registry.scan().records if one.kind == kind and one.builtin]
    return [one.name for one in found if one.name.endswith(ending)]


COUNTS = {
    ("docs/migrate.md", r"vLLM 0\.33\.0: (\d+) flags"): lambda: len(names_of_others("flags")),
    ("docs/output-recovery.md", r"holds (\d+) replies"): lambda: len(foreign_replies()),
    ("docs/output-recovery.md", r"agree on (\d+) of them"): lambda: sum(not row[-1] for row in foreign_replies()),
    ("docs/output-recovery.md", r"reasons of the other (\d+)"): lambda: sum(bool(row[-1]) for row in foreign_replies()),
}
AT_LEAST = {
    ("README.md", r"over (\d+) decoder architectures"): lambda: len(plugins("model", "ForCausalLM")),
}


@pytest.mark.parametrize("where", COUNTS, ids=str)
def test_counts(where: tuple[str, str]) -> None:
    """A count is exactly what the code or the data has."""
    assert stated(*where) == COUNTS[where]()


@pytest.mark.parametrize("where", AT_LEAST, ids=str)
def test_round_counts(where: tuple[str, str]) -> None:
    """A round number is the next one below what the code has."""
    number = stated(*where)
    assert number < AT_LEAST[where]() <= number + 10


def test_kinds() -> None:
    """The changelog counts and names the kinds of plugins."""
    kinds = {one.kind for one in Registry.scan().records if one.builtin}
    assert len(kinds) == 15
    assert "Fifteen kinds of plugins" in (ROOT / "CHANGELOG.md").read_text("utf-8")


def stated(page: str, pattern: str) -> int:
    found = re.search(pattern, (ROOT / page).read_text("utf-8"))
    assert found, f"{page} has no {pattern}"
    return int(found[1].replace(",", ""))
