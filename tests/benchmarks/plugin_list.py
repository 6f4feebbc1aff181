"""Measure `dovetail plugin list` with many distributions installed: wall time of the whole command.

    python tests/benchmarks/plugin_list.py [--distributions 400] [--plugins 40] [--runs 20]

Target: under 200 ms with 400 distributions.
"""

from __future__ import annotations

import argparse
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from dovetail_testing.site import FakeSite

TARGET_MS = 200


def fill(site: FakeSite, distributions: int, plugins: int) -> None:
    """Install `distributions`, of which `plugins` register a parser and the rest a console script."""
    for i in range(distributions):
        if i < plugins:
            groups = {"dovetail.reasoning_parsers.v1": {f"made-{i}": f"made_{i}:Parser"}}
            site.add(f"made-{i}", "1.0", groups, manifest={"reasoning_parser": {f"made-{i}": {"aliases": [f"m{i}"]}}})
        else:
            site.add(f"other-{i}", "1.0", {"console_scripts": {f"other-{i}": f"other_{i}:main"}})


def time_runs(site: FakeSite, runs: int) -> list[float]:
    """Return the wall time of each run in ms, process start included, after one warm-up run."""
    command = [sys.executable, "-c", "from dovetail_server.cli import main; raise SystemExit(main())", "plugin", "list"]
    env = {**os.environ, "PYTHONPATH": str(site.root)}
    times = []
    for _ in range(runs + 1):
        start = time.perf_counter()
        done = subprocess.run(command, env=env, capture_output=True, text=True, check=True)
        times.append((time.perf_counter() - start) * 1000)
        if "made-0" not in done.stdout:
            raise SystemExit("the made-up plugins were not listed")
    return times[1:]


def main() -> int:
    """Print the figures; exit code 1 where the median misses the target."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--distributions", type=int, default=400)
    parser.add_argument("--plugins", type=int, default=40, help="how many of them register a plugin")
    parser.add_argument("--runs", type=int, default=20)
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        site = FakeSite(Path(folder))
        fill(site, args.distributions, args.plugins)
        times = time_runs(site, args.runs)
    median = statistics.median(times)
    print(
        f"dovetail plugin list, {args.distributions} distributions, {args.plugins} with plugins: "
        f"median {median:.0f} ms, min {min(times):.0f}, max {max(times):.0f} of {args.runs} runs; target {TARGET_MS} ms"
    )
    return int(median > TARGET_MS)


if __name__ == "__main__":
    raise SystemExit(main())
