"""The short loop of development: `make dev`, or `make dev ARGS=tests/parsers`.

Lints what changed and runs tests of a folder, or of the folders that belong to what changed. Of a folder, those files
are collected whose names have words of the files that changed, where there are any: to collect all of a large one takes
longer than to run them. What failed last time comes first. After eight seconds it stops and says how many it did not
come to: `make test ARGS=…` runs them all. Tests that install packages are left out.
"""

from __future__ import annotations

import subprocess
import sys
import time
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
BUDGET_S = 8.0
FOLDERS = {path.name for path in (ROOT / "tests").iterdir() if any(path.glob("test_*.py"))}
COMMON = {"dovetail", "test", "py", "init", "base"}
"""Words of names that say nothing of what a file is about."""


class Budget:
    """A plugin of pytest that runs the nearest tests first and stops in time."""

    def __init__(self, changed: list[str]) -> None:
        self.words = {word for path in changed for word in words(Path(path).stem)} - COMMON
        self.end = time.monotonic() + BUDGET_S
        self.num_run = self.num_found = 0

    @pytest.hookimpl(tryfirst=True)
    def pytest_collection_modifyitems(self, items: list[pytest.Item]) -> None:
        """Put tests that share words with what changed first; `--failed-first` comes behind and goes before."""
        items.sort(key=lambda item: -len(self.words & words(item.nodeid)))

    def pytest_collection_finish(self, session: pytest.Session) -> None:
        """Count what there is to run."""
        self.num_found = len(session.items)

    def pytest_runtest_logfinish(self) -> None:
        """Count what ran."""
        self.num_run += 1

    @pytest.hookimpl(trylast=True)
    def pytest_runtest_teardown(self, item: pytest.Item, nextitem: pytest.Item | None) -> None:
        """Stop behind the test that is running when the time is over."""
        if nextitem is not None and time.monotonic() > self.end:
            item.session.shouldstop = f"{BUDGET_S:.0f} s are over"


def words(name: str) -> set[str]:
    """Return the words of a path or of a test's name."""
    text = "".join(char if char.isalnum() else " " for char in name.lower())
    return set(text.split())


def changed_files() -> list[str]:
    """Return what differs from `main`, committed or not, and what is new."""
    base = ["git", "merge-base", "HEAD", "main"]
    found = subprocess.run(base, cwd=ROOT, capture_output=True, text=True, check=False).stdout.strip() or "HEAD"
    names: list[str] = []
    for command in (["git", "diff", "--name-only", found], ["git", "ls-files", "--others", "--exclude-standard"]):
        names += subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True).stdout.splitlines()
    return [name for name in names if (ROOT / name).is_file()]


def folders_of(changed: list[str]) -> list[str]:
    """Return the folders of tests that belong to files: of a path's parts, the last that such a folder is named by."""
    found = ([part for part in Path(name).parts[:-1] if part in FOLDERS] for name in changed)
    found_server = ["server" for name in changed if name.startswith("server/")]
    last = [parts[-1] for parts in found if parts]
    return [f"tests/{name}" for name in sorted({*last, *(found_server if not last else [])})]


def nearest(folders: list[str], wanted: set[str]) -> list[str]:
    """Return what to collect: of each folder the files whose names share words with `wanted`, or else all of it."""
    found = []
    for folder in folders:
        names = sorted(path.relative_to(ROOT / folder).as_posix() for path in (ROOT / folder).rglob("test_*.py"))
        found += [f"{folder}/{name}" for name in names if wanted & words(Path(name).stem)] or [folder]
    return found


def main() -> int:
    """Lint, then test."""
    changed = changed_files()
    given = sys.argv[1:]
    folders = given or folders_of(changed)
    if not folders:
        print(f"dev: nothing differs from main that a folder of tests is named by; make dev ARGS=tests/{min(FOLDERS)}")
        return 2
    python = [name for name in changed if name.endswith(".py")]
    for command in (["check", "--quiet"], ["format", "--check", "--quiet"]):
        if (
            python
            and subprocess.run([sys.executable, "-m", "ruff", *command, *python], cwd=ROOT, check=False).returncode
        ):
            return 1
    budget = Budget(changed)
    flags = ["--quiet", "--no-header", "--exitfirst", "--failed-first", "-m", "not install and not registry"]
    code = pytest.main([*flags, *nearest(folders, budget.words)], plugins=[budget])
    left = budget.num_found - budget.num_run
    if code == pytest.ExitCode.INTERRUPTED and left > 0:
        rest = f"all of them: make test ARGS='{' '.join(folders)}'"
        print(f"dev: {budget.num_run} of the {budget.num_found} nearest tests in {BUDGET_S:.0f} s, none failed; {rest}")
        return 0
    return int(code)


if __name__ == "__main__":
    sys.exit(main())
