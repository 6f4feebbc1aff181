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


def test_every_file_of_the_guide_for_changes_is_there() -> None:
    """In the table of CONTRIBUTING.md, `f/` and `s/` stand for the two packages."""
    homes = {"f": PACKAGES["dovetail"], "s": PACKAGES["dovetail_server"]}
    named = re.findall(r"`([fs])/([\w/.]+)`", (ROOT / "CONTRIBUTING.md").read_text("utf-8"))
    assert len(named) > 30
    assert [f"{home}/{path}" for home, path in named if not (homes[home] / path).exists()] == []


def test_every_module_that_a_folder_is_said_to_have_is_there() -> None:
    """In the tables of `packages.md`, words in backticks beside folders are modules, classes or words of these."""
    missing = []
    for folders, said in re.findall(r"^\| (`[a-z_`/., ]+) \| (.*) \|$", PAGES["packages.md"], re.MULTILINE):
        found = [home / folder for folder in re.findall(r"`(\w+)/`", folders) for home in PACKAGES.values()]
        files = [file for folder in found for file in folder.rglob("*.py")]
        words = {word for file in files for word in [file.stem, *re.findall(r"\w+", file.read_text("utf-8"))]}
        words |= {file.parent.name for file in files}
        missing += [
            (folders, word) for word in re.findall(r"`([a-z_]+|[A-Z]\w+)`", said) if files and word not in words
        ]
    assert missing == []


def test_every_attribute_that_is_named_is_there() -> None:
    """`Class.attribute` stands in a file that defines the class."""
    texts = [f.read_text("utf-8") for d in ("framework", "server", "plugins") for f in (ROOT / d).rglob("*.py")]
    named = {pair for page in PAGES.values() for pair in re.findall(r"`([A-Z]\w+)\.([a-z_]\w*)", page)}
    assert len(named) > 20
    homes = {owner: [text.partition(f"class {owner}")[2] for text in texts] for owner, _ in named}
    assert sorted((a, b) for a, b in named if not any(re.search(rf"\b{b}\b", text) for text in homes[a])) == []
