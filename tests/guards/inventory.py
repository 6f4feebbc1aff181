"""Everything that a user or a program outside may rely on by name: `python tests/guards/inventory.py`.

Prints flags, settings with their environment variables, routes, request fields with bounds, metrics, log lines with
fields, exit codes, plugins and public names. `--write` (as `make golden` does) records them in `inventory/`.

A line that goes or changes takes something from somebody, so it has to be signed: a fragment of `docs/changelog.d` that
this branch adds or edits names it in backticks. `--write` records no unsigned change; `--check [BASE]` finds one
since the commit BASE, or since this branch left `main`. A line that is new needs no signature.
"""

from __future__ import annotations

import argparse
import re
import subprocess
import sys
from collections.abc import Callable, Iterable
from difflib import unified_diff
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))

import listed_names
import listed_options
import listed_routes

ROOT = Path(__file__).parents[2]
GOLDEN = Path(__file__).parent / "inventory"
CHANGELOG = ROOT / "docs/changelog.d"
PAGES: dict[str, Callable[[], Iterable[str]]] = {
    "options.txt": listed_options.page,
    "routes.txt": listed_routes.page,
    "names.txt": listed_names.page,
}
HOW = (
    "The inventory differs from tests/guards/inventory. Name each line that goes or changes in backticks in a fragment "
    "of docs/changelog.d (its last word before the colon), then run `make golden`."
)


def differences(old: str, new: str) -> str:
    """Return a diff of two inventories, without lines around what differs."""
    found = unified_diff(old.splitlines(), new.splitlines(), "on record", "now", n=0, lineterm="")
    return "\n".join(line for line in found if not line.startswith("@@"))


def gone(old: str, new: str) -> list[str]:
    """Return the lines that vanished or changed."""
    left = set(new.splitlines())
    return [line for line in old.splitlines() if line and not line.startswith("#") and line not in left]


def name_of(line: str) -> str:
    """Return what a signature has to name: the last word of what stands before the colon."""
    return line.partition(": ")[0].split()[-1]


def unsigned(lines: Iterable[str], fragments: str) -> list[str]:
    """Return the lines whose name, or the last part of its path, stands nowhere in the fragments."""
    quoted = re.findall(r"`([^`]+)`", fragments.replace("``", ""))  # two quote text that has some of its own
    named = {word for text in quoted for word in (text, *text.split())}
    return [line for line in lines if not {name_of(line), re.split(r"[.>]", name_of(line))[-1]} & named]


def git(*args: str) -> str:
    """Return what git prints, empty where it fails."""
    done = subprocess.run(["git", *args], cwd=ROOT, capture_output=True, text=True, check=False)
    return done.stdout if done.returncode == 0 else ""


def base_of(given: str) -> str:
    """Return the commit that a branch is held against: the one given, or where it left `main`."""
    return given or git("merge-base", "HEAD", "origin/main").strip() or git("merge-base", "HEAD", "main").strip()


def fragments_since(base: str) -> str:
    """Return the texts of the fragments that are new or edited since a commit."""
    folder = CHANGELOG.relative_to(ROOT).as_posix()
    names = git("diff", "--name-only", base or "HEAD", "--", folder).split()
    names += git("ls-files", "--others", "--exclude-standard", "--", folder).split()
    return "\n".join((ROOT / name).read_text("utf-8") for name in names if (ROOT / name).is_file())


def refused(pages: dict[str, str], base: str) -> list[str]:
    """Return the lines of a commit's inventory that went or changed without a signature."""
    fragments, found = fragments_since(base), []
    for name, text in pages.items():
        path = (GOLDEN / name).relative_to(ROOT).as_posix()
        old = git("show", f"{base}:{path}") or git("show", f"HEAD:{path}")  # the commit may be older than the record
        found += unsigned(gone(old, text), fragments)
    return found


def main() -> int:
    """Print, write or check; exit code 1 where a change is not signed, or the record is not what is."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--write", action="store_true", help="record it")
    parser.add_argument("--check", nargs="?", const="", metavar="BASE", help="find what changed without a signature")
    args = parser.parse_args()
    pages = {name: "".join(f"{line}\n" for line in page()) for name, page in PAGES.items()}
    if args.check is None and not args.write:
        print("\n".join(pages.values()), end="")
        return 0
    if found := refused(pages, base_of(args.check or "")):
        print("Not signed; a fragment of docs/changelog.d that is new or edited has to name each in backticks:")
        print("\n".join(f"  `{name_of(line)}`  {line}" for line in found))
        return 1
    for name, text in pages.items():
        path = GOLDEN / name
        old = path.read_text("utf-8") if path.exists() else ""
        if text != old:
            print(f"{name}:\n{differences(old, text)}")
            if not args.write:
                return 1
            path.write_text(text, "utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
