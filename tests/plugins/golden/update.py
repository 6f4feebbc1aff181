"""Write `public_api.txt` anew: `python tests/plugins/golden/update.py`.

Every public line belongs to a kind of plugin or to the SDK, whose version stands in the header. A line that is new or
changed is refused unless that `minor` (`plugins/kinds.json`) was raised, one that is gone unless that `api` was; what
the conformance kit loses needs a new version of Dovetail. Until a version is published nothing is refused, and every
change still shows in the file.
"""

from __future__ import annotations

import importlib.util
import re
import sys
from pathlib import Path
from types import ModuleType

HERE = Path(__file__).parent
ROOT = HERE.parents[2]
GOLDEN = HERE / "public_api.txt"
CHANGELOG = ROOT / "CHANGELOG.md"
SOURCE = ROOT / "docs/reference/public_api.py"
HEADER_LEN = 2
KIT_OWNER, ALL_OWNER, SDK_OWNER = "kit", "all kinds", "sdk"
Line = tuple[str, str]
"""Whose version a public name belongs to, and the name with its signature."""


def public_api() -> ModuleType:
    """Import `docs/reference/public_api.py`."""
    spec = importlib.util.spec_from_file_location("public_api", SOURCE)
    if spec is None or spec.loader is None:
        raise SystemExit(f"{SOURCE}: cannot be imported")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def owned(text: list[str]) -> set[Line]:
    """Return the lines behind the header, each with its owner."""
    found, owner = set(), ""
    for line in text[HEADER_LEN:]:
        if line.startswith("["):
            owner = line.strip("[]")
        else:
            found.add((owner, line))
    return found


def versions(text: list[str]) -> dict[str, tuple[str, str]]:
    """Return API and minor version of each kind and of the SDK; of the kit Dovetail's."""
    rows = re.findall(r"(\w+) \d+-(\d+)\.(\d+)", text[1])
    return {kind: (api, minor) for kind, api, minor in rows} | {KIT_OWNER: (text[0], "")}


def differences(golden: list[str], now: list[str]) -> tuple[set[Line], set[Line]]:
    """Return what vanished or changed, and what is new or changed."""
    old, new = owned(golden), owned(now)
    return old - new, new - old


def is_published(changelog: str) -> bool:
    """Return whether the changelog has a section with a date; one of an unpublished version has none."""
    return re.search(r"^## \S+ \(\d{4}-\d\d-\d\d\)$", changelog, re.MULTILINE) is not None


def refused(golden: list[str], now: list[str]) -> list[str]:
    """Return the differences that must not be: none before the first publication, as nobody relies on anything."""
    return unraised(golden, now) if is_published(CHANGELOG.read_text("utf-8")) else []


def unraised(golden: list[str], now: list[str]) -> list[str]:
    """Return a line for each difference whose version was not raised, with the number to raise."""
    gone, added = differences(golden, now)
    before, after = versions(golden), versions(now)
    left = {name_of(line) for _, line in owned(now)}
    found = []
    for owner, line in sorted(gone | added):
        is_lost = name_of(line) not in left
        for kind in [kind for kind in before if kind not in (KIT_OWNER, SDK_OWNER)] if owner == ALL_OWNER else [owner]:
            was, is_now = before.get(kind, ("", "")), after.get(kind, ("", ""))
            raised = was[0] != is_now[0] if is_lost or kind == KIT_OWNER else was != is_now
            if not raised and not (kind == KIT_OWNER and (owner, line) in added):
                number = "Dovetail's version" if kind == KIT_OWNER else f"{'api' if is_lost else 'minor'} of {kind}"
                found.append(f"{line}: raise {number}")
    return found


def name_of(line: str) -> str:
    """Return the name that a line is of."""
    return re.split(r"[(:=]| ->", line, maxsplit=1)[0].strip()


def main() -> int:
    """Write the file; exit code 1 where that needs a version raised."""
    now = public_api().lines()
    golden = GOLDEN.read_text("utf-8").splitlines() if GOLDEN.exists() else now[:HEADER_LEN]
    if found := refused(golden, now):
        print("refused; where `api` is raised an adapter is needed, too (plugins/kinds.json, plugins/adapters.py):")
        print("\n".join(f"  {line}" for line in found))
        return 1
    gone, added = differences(golden, now)
    GOLDEN.write_text("\n".join(now) + "\n", "utf-8")
    print(f"{GOLDEN.name}: {len(added)} lines added, {len(gone)} removed")
    return 0


if __name__ == "__main__":
    sys.exit(main())
