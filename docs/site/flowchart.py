"""Draw the `flowchart TD` of a page as SVG, row by row: the built site loads no script that could.

Read are `a --> b`, `subgraph name [title]` and a box alone, which says what group it belongs to. A box stands one row
below the lowest of those that point to it; in its row it stands under the middle of them.
"""

from __future__ import annotations

import re
from collections import defaultdict
from html import escape

WIDTH, HEIGHT, GAP, ROW = 104, 30, 22, 74
COLOURS = ("#dfe9fb", "#fbe9d3", "#e2f2e2")
STYLE = "font: 13px system-ui, sans-serif; fill: #1d2430"


def read(text: str) -> tuple[list[tuple[str, str]], dict[str, str]]:
    """Return the arrows, and the title of the group that each box was first named in."""
    arrows: list[tuple[str, str]] = []
    groups: dict[str, str] = {}
    title = ""
    for line in map(str.strip, text.splitlines()):
        if found := re.fullmatch(r"subgraph (\w+) \[(.+)\]", line):
            title = found[2]
        elif line == "end":
            title = ""
        elif found := re.fullmatch(r"(\w+) --> (\w+)", line):
            arrows.append((found[1], found[2]))
            for name in found.groups():
                groups.setdefault(name, title)
        elif re.fullmatch(r"\w+", line):
            groups.setdefault(line, title)
        elif line and not line.startswith("flowchart"):
            raise ValueError(f"flowchart: {line!r} is not understood")
    return arrows, groups


def rows_of(arrows: list[tuple[str, str]], groups: dict[str, str]) -> list[list[str]]:
    """Return the boxes of each row, from left to right."""
    depth = dict.fromkeys(groups, 0)
    for _ in groups:
        for a, b in arrows:
            depth[b] = max(depth[b], depth[a] + 1)
    if max(depth.values()) >= len(groups):
        raise ValueError("flowchart: the arrows go in a circle")
    rows: list[list[str]] = [[] for _ in range(max(depth.values()) + 1)]
    for name in groups:
        rows[depth[name]].append(name)
    above = defaultdict(list)
    for a, b in arrows:
        above[b].append(a)
    middle: dict[str, float] = {}
    for row in rows:
        row.sort(key=lambda name: sum(middle[a] for a in above[name]) / len(above[name]) if above[name] else 0)
        middle |= {name: (i + 0.5) / len(row) for i, name in enumerate(row)}
    return rows


def draw(text: str) -> str:
    """Return the picture of a flowchart."""
    arrows, groups = read(text)
    rows = rows_of(arrows, groups)
    width = max(len(row) for row in rows) * (WIDTH + GAP) + 2 * GAP
    place = {
        name: (width * (i + 1) / (len(row) + 1), GAP + HEIGHT / 2 + y * ROW)
        for y, row in enumerate(rows)
        for i, name in enumerate(row)
    }
    titles = list(dict.fromkeys(groups.values()))
    colour = {title: COLOURS[i % len(COLOURS)] for i, title in enumerate(titles)}
    height = GAP * 2 + len(rows) * ROW
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" role="img" width="{width}">',
        "<title>Which folder imports from which</title>",
        '<defs><marker id="tip" viewBox="0 0 8 8" refX="8" refY="4" markerWidth="7" markerHeight="7" orient="auto">'
        '<path d="M0 0 8 4 0 8z" fill="#68738a"/></marker></defs>',
        f'<rect width="{width}" height="{height}" rx="8" fill="#ffffff"/>',
        *(edge(place[a], place[b]) for a, b in arrows),
        *(box(name, place[name], colour[groups[name]]) for name in groups),
        *(
            f'<rect x="{GAP}" y="{height - 20 - 18 * i}" width="12" height="12" rx="2" fill="{colour[title]}"/>'
            f'<text x="{GAP + 18}" y="{height - 10 - 18 * i}" style="{STYLE}">{escape(title)}</text>'
            for i, title in enumerate(titles)
            if title
        ),
        "</svg>",
    ]
    return "\n".join(parts) + "\n"


def edge(start: tuple[float, float], end: tuple[float, float]) -> str:
    """Return an arrow, bent towards the vertical at both ends."""
    (x, y), (to_x, to_y) = (start[0], start[1] + HEIGHT / 2), (end[0], end[1] - HEIGHT / 2)
    bend = (to_y - y) / 2
    curve = f"M{x:.0f} {y:.0f}C{x:.0f} {y + bend:.0f} {to_x:.0f} {to_y - bend:.0f} {to_x:.0f} {to_y:.0f}"
    return f'<path d="{curve}" fill="none" stroke="#68738a" marker-end="url(#tip)"/>'


def box(name: str, place: tuple[float, float], colour: str) -> str:
    """Return a box with its name."""
    x, y = place
    return (
        f'<rect x="{x - WIDTH / 2:.0f}" y="{y - HEIGHT / 2:.0f}" width="{WIDTH}" height="{HEIGHT}" rx="5" '
        f'fill="{colour}" stroke="#68738a"/>'
        f'<text x="{x:.0f}" y="{y + 4.5:.0f}" text-anchor="middle" style="{STYLE}">{escape(name)}</text>'
    )
