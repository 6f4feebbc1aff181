"""What the site is built from: pages of the tree with their links turned into the site's, and generated ones."""

from __future__ import annotations

import importlib.util
import os
import re
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from flowchart import draw

ROOT_PAGES = {
    "CHANGELOG.md": "changelog.md",
    "CONTRIBUTING.md": "contributing.md",
    "SECURITY.md": "security-policy.md",
    "README.md": "index.md",
}
"""Pages of the root and where they stand in the site; who follows a link to the README comes to the landing page."""
GENERATED = {
    "reference/plugins.md": "contracts",
    "reference/sdk.md": "sdk",
    "reference/conformance.md": "conformance",
    "reference/models.md": "models",
    "reference/quantizations.md": "quantizations",
    "reference/settings.md": "settings",
    "reference/routes.md": "routes",
    "reference/licences.md": "licences",
    "plugin-directory.md": "directory",
}
"""Pages that stand in no folder of the tree, and the module of `docs/reference` that writes each."""
FENCE = re.compile(r"^```.*?^```$", re.MULTILINE | re.DOTALL)
LINK = re.compile(r"(\]\()([^)\s]+)(\))")


def stage(root: Path, target: Path) -> None:
    """Fill `target` with every page and picture of the site.

    Raises:
        ValueError: A page links to a file that is no page of the site.
    """
    places = pages(root)
    for source, place in places.items():
        write(target / place, with_links(source, with_pictures(source, target / place), place, places, root))
    for place, module in GENERATED.items():
        write(target / place, load(root / f"docs/reference/{module}.py").page())
    for source in files(root / "docs"):
        (target / source.relative_to(root / "docs")).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(source, target / source.relative_to(root / "docs"))
    for name in ("extra.css", "worker.js"):
        shutil.copy(root / "docs/site" / name, target)


def pages(root: Path) -> dict[Path, str]:
    """Return the pages of the tree and where each stands in the site."""
    docs = root / "docs"
    found = {path: path.name for path in sorted(docs.glob("*.md"))}
    for folder in ("tutorials", "design"):
        found |= {path: f"{folder}/{tutorial(path)}" for path in sorted((docs / folder).glob("*.md"))}
    found |= {path: f"examples/{path.parent.name}.md" for path in sorted(docs.glob("examples/*/README.md"))}
    return found | {root / name: place for name, place in ROOT_PAGES.items() if name != "README.md"}


def files(docs: Path) -> list[Path]:
    """Return what pages show or offer besides pages: pictures, and files to take along."""
    own = {docs / "site", docs / "examples"}
    found = (path for path in sorted(docs.rglob("*")) if path.suffix in {".json", ".png", ".svg", ".yaml", ".yml"})
    return [path for path in found if not own & set(path.parents)]


def tutorial(path: Path) -> str:
    """Return the name in the site of a page of a folder, where a folder's page is its `index.md`."""
    return "index.md" if path.name == "README.md" else path.name


def write(path: Path, text: str) -> None:
    """Write a page, making its folder."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text, encoding="utf-8")


def with_pictures(source: Path, place: Path) -> str:
    """Return a page whose flowcharts are drawn, beside it; the built site loads no script that could."""
    text = source.read_text(encoding="utf-8")
    for number, match in enumerate(re.finditer(r"^```mermaid\n(.*?)^```$", text, re.MULTILINE | re.DOTALL), 1):
        name = f"{place.stem}-{number}.svg"
        write(place.parent / "pictures" / name, draw(match[1]))
        text = text.replace(match[0], f"![Which folder imports from which](pictures/{name})")
    return text


def with_links(source: Path, text: str, place: str, places: dict[Path, str], root: Path) -> str:
    """Return a page's text whose links to other pages of the tree lead to those of the site."""

    def lead(match: re.Match[str]) -> str:
        path, hash_, anchor = match[2].partition("#")
        if not path or re.match(r"[a-z]+:", path):
            return match[0]
        found = place_of((source.parent / path).resolve(), places, root)
        if found is None:
            raise ValueError(f"{source.relative_to(root)}: {match[2]}: no page of the site; name it without a link")
        return f"{match[1]}{os.path.relpath(found, Path(place).parent)}{hash_}{anchor}{match[3]}"

    return "".join(outside(text, lambda prose: LINK.sub(lead, prose)))


def place_of(path: Path, places: dict[Path, str], root: Path) -> str | None:
    """Return where a file of the tree stands in the site, if it does."""
    if path in places:
        return places[path]
    if path.is_dir() and path / "README.md" in places:
        return places[path / "README.md"]
    if path == root / "README.md":
        return ROOT_PAGES["README.md"]
    name = path.relative_to(root / "docs").as_posix() if path.is_relative_to(root / "docs") else ""
    is_drawn = re.fullmatch(r"(?:\w+/)?pictures/[\w-]+-\d+\.svg", name) is not None
    return name if name in GENERATED or is_drawn or path in files(root / "docs") else None


def outside(text: str, change: Callable[[str], str]) -> Iterator[str]:
    """Yield the text with everything outside of code blocks changed."""
    end = 0
    for block in FENCE.finditer(text):
        yield change(text[end : block.start()])
        yield block[0]
        end = block.end()
    yield change(text[end:])


def load(path: Path) -> Any:
    """Import a file that belongs to no package."""
    spec = importlib.util.spec_from_file_location(f"dovetail_docs_{path.stem}", path)
    if spec is None or spec.loader is None:
        raise ImportError(f"{path}: cannot be imported")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module
