"""Build, check and test what a release uploads: `make release`, or this file with flags.

1. The tree: the version stands in the changelog and in the tag, no fragment is left, nothing is uncommitted.
2. `dist/`: the source distribution, and the wheel made from it; what is in them, how large they are, their metadata.
3. The wheel in a new environment of every Python that is asked for and there: it lists its plugins, and serves.

Nothing is uploaded. Exit code 1 with one line for each thing that is wrong; a Python that is not there is said.
"""

from __future__ import annotations

import argparse
import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
import zipfile
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parents[2]
PYTHONS = ("3.11", "3.12", "3.13", "3.14")
MAX_WHEEL_BYTES = 25_000_000
PACKAGES = {
    "dovetail",
    "dovetail_backends",
    "dovetail_grammar",
    "dovetail_models",
    "dovetail_offline",
    "dovetail_parsers",
    "dovetail_server",
    "dovetail_testing",
}
SMOKE = Path(__file__).parent / "smoke.py"


def version() -> str:
    """Return Dovetail's version, from the one place where it stands."""
    text = (ROOT / "framework/dovetail/__init__.py").read_text(encoding="utf-8")
    found = re.search(r'^__version__ = "([^"]+)"$', text, re.MULTILINE)
    assert found is not None  # a test reads it too
    return found[1]


def tree_problems(tag: str | None) -> Iterator[str]:
    """Yield what keeps the tree from being released, under a tag if there is one."""
    if tag not in {None, f"v{version()}"}:
        yield f"the tag is {tag}, the version {version()}"
    changelog = (ROOT / "CHANGELOG.md").read_text(encoding="utf-8")
    if not re.search(rf"^## {re.escape(version())} \(\d{{4}}-\d\d-\d\d\)$", changelog, re.MULTILINE):
        yield f"CHANGELOG.md has no section of {version()}; run towncrier build, then edit it"
    left = [path.name for path in (ROOT / "docs/changelog.d").glob("*.md") if path.name != "README.md"]
    if left:
        yield f"docs/changelog.d: {len(left)} fragments are not in the changelog: {', '.join(sorted(left)[:3])}, …"
    status = subprocess.run(["git", "status", "--porcelain"], cwd=ROOT, capture_output=True, text=True, check=False)
    if status.returncode == 0 and status.stdout:
        yield "the tree has changes that are not committed"


def build(target: Path) -> tuple[Path, Path]:
    """Build into an empty folder; returns the wheel, which is made from the source distribution, and the latter."""
    shutil.rmtree(target, ignore_errors=True)
    command = [sys.executable, "-m", "build", "--no-isolation", "--outdir", str(target), str(ROOT)]
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
    (wheel,), (source,) = target.glob("*.whl"), target.glob("*.tar.gz")
    return wheel, source


def wheel_problems(wheel: Path) -> Iterator[str]:
    """Yield what a wheel holds that it should not, or lacks."""
    if wheel.stat().st_size > MAX_WHEEL_BYTES:
        yield f"{wheel.name}: {wheel.stat().st_size:,} bytes; at most {MAX_WHEEL_BYTES:,}"
    with zipfile.ZipFile(wheel) as archive:
        names = archive.namelist()
    tops = {name.partition("/")[0] for name in names}
    if strange := {top for top in tops if not top.endswith(".dist-info")} ^ PACKAGES:
        yield f"{wheel.name}: packages that should not be there or are missing: {', '.join(sorted(strange))}"
    for package in PACKAGES:
        if f"{package}/py.typed" not in names:
            yield f"{wheel.name}: {package}/py.typed is missing"
    for word in ("corpus", "demo_training", "__pycache__", "/test_", "conftest"):
        if found := [name for name in names if word in name]:
            yield f"{wheel.name}: {found[0]}: nothing with {word!r} belongs into a wheel"
    if not any(name.endswith(".dist-info/licenses/LICENSE") for name in names):
        yield f"{wheel.name}: the licence is missing"


def metadata_problems(*files: Path) -> Iterator[str]:
    """Yield what an index would not take."""
    command = [sys.executable, "-m", "twine", "check", "--strict", *map(str, files)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        yield f"twine: {(done.stdout + done.stderr).strip()}"


def interpreter(name: str) -> str | None:
    """Return the program of a Python version on this machine, or None."""
    if name == f"{sys.version_info.major}.{sys.version_info.minor}":
        return sys.executable
    found = shutil.which(f"python{name}")
    if found is None and (pyenv := shutil.which("pyenv")):
        root = subprocess.run([pyenv, "root"], capture_output=True, text=True, check=False).stdout.strip()
        paths = sorted(Path(root).glob(f"versions/{name}.*/bin/python"))
        found = str(paths[-1]) if paths else None
    return found


def try_wheel(wheel: Path, python: str) -> str | None:
    """Install a wheel into a new environment and use it; returns what went wrong, or None."""
    constraints = os.environ.get("CONSTRAINTS", str(ROOT / "constraints.txt"))
    with tempfile.TemporaryDirectory(prefix="dovetail-release-") as name:
        folder = Path(name)
        bin_dir = folder / "env/bin"
        pip = [str(bin_dir / "python"), "-m", "pip", "install", "--quiet", "--disable-pip-version-check"]
        steps = (
            [python, "-m", "venv", str(folder / "env")],
            [*pip, *(["-c", constraints] if constraints else []), str(wheel)],
            [str(bin_dir / "python"), str(SMOKE)],
        )
        clean = {key: value for key, value in os.environ.items() if key not in {"PYTHONPATH", "VIRTUAL_ENV"}}
        for step in steps:
            done = subprocess.run(step, cwd=folder, env=clean, capture_output=True, text=True, check=False)
            if done.returncode:
                return (
                    f"{' '.join(step[:4])}: exit code {done.returncode}: {(done.stdout + done.stderr).strip()[-2000:]}"
                )
        print(f"  {done.stdout.strip()}")
    return None


def main() -> int:
    """Do all of it."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--pythons", default=",".join(PYTHONS), help="versions to test the wheel on [%(default)s]")
    parser.add_argument("--draft", action="store_true", help="the tree need not be ready: no changelog yet, changes")
    parser.add_argument("--tag", help="the tag that is released")
    options = parser.parse_args()
    problems = [] if options.draft else list(tree_problems(options.tag))
    wheel, source = build(ROOT / "dist")
    print(f"{wheel.name}: {wheel.stat().st_size:,} bytes; {source.name}: {source.stat().st_size:,} bytes")
    problems += [*wheel_problems(wheel), *metadata_problems(wheel, source)]
    for name in filter(None, options.pythons.split(",")):
        python = interpreter(name)
        if python is None:
            print(f"Python {name}: not on this machine, not tested")
            continue
        start = time.monotonic()
        problem = try_wheel(wheel, python)
        print(f"Python {name}: {'failed' if problem else 'works'}, {time.monotonic() - start:.0f} s", flush=True)
        problems += [f"Python {name}: {problem}"] if problem else []
    for problem in problems:
        print(f"release: {problem}", file=sys.stderr)
    return int(bool(problems))


if __name__ == "__main__":
    sys.exit(main())
