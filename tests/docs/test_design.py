"""The picture of the packages in `docs/design/packages.md` is that of the code."""

from __future__ import annotations

import re
from pathlib import Path

import grimp
import pytest

ROOT = Path(__file__).parents[2]
PAGES = {path.name: path.read_text("utf-8") for path in sorted((ROOT / "docs/design").glob("*.md"))}
PACKAGES = {"dovetail": ROOT / "framework/dovetail", "dovetail_server": ROOT / "server/dovetail_server"}
FOLDERS = {
    f"{package}.{folder.name}"
    for package, home in PACKAGES.items()
    for folder in home.iterdir()
    if (folder / "__init__.py").is_file()
}


@pytest.fixture(scope="module")
def imports() -> set[tuple[str, str]]:
    """Which folder imports from which."""
    graph = grimp.build_graph(*PACKAGES, cache_dir=None)
    pairs = {(a, b) for a in graph.modules for b in graph.find_modules_directly_imported_by(a)}
    return {(home(a), home(b)) for a, b in pairs if home(a) != home(b)}


def home(module: str) -> str:
    """Return the folder that a module is in."""
    return ".".join(module.split(".")[:2])


def drawn() -> list[tuple[str, str]]:
    """Return the arrows of the picture."""
    picture = PAGES["packages.md"].partition("```mermaid\n")[2].partition("```")[0]
    names = {f.stem: f"{package}.{f.stem}" for package, home in PACKAGES.items() for f in home.glob("*.py")}
    names |= {folder.partition(".")[2]: folder for folder in FOLDERS}
    return [(names[a], names[b]) for a, b in re.findall(r"(\w+) --> (\w+)", picture)]


def test_every_arrow_is_an_import(imports: set[tuple[str, str]]) -> None:
    """Nothing is drawn that the code does not do."""
    assert [arrow for arrow in drawn() if arrow not in imports] == []


def test_every_folder_is_drawn_and_every_import_goes_along_the_arrows(imports: set[tuple[str, str]]) -> None:
    """A new folder, or an import that no arrows reach, has to be drawn; and no way along the arrows leads back."""
    arrows = drawn()
    rooms = {name for arrow in arrows for name in arrow}
    assert rooms >= FOLDERS
    below: dict[str, set[str]] = {room: {b for a, b in arrows if a == room} for room in rooms}
    for _ in rooms:
        below = {room: found.union(*(below[b] for b in found)) for room, found in below.items()}
    assert [room for room, found in below.items() if room in found] == []
    ours = [(a, b) for a, b in imports if a in rooms and b in rooms]
    assert sorted((a, b) for a, b in ours if b not in below[a]) == []


def test_every_file_that_is_named_is_there() -> None:
    """Paths in backticks are files or folders of one of the two packages, or of the tree."""
    named = set(re.findall(r"`([a-z_]+(?:/[a-z_0-9]+)*(?:/|\.py))`", "".join(PAGES.values())))
    homes = [*PACKAGES.values(), ROOT, ROOT / "server", ROOT / "framework", ROOT / "framework/dovetail/sdk"]
    assert sorted(path for path in named if not any((home / path).exists() for home in homes)) == []


def test_every_name_behind_a_file_is_defined_there() -> None:
    """Names in parentheses behind a file of `paths.md` are functions of it."""
    found = re.findall(r"`([a-z_/]+\.py)` \(`(\w+)`(?:, `(\w+)`)?", PAGES["paths.md"])
    texts = {
        path: next(h / path for h in PACKAGES.values() if (h / path).exists()).read_text("utf-8") for path, *_ in found
    }
    named = [(path, name) for path, *names in found for name in names if name]
    assert len(named) > 10
    assert [(path, name) for path, name in named if f"def {name}(" not in texts[path]] == []


@pytest.mark.parametrize("name", PAGES)
def test_a_page_of_the_design_is_short_and_listed(name: str) -> None:
    """Under 800 words without its picture, and linked from the index."""
    assert len(re.sub(r"```mermaid.*?```", "", PAGES[name], flags=re.DOTALL).split()) < 800
    assert f"]({name})" in PAGES["README.md"] or name == "README.md"
