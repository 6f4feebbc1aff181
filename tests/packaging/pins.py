"""The pins in `constraints.txt`: `make pins` writes them, `make pins ARGS=--check` resolves them for every machine.

uv solves them for all supported Pythons and systems at once, and against the public index alone: neither the
configuration of pip and uv nor their environment variables count, so that no pin depends on one machine's own wheels.
Both need metadata only, a few megabytes. Versions that still fit stay; `ARGS=--upgrade` takes the newest.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import tempfile
from concurrent.futures import ThreadPoolExecutor
from itertools import product
from pathlib import Path

from release import PYTHONS

ROOT = Path(__file__).parents[2]
PINS = ROOT / "constraints.txt"
SYSTEMS = {
    "Linux x86-64": "x86_64-manylinux_2_31",
    "Linux arm64": "aarch64-manylinux_2_31",
    "macOS arm64": "aarch64-apple-darwin",
}
"""The systems of docs/support.md, as uv calls them."""
MACOS = "14.0"
"""The oldest macOS with wheels of torch."""
TORCH = "torch==2.13.0"
"""Exact in any case, so that pip prefers a CPU build of this version where an index offers one."""
HEADER = """\
# Pins for every supported Python and system, solved against the public package index: `make pins` writes this file.
# `make serve CONSTRAINTS=` ignores it.
"""


def environment() -> dict[str, str]:
    """Return this environment without what configures pip or uv; of uv's only its cache is left."""
    kept = {key: value for key, value in os.environ.items() if not key.startswith(("PIP_", "UV_"))}
    cache = {key: value for key, value in os.environ.items() if key == "UV_CACHE_DIR"}
    return {**kept, **cache, "PIP_CONFIG_FILE": os.devnull, "MACOSX_DEPLOYMENT_TARGET": MACOS}


def compile_pins(*arguments: str, stdin: str = "") -> subprocess.CompletedProcess[str]:
    """Have uv resolve requirements, without any configuration."""
    command = [sys.executable, "-m", "uv", "--no-config", "pip", "compile", "--quiet"]
    command += arguments
    return subprocess.run(
        command, cwd=ROOT, env=environment(), input=stdin, capture_output=True, text=True, check=False
    )


def write(*flags: str) -> str | None:
    """Write the pins; returns why they cannot be solved, or None."""
    with tempfile.TemporaryDirectory(prefix="dovetail-pins-") as folder:
        torch, found = Path(folder, "torch.txt"), Path(folder, "constraints.txt")
        torch.write_text(f"{TORCH}\n", "utf-8")
        found.write_text(PINS.read_text("utf-8"), "utf-8")  # uv keeps what it finds there, as far as it fits
        for_all = ["--universal", "--python-version", PYTHONS[0], "--all-extras", "--no-annotate", "--no-header"]
        done = compile_pins("pyproject.toml", *for_all, "-c", str(torch), "-o", str(found), *flags)
        if done.returncode:
            return done.stderr.strip()
        PINS.write_text(HEADER + found.read_text("utf-8"), "utf-8")
    return None


def why_not(machine: tuple[str, str]) -> str | None:
    """Return why what contributors install cannot be had on one Python and system with the pins, or None."""
    python, system = machine
    of_machine = ["--python-version", python, "--python-platform", SYSTEMS[system], "--only-binary", ":all:"]
    done = compile_pins("pyproject.toml", "--extra", "dev", "-c", str(PINS), *of_machine)
    return f"Python {python}, {system}: {done.stderr.strip()}" if done.returncode else None


def check() -> list[str]:
    """Resolve the pins for every Python and system; returns a text for each that they do not fit."""
    with ThreadPoolExecutor(4) as pool:
        return [problem for problem in pool.map(why_not, product(PYTHONS, SYSTEMS)) if problem]


def silence() -> str | None:
    """Return why the index does not answer a question that it can answer, or None."""
    done = compile_pins("-", "--no-cache", stdin="pip\n")
    return " ".join(done.stderr.split()) if done.returncode else None


def main() -> int:
    """Write or check; exit code 1 where there is no solution, 0 with a line where nothing could be asked."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--check", action="store_true", help="only resolve them, for every Python and system")
    parser.add_argument("--upgrade", action="store_true", help="take the newest versions")
    options = parser.parse_args()
    if reason := silence():
        print(f"pins: SKIPPED, the package index does not answer: {reason}")
        return 0 if options.check else 1
    problem = None if options.check else write(*(["--upgrade"] if options.upgrade else []))
    problems = [problem] if problem else check()
    for text in problems:
        print(f"pins: {text}", file=sys.stderr)
    if not problems:
        print(f"pins: {PINS.name} fits Python {', '.join(PYTHONS)} on {', '.join(SYSTEMS)}")
    return int(bool(problems))


if __name__ == "__main__":
    sys.exit(main())
