"""The page in the browser: static files, served as they lie here. `routes/playground.py` serves them."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from functools import cache
from importlib.resources import files
from importlib.resources.abc import Traversable

MEDIA_TYPES = {
    "html": "text/html",
    "js": "text/javascript",
    "css": "text/css",
    "svg": "image/svg+xml",
    "woff2": "font/woff2",
}
"""Of what is served; files with other endings (licences, notes) stay where they are."""
INDEX = "index.html"


@dataclass(frozen=True, slots=True)
class Asset:
    """A file of the page."""

    data: bytes
    media_type: str
    tag: str

    @classmethod
    def of(cls, file: Traversable, media_type: str) -> Asset:
        """Read a file; its entity tag is of its content."""
        data = file.read_bytes()
        return cls(data, media_type, f'"{hashlib.sha256(data).hexdigest()[:32]}"')


@cache
def assets() -> dict[str, Asset]:
    """Return every file of the page by its path below `static`, `/` between folders."""
    return dict(_read(files(__name__) / "static", ""))


def _read(folder: Traversable, above: str) -> list[tuple[str, Asset]]:
    found: list[tuple[str, Asset]] = []
    for entry in folder.iterdir():
        path = above + entry.name
        if entry.is_dir():
            found += _read(entry, path + "/")
        elif (media_type := MEDIA_TYPES.get(entry.name.rpartition(".")[2])) is not None:
            found.append((path, Asset.of(entry, media_type)))
    return found


def paths() -> frozenset[str]:
    """Return the paths under which the page and its files are served."""
    return frozenset({"/playground", "/playground/"} | {f"/playground/{name}" for name in assets() if name != INDEX})
