"""Install the lowest versions that Dovetail says it takes, and use it: `make lowest`.

The lower bounds of `pyproject.toml` are promises. uv installs exactly them into an environment of its own, and the
short suite runs there. uv's variables hold, such as `UV_FIND_LINKS` or `UV_INDEX` for a CPU build of torch.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import tempfile
import tomllib
from pathlib import Path

from packaging.requirements import Requirement
from pins import PINS, ROOT, silence

SUITE = Path(__file__).parent / "short_suite.py"


def torch(*, is_pinned: bool) -> str:
    """Return the requirement of torch as `constraints.txt` has it, or of the lowest version."""
    if is_pinned:
        return next(line for line in PINS.read_text("utf-8").splitlines() if line.startswith("torch=="))
    project = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))["project"]
    [wanted] = (line for line in map(Requirement, project["dependencies"]) if line.name == "torch")
    [lowest] = (part.version for part in wanted.specifier if part.operator == ">=")
    return f"torch=={lowest}"


def main() -> int:
    """Install and run; the exit code of what fails, 0 with a line where nothing could be asked."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--pinned-torch", action="store_true", help="torch as constraints.txt has it, the rest lowest")
    options = parser.parse_args()
    if reason := silence():
        print(f"lowest: SKIPPED, the package index does not answer: {reason}")
        return 0
    uv = [sys.executable, "-m", "uv"]
    with tempfile.TemporaryDirectory(prefix="dovetail-lowest-") as name:
        python = Path(name, "env/bin/python")
        install = [*uv, "pip", "install", "--quiet", "--python", str(python)]
        for command in (
            [*uv, "venv", "--quiet", "--python", sys.executable, str(Path(name, "env"))],
            # First, as uv leaves what fits: asked for the lowest it passes over a CPU build (`+cpu`).
            [*install, torch(is_pinned=options.pinned_torch)],
            [*install, "--resolution", "lowest-direct", str(ROOT)],
            [*uv, "pip", "list", "--python", str(python)],
            [str(python), str(SUITE)],
        ):
            done = subprocess.run(command, cwd=name, check=False)
            if done.returncode:
                return done.returncode
    return 0


if __name__ == "__main__":
    sys.exit(main())
