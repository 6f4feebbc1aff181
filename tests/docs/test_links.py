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
PAGES = [page for folder in FOLDERS for page in sorted(ROOT.glob(f"{folder}/*.md"))]
READERS = {"json": json.loads, "python": ast.parse, "toml": tomllib.loads}


def anchors(text: str) -> set[str]:
    """Return the anchors of a page's headings."""
    headings = re.findall(r"^#+ (.+)$", text, re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_links_lead_somewhere(page: Path) -> None:
    """Every relative link names a file, or a page that `make docs` writes, and every anchor a heading."""
    for target in re.findall(r"\]\(([^)\s]+)\)", FENCE.sub("", page.read_text(encoding="utf-8"))):
        path, _, anchor = target.partition("#")
        file = (page.parent / path).resolve() if path else page
        if re.match(r"[a-z]+:", target) or file in {ROOT / "docs" / name for name in GENERATED}:
            continue
        assert file.exists(), target
        assert not anchor or anchor in anchors(file.read_text(encoding="utf-8")), target


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_code_blocks_parse(page: Path) -> None:
    """Python, JSON and TOML blocks are well-formed."""
    for language, text in re.findall(r"^```(json|python|toml)\n(.*?)^```$", page.read_text("utf-8"), re.M | re.S):
        READERS[language](text)


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_targets_that_pages_name_exist(page: Path) -> None:
    """Each `make` command is one of the Makefile."""
    targets = re.findall(r"^(\w+):", (ROOT / "Makefile").read_text("utf-8"), re.MULTILINE)
    named = re.findall(r"`make (\w+)", page.read_text("utf-8"))
    assert [name for name in named if name not in targets] == []
