"""Ask for every address of another host that a page names: `make links`. Exit code 1 if one does not answer well."""

from __future__ import annotations

import re
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import requests
from stage import pages

ROOT = Path(__file__).parents[2]
MINE = re.compile(r"https?://(localhost|127\.|\[::1\]|[^/]*\.?example\.(org|com))")
"""Addresses that stand for one's own server, or for nobody's."""


def addresses() -> dict[str, list[str]]:
    """Return the addresses that pages link to, and the pages."""
    found: dict[str, list[str]] = {}
    for path in (*pages(ROOT), ROOT / "README.md"):
        for url in re.findall(r"\]\((https?://[^)\s]+)\)", path.read_text(encoding="utf-8")):
            if not MINE.match(url):
                found.setdefault(url, []).append(str(path.relative_to(ROOT)))
    return found


def problem(url: str) -> str | None:
    """Return what is wrong with an address, or None."""
    try:
        with requests.get(
            url, timeout=20, stream=True, headers={"User-Agent": "Mozilla/5.0 (dovetail links)"}
        ) as reply:
            return None if reply.ok else f"status {reply.status_code}"
    except requests.RequestException as error:
        return type(error).__name__


def main() -> int:
    """Print one line for each address that does not answer."""
    found = addresses()
    with ThreadPoolExecutor(8) as pool:
        problems = dict(zip(found, pool.map(problem, found), strict=True))
    for url, what in problems.items():
        if what is not None:
            print(f"{url}: {what} ({', '.join(found[url])})")
    print(f"{len(found)} addresses, {sum(what is not None for what in problems.values())} do not answer")
    return int(any(problems.values()))


if __name__ == "__main__":
    sys.exit(main())
