"""The files that a hosting service reads: workflows, forms of issues, the text of a pull request."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import release
import yaml
from clean_env import ROOT

HOME = ROOT / ".github"
WORKFLOWS = sorted((HOME / "workflows").glob("*.yml"))
FORMS = sorted(path for path in (HOME / "ISSUE_TEMPLATE").glob("*.yml") if path.name != "config.yml")
TARGETS = re.findall(r"^([\w-]+):", (ROOT / "Makefile").read_text("utf-8"), re.MULTILINE)


def steps(path: Path) -> list[dict[str, Any]]:
    """Return the steps of all jobs of a workflow."""
    return [step for job in yaml.safe_load(path.read_text("utf-8"))["jobs"].values() for step in job["steps"]]


@pytest.mark.parametrize(
    ("schema", "files"),
    [
        ("github-workflows", WORKFLOWS),
        ("github-issue-forms", FORMS),
        ("github-issue-config", [HOME / "ISSUE_TEMPLATE/config.yml"]),
    ],
)
def test_files_are_what_the_service_reads(schema: str, files: list[Path]) -> None:
    """They hold to the published schemas."""
    pytest.importorskip("check_jsonschema", reason="check-jsonschema is not installed; run `make setup`")
    command = [sys.executable, "-m", "check_jsonschema", "--builtin-schema", f"vendor.{schema}", *map(str, files)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert files
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.parametrize("path", WORKFLOWS, ids=lambda path: path.name)
def test_actions_are_pinned_to_commits(path: Path) -> None:
    """A tag can be moved, a commit cannot; the tag stands beside it."""
    for line in path.read_text("utf-8").splitlines():
        if "uses:" in line:
            assert re.search(r"uses: [\w-]+/[\w-]+@[0-9a-f]{40} # v\d+\.\d+\.\d+$", line), line


@pytest.mark.parametrize("path", WORKFLOWS, ids=lambda path: path.name)
def test_workflows_have_few_rights_and_end(path: Path) -> None:
    """The token reads only, unless a job says more; every job has a limit; no checkout leaves its token behind."""
    found = yaml.safe_load(path.read_text("utf-8"))
    assert found["permissions"] == {"contents": "read"}
    assert all("timeout-minutes" in job for job in found["jobs"].values())
    for step in steps(path):
        if step.get("uses", "").startswith("actions/checkout@"):
            assert "persist-credentials" in step["with"]


@pytest.mark.parametrize("path", WORKFLOWS, ids=lambda path: path.name)
def test_commands_are_targets_and_take_no_text_of_others(path: Path) -> None:
    """Each `make` target is there, and what others may write (`${{ … }}`) comes through the environment."""
    commands = [step["run"] for step in steps(path) if "run" in step]
    assert commands
    for text in commands:
        assert "${{" not in text
        assert [name for name in re.findall(r"\bmake (?:-k )?([\w-]+)", text) if name not in TARGETS] == []


def test_every_test_is_in_one_suite() -> None:
    """The suites of the hosted CI are the folders of `tests/`, each once."""
    suites = yaml.safe_load((HOME / "workflows/ci.yml").read_text("utf-8"))["jobs"]["tests"]["strategy"]["matrix"][
        "suite"
    ]
    listed = [word for suite in suites for word in suite.split()]
    folders = {f"tests/{path.parent.name}" for path in (ROOT / "tests").glob("*/test_*.py")} - {"tests/demo_training"}
    assert sorted(listed) == sorted({*folders, "tests/test_*.py"})


def test_the_wheel_is_tested_on_every_python() -> None:
    """The hosted CI has those that `make release` knows."""
    jobs = yaml.safe_load((HOME / "workflows/ci.yml").read_text("utf-8"))["jobs"]
    assert tuple(jobs["wheel"]["strategy"]["matrix"]["python"]) == release.PYTHONS
