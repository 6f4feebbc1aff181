"""The page `plugin-directory.md`: packages with plugins, from their metadata; nothing of them is imported.

Listed are the distributions that are installed where the site is built, and the example packages of the tree.
"""

from __future__ import annotations

import re
import tomllib
from collections.abc import Iterator
from importlib.metadata import Distribution, distributions
from pathlib import Path
from typing import NamedTuple

from dovetail.base.distribution import DISTRIBUTION
from dovetail.plugins import KINDS

EXAMPLES = Path(__file__).parents[1] / "examples"
GROUPS = {kind.entry_point_group: kind.name for kind in KINDS.values()}
HEAD = """\
# Plugin directory

Packages with plugins, as their metadata describes them: what is installed where this page was built, and the
[examples](examples/dovetail-acme-parser.md) that come with the source. `dovetail plugin list` shows the same of your
own environment. To be listed, a package needs an entry point in a `dovetail.` group, a `description` and a README whose
first paragraph says what it does; install it beside Dovetail and run `make docs`.

A plugin runs with the server's rights. Being listed is no review: see [Trust](plugins.md#trust).
"""


class Package(NamedTuple):
    """One package with plugins. `plugins` maps a kind to its names; `page` is its README, if the site has it."""

    name: str
    version: str
    summary: str
    about: str
    licence: str
    links: tuple[tuple[str, str], ...]
    plugins: dict[str, list[str]]
    page: str | None


def page() -> str:
    """Return the whole page."""
    found = {package.name: package for package in (*examples(), *installed())}
    parts = [HEAD]
    for package in sorted(found.values(), key=lambda package: (package.name != DISTRIBUTION, package.name)):
        parts += entry(package)
    return "\n".join(parts) + "\n"


def installed() -> Iterator[Package]:
    """Yield the distributions that are installed and name a group of Dovetail."""
    for dist in distributions():
        plugins = by_kind((point.group, point.name) for point in dist.entry_points)
        if plugins:
            yield of_metadata(dist, plugins)


def of_metadata(dist: Distribution, plugins: dict[str, list[str]]) -> Package:
    """Describe an installed distribution."""
    meta = dist.metadata
    urls = (line.partition(",") for line in meta.get_all("Project-URL") or ())
    links = tuple((label.strip(), url.strip()) for label, _, url in urls if url.strip().startswith("https://"))
    licence = meta.get("License-Expression") or meta.get("License") or ""
    about = "" if dist.name == DISTRIBUTION else first_paragraph(meta.get_payload())
    return Package(dist.name, dist.version, meta.get("Summary") or "", about, licence, links, plugins, None)


def examples() -> Iterator[Package]:
    """Yield the example packages of the tree."""
    for path in sorted(EXAMPLES.glob("*/pyproject.toml")):
        project = tomllib.loads(path.read_text("utf-8"))["project"]
        points = project.get("entry-points", {})
        plugins = by_kind((group, name) for group, names in points.items() for name in names)
        about = first_paragraph((path.parent / "README.md").read_text("utf-8"))
        place = f"examples/{path.parent.name}.md"
        summary = project.get("description", "")
        yield Package(
            project["name"], project["version"], summary, about, project.get("license", ""), (), plugins, place
        )


def by_kind(points: Iterator[tuple[str, str]]) -> dict[str, list[str]]:
    """Return the names of plugins by kind."""
    found: dict[str, list[str]] = {}
    for group, name in points:
        if group in GROUPS:
            found.setdefault(GROUPS[group], []).append(name)
    return {kind: sorted(found[kind]) for kind in KINDS if kind in found}


def first_paragraph(readme: object) -> str:
    """Return what a README says first, as plain text of at most 400 characters."""
    for block in re.split(r"\n\s*\n", str(readme or "")):
        text = re.sub(r"!\[[^\]]*\]\([^)]*\)", "", " ".join(block.split()))  # pictures, then links
        text = re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", text).strip()
        if text and not text.startswith(("#", "<", "```", "|", "[!", "- ", "* ", "=")):
            return text if len(text) <= 400 else text[:400].rpartition(" ")[0] + " …"
    return ""


def entry(package: Package) -> Iterator[str]:
    """Yield the part of one package; what others wrote is shown as text."""
    yield f"\n## {package.name}\n"
    facts = [f"Version {plain(package.version)}", *([plain(package.licence)] if package.licence else [])]
    facts += [f"[{plain(label)}]({url})" for label, url in package.links]
    facts += [f"[README]({package.page})"] if package.page else []
    yield f"{plain(package.summary)}.\n" if package.summary else ""
    if package.about and package.about.rstrip(".") != package.summary.rstrip("."):
        yield f"{plain(package.about)}{'' if package.about.endswith('…') else '.'}\n"
    yield f"{', '.join(facts)}.\n"
    yield "| kind | names |"
    yield "|---|---|"
    for kind, names in package.plugins.items():
        yield f"| `{kind}` | {', '.join(f'`{name}`' for name in names)} |"


def plain(text: str) -> str:
    """Return a text without what Markdown or HTML would read in it."""
    return re.sub(r"([\\`*_<>{}\[\]|#])", r"\\\1", " ".join(text.split()).rstrip("."))
