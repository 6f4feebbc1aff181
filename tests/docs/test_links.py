"""Pages as they stand in the tree: their links lead somewhere, and their code is well-formed."""

from __future__ import annotations

import ast
import json
import re
import tomllib
from pathlib import Path

import pytest
from stage import FENCE, GENERATED

ROOT = Path(__file__).parents[2]
FOLDERS = (".", "docs", "docs/design", "docs/tutorials", "docs/examples/*")
TEXTS = {page: page.read_text("utf-8") for folder in FOLDERS for page in sorted(ROOT.glob(f"{folder}/*.md"))}
READERS = {"json": json.loads, "python": ast.parse, "toml": tomllib.loads}


def anchors(text: str) -> set[str]:
    """Return the anchors of a page's headings."""
    headings = re.findall(r"^#+ (.+)$", text, re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


def test_links_lead_somewhere() -> None:
    """Every relative link names a file, or a page that `make docs` writes, and every anchor a heading."""
    written = {ROOT / "docs" / name for name in GENERATED}
    for page, text in TEXTS.items():
        for target in re.findall(r"\]\(([^)\s]+)\)", FENCE.sub("", text)):
            path, _, anchor = target.partition("#")
            file = (page.parent / path).resolve() if path else page
            if re.match(r"[a-z]+:", target) or file in written:
                continue
            assert file.exists(), (page, target)
            assert not anchor or anchor in anchors(file.read_text(encoding="utf-8")), (page, target)


def test_code_blocks_parse() -> None:
    """Python, JSON and TOML blocks are well-formed."""
    for page, text in TEXTS.items():
        for language, block in re.findall(r"^```(json|python|toml)\n(.*?)^```$", text, re.M | re.S):
            try:
                READERS[language](block)
            except (SyntaxError, ValueError) as error:
                pytest.fail(f"{page}: {error} in\n{block}")


def test_targets_that_pages_name_exist() -> None:
    """Each `make` command is one of the Makefile."""
    targets = re.findall(r"^(\w+):", (ROOT / "Makefile").read_text("utf-8"), re.MULTILINE)
    named = [(page, name) for page, text in TEXTS.items() for name in re.findall(r"`make (\w+)", text)]
    assert [each for each in named if each[1] not in targets] == []
