"""The short loop of development: `make dev`, or `make dev ARGS=tests/parsers`.

Lints what changed and runs tests of a folder, or of the folders that belong to what changed. Of a folder, those files
are collected that import what changed or have words of its name in theirs, where there are any: to collect all of a
large one takes longer than to run them. What failed last time comes first. Eight seconds after the first test began it
stops and says how many it did not come to: `make test ARGS=…` runs them all. Tests that install packages are left out.

`dev.py --full-of BASE` prints the folders whose `full` tests `.ci/run` runs: those that belong to what differs from a
commit, with the guards where the product does, and `tests` where the framework does or the commit is unknown.
"""

from __future__ import annotations

import math
import re
import subprocess
import sys
import time
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
BUDGET_S = 8.0
FOLDERS = {path.name for path in (ROOT / "tests").iterdir() if any(path.glob("test_*.py"))} - {"demo_training"}
ELSEWHERE = {
    "framework/dovetail": ["engine", "test_*.py"],
    "framework/dovetail/client": ["engine"],
    "framework/dovetail_offline": ["engine", "test_*.py"],
    "framework/dovetail/contracts": ["testing"],
    "plugins/backends/dovetail-cpu-int8": ["packaging"],
    "plugins/backends/dovetail_backends/gguf": ["models", "text"],
    "framework/dovetail/messages": ["engine"],
    "framework/dovetail/processing": ["server"],
    "framework/dovetail/runtime/attention": ["backends"],
    "framework/dovetail/runtime/checkpoint": ["models"],
    "framework/dovetail/text/parsing": ["text", "parsers"],
    "plugins/backends/dovetail_backends/kv_events": ["plugins"],
    "plugins/backends/dovetail_backends/otel": ["plugins"],
    "plugins/backends/dovetail_backends/quantization": ["models"],
    "server/dovetail_server": ["server"],
    "server/dovetail_server/batches": ["storage"],
    "server/dovetail_server/cli/plugin": ["plugins"],
    "server/dovetail_server/compat": ["server"],
    "server/dovetail_server/supervision": ["engine", "test_*.py"],
    "docs/examples": ["packaging"],
    "tests": ["packaging"],
    "tests/benchmarks": ["docs"],
    "tests/demo_training": ["demo_training"],
    ".ci": ["packaging"],
    ".github": ["packaging"],
    "": ["packaging", "docs"],
}
"""Tests of a folder's files that are not those of the last part of its path that a folder of tests is named by."""
GUARDS = "tests/guards"
"""What holds whichever part of the product changed."""
COMMON = {"dovetail", "test", "py", "init", "base"}
"""Words of names that say nothing of what a file is about."""


class Budget:
    """A plugin of pytest that runs the nearest tests first and stops in time."""

    def __init__(self, changed: list[str]) -> None:
        self.words = {word for path in changed for word in words(Path(path).stem)} - COMMON
        self.end = math.inf
        self.num_run = self.num_found = 0

    @pytest.hookimpl(tryfirst=True)
    def pytest_collection_modifyitems(self, items: list[pytest.Item]) -> None:
        """Put tests that share words with what changed first; `--failed-first` comes behind and goes before."""
        items.sort(key=lambda item: -len(self.words & words(item.nodeid)))

    def pytest_collection_finish(self, session: pytest.Session) -> None:
        """Count what there is to run."""
        self.num_found = len(session.items)

    def pytest_runtest_logstart(self) -> None:
        """Begin to count the time: what was imported before is no test."""
        if self.num_run == 0:
            self.end = time.monotonic() + BUDGET_S

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


def changed_files(base: str = "") -> list[str]:
    """Return what differs from a commit, or from where this branch left `main`, committed or not, and what is new."""
    if not base:
        command = ["git", "merge-base", "HEAD", "main"]
        base = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False).stdout.strip() or "HEAD"
    names: list[str] = []
    for command in (["git", "diff", "--name-only", base], ["git", "ls-files", "--others", "--exclude-standard"]):
        names += subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True).stdout.splitlines()
    return names


def folders_of(changed: list[str]) -> list[str]:
    """Return the tests that belong to files, as paths: by `ELSEWHERE`, or by the names of the folders they lie in."""
    found: set[str] = set()
    for name in changed:
        for parent in Path(name).parents:
            path = "" if parent == Path() else parent.as_posix()
            if path in ELSEWHERE or parent.name in FOLDERS:
                found.update(ELSEWHERE.get(path, [parent.name]))
                break
    return sorted(f"tests/{name}" for name in found)


def files_of(folder: str) -> list[str]:
    """Return the files of tests of a folder, or of a pattern."""
    found = (ROOT / folder).rglob("test_*.py") if (ROOT / folder).is_dir() else ROOT.glob(folder)
    return sorted(path.as_posix().removeprefix(f"{ROOT}/") for path in found)


def module_of(name: str) -> str:
    """Return the name that a file of the product is imported by, empty for others."""
    path = Path(name)
    parts = [part for part in path.with_suffix("").parts if part != "__init__"]
    first = next((n for n, part in enumerate(parts) if part.startswith("dovetail")), None)
    return "" if first is None or path.suffix != ".py" else ".".join(parts[first:])


def imports(text: str, module: str) -> bool:
    """Whether a file's text imports a module."""
    package, _, name = module.rpartition(".")
    return bool(re.search(rf"\b{re.escape(module)}\b|from {re.escape(package)} import [^\n]*\b{name}\b", text))


def nearest(folders: list[str], changed: list[str], wanted: set[str]) -> list[str]:
    """Return what to collect: of each folder the files that import what changed or are named like it, or all of it."""
    modules = [module for module in map(module_of, changed) if module.count(".")]
    found = []
    for folder in folders:
        names = files_of(folder)
        near = [name for name in names if wanted & words(Path(name).stem)]
        texts = {name: (ROOT / name).read_text("utf-8") for name in names if modules}
        near += [name for name, text in texts.items() if any(imports(text, module) for module in modules)]
        found += sorted(set(near)) or names
    return found


def full_of(base: str) -> list[str]:
    """Return the folders whose `full` tests belong to what differs from a commit; an unknown commit's are all."""
    try:
        changed = changed_files(base) if base else ["framework/"]
    except subprocess.CalledProcessError:
        return ["tests"]
    if any(name.startswith("framework/") for name in changed):
        return ["tests"]
    guards = [GUARDS] if any(name.startswith(("server/", "plugins/")) for name in changed) else []
    return sorted({*folders_of(changed), *guards})


def main() -> int:
    """Lint, then test."""
    given = sys.argv[1:]
    if given[:1] == ["--full-of"]:
        print(*(folder.replace("test_*.py", "") for folder in full_of("".join(given[1:]))))
        return 0
    changed = changed_files()
    folders = given or folders_of(changed)
    if not folders:
        print(f"dev: nothing differs from main; make dev ARGS=tests/{min(FOLDERS)}")
        return 2
    python = [name for name in changed if name.endswith(".py") and (ROOT / name).is_file()]
    for command in (["check", "--quiet"], ["format", "--check", "--quiet"]):
        if (
            python
            and subprocess.run([sys.executable, "-m", "ruff", *command, *python], cwd=ROOT, check=False).returncode
        ):
            return 1
    budget = Budget(changed)
    flags = ["--quiet", "--no-header", "--exitfirst", "--failed-first", "-m", "not install and not registry"]
    code = pytest.main([*flags, *nearest(folders, changed, budget.words)], plugins=[budget])
    left = budget.num_found - budget.num_run
    if code == pytest.ExitCode.INTERRUPTED and left > 0:
        rest = f"all of them: make test ARGS='{' '.join(folders)}'"
        print(f"dev: {budget.num_run} of the {budget.num_found} nearest tests in {BUDGET_S:.0f} s, none failed; {rest}")
        return 0
    return int(code)


if __name__ == "__main__":
    sys.exit(main())
