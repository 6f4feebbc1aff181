"""Who owns the folder `dovetail/`: Dovetail alone, or another distribution too, such as the index's own `dovetail`.

Installers write two distributions' files into one folder without a word, and remove both with either. The command
looks before anything of `dovetail` is imported, which could be the other one's code: here nothing of it may be, and
nothing that takes long to import, as every command begins so.
"""

from __future__ import annotations

from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path

PACKAGE = "dovetail"
COMMAND = b"dovetail_server.cli:main"
"""The console script by which Dovetail's own distribution is known, whatever it is called."""


def problem() -> str | None:
    """Return what is wrong with the folder that `import dovetail` would take, with the fix; None if nothing is."""
    spec = find_spec(PACKAGE)  # finds a top-level package without importing it
    folders = [Path(folder) for folder in (spec.submodule_search_locations if spec else None) or ()]
    others = sorted({name for folder in folders for name in _strangers(folder)})
    if others:
        names = " ".join(name.partition(" ")[0] for name in others)
        return (
            f"{folders[0]} belongs to another package too: {', '.join(others)}; "
            f"run `pip uninstall {names}`, then install {_own_name()} again"
        )
    if spec is None or spec.origin is None:
        return (
            f"the package {PACKAGE!r} has no __init__.py, as after another one was removed; install {_own_name()} again"
        )
    return None


def _strangers(folder: Path) -> Iterator[str]:
    """Yield `name version` of the distributions beside a folder that have files in it and are not Dovetail."""
    for info in folder.parent.glob("*.dist-info"):
        if f"\n{folder.name}/".encode() in b"\n" + _read(info / "RECORD") and not _is_ours(info):
            yield info.stem.replace("-", " ", 1)


def _is_ours(info: Path) -> bool:
    return COMMAND in _read(info / "entry_points.txt")


def _own_name() -> str:
    from importlib.metadata import distributions  # only here: it takes as long as everything else that a command does

    return next(
        (dist.name for dist in distributions() if COMMAND.decode() in (dist.read_text("entry_points.txt") or "")),
        "Dovetail",
    )


def _read(file: Path) -> bytes:
    """Return a metadata file, or b"" where it is absent or unreadable: a damaged install owns nothing we know of."""
    try:
        return file.read_bytes()
    except OSError:
        return b""
