"""How `info`, `plan` and `serve` judge model folders: a table of exit codes and last lines, and where they differ.

    python tests/benchmarks/odd_folders.py FOLDER_OF_FOLDERS [NAME …] [--at-once 2] [--json out.jsonl]

A server that gets ready is ended and counts as 0. A last line that names a phase of the start marks its row: something
was started before, and all that follows from the folder is to be refused by the checks.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import signal
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple

DOVETAIL = Path(sys.executable).with_name("dovetail")
READY = "ready to roll"
PHASE = re.compile(r"in the start's phase '([^']*)'")
LIMIT_S = 120.0


class Told(NamedTuple):
    """How a command ended: exit code (-1: it did not), its last line of standard error, and seconds."""

    code: int
    last: str
    seconds: float


def asked(command: str, folder: Path) -> Told:
    """Run `dovetail info` or `dovetail plan`."""
    began = time.monotonic()
    try:
        done = subprocess.run(
            [DOVETAIL, command, folder], capture_output=True, text=True, timeout=LIMIT_S, stdin=subprocess.DEVNULL
        )
    except subprocess.TimeoutExpired:
        return Told(-1, "", LIMIT_S)
    lines = done.stderr.strip().splitlines()
    return Told(done.returncode, lines[-1] if lines else "", time.monotonic() - began)


def served(folder: Path) -> Told:
    """Run `dovetail serve` until it is ready or ends."""
    began, last = time.monotonic(), ""
    with subprocess.Popen(
        [DOVETAIL, "serve", folder, "--device", "cpu", "--port", "0"],
        stderr=subprocess.PIPE, stdout=subprocess.DEVNULL, stdin=subprocess.DEVNULL, text=True, start_new_session=True,
    ) as process:  # fmt: skip
        assert process.stderr is not None
        for line in process.stderr:
            last = line.strip() or last
            if READY in line or time.monotonic() - began > LIMIT_S:
                process.send_signal(signal.SIGTERM)
                process.stderr.read()
                process.wait()
                return Told(0 if READY in line else -1, last, time.monotonic() - began)
    return Told(process.returncode, last, time.monotonic() - began)


def judged(folder: Path) -> dict[str, Any]:
    """Ask all three commands about a folder."""
    told = {command: asked(command, folder) for command in ("info", "plan")}
    told["serve"] = served(folder)
    phase = PHASE.search(told["serve"].last) if told["serve"].code else None
    return {"name": folder.name, "phase": phase and phase[1]} | {k: v._asdict() for k, v in told.items()}


def plain(line: str) -> str:
    """Return what a last line says, without who says it."""
    return line.partition("error: ")[2] or line


def main() -> int:
    """Print the table; exit code 1 where commands differ."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("root", type=Path)
    parser.add_argument("names", nargs="*")
    parser.add_argument("--at-once", type=int, default=2)
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    names = args.names or sorted(path.name for path in args.root.iterdir())
    os.environ.setdefault("COLUMNS", "200")
    codes = words = late = 0
    with ThreadPoolExecutor(args.at_once) as pool:
        for row in pool.map(judged, [args.root / name for name in names]):
            if args.json is not None:
                with args.json.open("a") as file:
                    file.write(json.dumps(row) + "\n")
            told = {command: row[command] for command in ("info", "plan", "serve")}
            found = [told[command]["code"] for command in told]
            differs = len(set(found)) > 1
            said = {plain(each["last"]) for each in told.values() if each["code"] == 2}
            codes, words, late = codes + differs, words + (len(said) > 1), late + (row["phase"] is not None)
            phase = f"PHASE {row['phase']}" if row["phase"] else ""
            marks = f"{'CODES ' * differs}{'WORDS ' * (len(said) > 1)}{phase}"
            print(f"{row['name']:<18} {found} {told['serve']['seconds']:5.1f} s {marks}", flush=True)
            for line in sorted(said) or [told["serve"]["last"]]:
                print(f"    {line}", flush=True)
    print(f"{len(names)} folders: exit codes differ in {codes}, words in {words}; failed in a phase: {late}")
    return int(codes > 0)


if __name__ == "__main__":
    sys.exit(main())
