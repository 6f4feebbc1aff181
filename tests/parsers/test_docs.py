"""`docs/parsers.md` names every parser, every alias and every template that there is."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from dovetail.plugins import Registry
from dovetail.text.chat.templates import builtin_templates

PAGE = (Path(__file__).parents[2] / "docs" / "parsers.md").read_text(encoding="utf-8")


@pytest.mark.parametrize(("kind", "heading"), [("reasoning_parser", "Reasoning"), ("tool_parser", "Tool-call")])
def test_every_parser_and_alias_is_listed(kind: str, heading: str) -> None:
    """The tables are what the registry holds, no more and no less."""
    section = re.search(rf"^### {heading} parsers$(.*?)^#", PAGE, re.MULTILINE | re.DOTALL)
    assert section is not None
    rows = [line.split(" | ") for line in section[1].splitlines() if line.startswith("| `")]
    listed = {row[0].strip("|` "): set(re.findall(r"`([^`]+)`", row[1])) for row in rows}
    found = {r.name: set(r.facts.aliases) for r in Registry.scan().of_kind(kind) if r.builtin}
    assert listed == found


def test_every_template_is_listed() -> None:
    """The names that `--chat-template` takes."""
    section = PAGE.split("## Chat templates")[1].split("They are written")[0]
    assert {*re.findall(r"`([^`]+)`", section)} - {"--chat-template"} == {*builtin_templates()}
