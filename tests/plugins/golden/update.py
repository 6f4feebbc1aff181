"""Write `public_api.txt` anew: `python tests/plugins/golden/update.py [--unreleased]`.

Additions are written. A line that would vanish or change is refused, unless the version of the API (`plugins/kinds.py`)
or of Dovetail was raised; `--unreleased` says that no release holds what changes.
"""

from __future__ import annotations

import argparse
import importlib.util
import sys
from pathlib import Path
from types import ModuleType

HERE = Path(__file__).parent
GOLDEN = HERE / "public_api.txt"
SOURCE = HERE.parents[2] / "docs/reference/public_api.py"
HEADER_LEN = 2


def public_api() -> ModuleType:
    """Import `docs/reference/public_api.py`."""
    spec = importlib.util.spec_from_file_location("public_api", SOURCE)
    if spec is None or spec.loader is None:
        raise SystemExit(f"{SOURCE}: cannot be imported")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def differences(golden: list[str], now: list[str]) -> tuple[list[str], list[str], bool]:
    """Return what vanished, what is new, and whether a version was raised."""
    old, new = set(golden[HEADER_LEN:]), set(now[HEADER_LEN:])
    return sorted(old - new), sorted(new - old), golden[:HEADER_LEN] != now[:HEADER_LEN]


def main() -> int:
    """Write the file; exit code 1 where that needs a version bump."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--unreleased", action="store_true", help="what changes is in no release yet")
    args = parser.parse_args()
    now = public_api().lines()
    golden = GOLDEN.read_text("utf-8").splitlines() if GOLDEN.exists() else now[:HEADER_LEN]
    gone, added, bumped = differences(golden, now)
    if gone and not bumped and not args.unreleased:
        print("refused; raise the API version in kinds.py and write an adapter, for these changed or vanished:")
        print("\n".join(f"  {line}" for line in gone))
        return 1
    GOLDEN.write_text("\n".join(now) + "\n", "utf-8")
    print(f"{GOLDEN.name}: {len(added)} lines added, {len(gone)} removed")
    return 0


if __name__ == "__main__":
    sys.exit(main())
