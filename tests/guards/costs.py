"""What a request, a start and a step cost, in counts: `python tests/guards/costs.py [PART …]`.

Prints each figure beside the one on record (`costs.json`), and fails where one grew: by more than the tolerance of its
kind, which stands in `TOLERANCES`; memory and times are shown and not compared. `--write` records what is found, which
signs it. `make test` holds the parts `lines` and three of the `requests` against the record; `starts` and `launches`
take processes and Triton's compiler, and run here only.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))

import code_lines
import request_costs
import start_costs

ROOT = Path(__file__).parents[2]
RECORD = Path(__file__).with_name("costs.json")
Figures = dict[str, dict[str, float]]
TOLERANCES = {
    "calls": 0.08, "calls there": 0.08, "calls a token": 0.05, "changes there": 0.03, "changes back": 0.06,
    "changes a token": 0.06, "files": 0.035, "modules": 0.02,
}  # fmt: skip
"""How much of a figure may be added without a signature; all others are exact.

Calls: a helper or a check more is no change of shape. What is behind the submission, and files: a busy machine may cut
off the last calls of a request, or part two tokens that went as one. Modules: of all packages, whose versions differ.
"""
SHOWN_ONLY = ("MiB", "lines now", "us a token, median", "least", "most")
"""Memory and times, which are the machine's, and what has a limit in place of a record."""
SPARE_LINES = 1500
"""What a limit of lines is above the count when it is recorded, before it is rounded up to a thousand."""
LIMITED = ("product", "core", "dovetail", "dovetail_server")


def lines() -> Figures:
    """Return code lines by package; of some a limit on record."""
    return {name: {"lines now": num} for name, num in code_lines.by_package().items()}


def launches() -> Figures:
    """Return the kernels of a decode layer of gpt-oss by name, as it launches them on one and on two ranks."""
    code = (
        "import json, layer_launches\n"
        "print(json.dumps({f'{n} experts, {r} ranks': [row[1] for row in layer_launches.launches(n, r, 512)]\n"
        "                  for n, r in ((32, 1), (128, 1), (128, 2))}))"
    )
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    environment["PYTHONPATH"] = str(ROOT / "tests/benchmarks")
    done = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=True)
    found: dict[str, list[str]] = json.loads(done.stdout.splitlines()[-1])
    return {
        name: {"launches": len(names)} | {f"{at} {kernel}": 1 for at, kernel in enumerate(names, 1)}
        for name, names in found.items()
    }


PARTS: dict[str, Callable[[], Figures]] = {
    "lines": lines,
    "requests": lambda: request_costs.measure() | request_costs.engine_cost() | request_costs.schema_cost(),
    "times": request_costs.token_times,
    "starts": start_costs.measure,
    "launches": launches,
}


def recorded() -> dict[str, Figures]:
    """Return what is on record."""
    found: dict[str, Figures] = json.loads(RECORD.read_text("utf-8")) if RECORD.exists() else {}
    return found


def grown(old: Figures, new: Figures) -> list[str]:
    """Return a line for each figure that is above its record, or is not on record."""
    found = []
    for name, figures in new.items():
        for figure, now in figures.items():
            was = old.get(name, {}).get(figure)
            if figure in SHOWN_ONLY:
                continue
            if was is None or now > was * (1 + TOLERANCES.get(figure, 0.0)):
                found.append(f"{name}: {figure} {now:g}, on record {'nothing' if was is None else f'{was:g}'}")
    return found


def over(limits: Figures, counts: Figures) -> list[str]:
    """Return a line for each package that has more code lines than its limit."""
    return [
        f"{name}: {counts[name]['lines now']:g} code lines, at most {limits[name]['lines at most']:g}"
        for name in LIMITED
        if counts[name]["lines now"] > limits[name]["lines at most"]
    ]


def to_record(part: str, found: Figures) -> Figures:
    """Return what is recorded of a part: limits of lines, and all else as it was found."""
    if part == "lines":
        return {
            name: {"lines at most": -(-(found[name]["lines now"] + SPARE_LINES) // 1000) * 1000} for name in LIMITED
        }
    kept = {
        name: {figure: value for figure, value in figures.items() if figure not in SHOWN_ONLY}
        for name, figures in found.items()
    }
    return {name: figures for name, figures in kept.items() if figures}


def show(part: str, old: Figures, new: Figures) -> None:
    """Print one part."""
    print(f"\n{part:46} {'now':>10} {'record':>10}")
    for name, figures in new.items():
        own = old.get(name, {})
        rows = {**dict.fromkeys(figures), **dict.fromkeys(own)}
        for figure in rows:
            now, was = (f"{values[figure]:g}" if figure in values else "" for values in (figures, own))
            print(f"{f'{name}: {figure}':46} {now:>10} {was:>10}")


def main() -> int:
    """Measure, show, and compare or record; exit code 1 where something grew."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("parts", nargs="*", metavar="PART", help=f"of {', '.join(PARTS)}; all if not given")
    parser.add_argument("--write", action="store_true", help="record what is found")
    args = parser.parse_args()
    record, worse = recorded(), []
    for part in args.parts or PARTS:
        if part not in PARTS:
            parser.error(f"{part!r} is no part; there are {', '.join(PARTS)}")
        found, old = PARTS[part](), record.get(part, {})
        show(part, old, found)
        if not args.write:
            worse += over(old, found) if part == "lines" else grown(old, found)
        if kept := to_record(part, found):
            record[part] = kept
    if args.write:
        RECORD.write_text(json.dumps(record, indent=1) + "\n", "utf-8")
    if worse:
        print("\ngrown; --write records it:", *worse, sep="\n  ")
    return 1 if worse else 0


if __name__ == "__main__":
    sys.exit(main())
