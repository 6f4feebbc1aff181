"""Grids of tests are thinned out so that every value is still tried, and whole where that is asked for."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest
from clean_env import ROOT

pytestmark = pytest.mark.full

GRID = """
import pytest

@pytest.mark.sampled
@pytest.mark.parametrize("a", "xyz")
@pytest.mark.parametrize(("b", "c"), [(number, -number) for number in range(5)])
def test_grid(a, b, c):
    assert (a, b) != ("x", 0) and b != 4

@pytest.mark.parametrize("a", "xyz")
@pytest.mark.parametrize("b", range(5))
def test_whole(a, b):
    pass

@pytest.mark.sampled("a", "b")
@pytest.mark.parametrize("a", "xyz")
@pytest.mark.parametrize("b", [True, False])
@pytest.mark.parametrize("c", range(6))
def test_together(a, b, c):
    pass

@pytest.mark.first(2)
@pytest.mark.parametrize("d", range(6))
def test_some(d):
    pass

@pytest.mark.full
def test_long():
    pass

@pytest.mark.parametrize("size", [1, pytest.param(2, marks=pytest.mark.full)])
def test_sizes(size):
    pass
"""


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "conftest.py").write_text((ROOT / "tests/conftest.py").read_text("utf-8"), "utf-8")
    (tmp_path / "warm").symlink_to(ROOT / "tests/warm")
    (tmp_path / "test_grids.py").write_text(GRID, "utf-8")
    return tmp_path


def output(folder: Path, *arguments: str) -> list[str]:
    """The lines that pytest prints."""
    command = [sys.executable, "-m", "pytest", "-v", "-p", "no:cacheprovider", "-c", str(ROOT / "pyproject.toml")]
    command += ["--rootdir", str(folder), *arguments]
    return subprocess.run(command, cwd=folder, capture_output=True, text=True, check=False).stdout.splitlines()


def collected(folder: Path, *arguments: str, full: bool = False) -> tuple[list[str], str]:
    """What of the grids runs, and what pytest says in the end."""
    lines = output(folder, *(["--full"] if full else []), *(arguments or ["test_grids.py"]))
    return [line.split()[0].partition("::")[2] for line in lines if line.startswith("test_grids.py::")], lines[-1]


def test_every_value_and_every_combination_that_is_asked_for_is_tried(folder: Path) -> None:
    """As many cases as the longest parameter has values, the others take turns; what is marked full is left out."""
    ran, last = collected(folder)
    grid = [re.fullmatch(r"test_grid\[(\d)-[-\d]+-(.)\]", name) for name in ran if "test_grid" in name]
    assert [found[1] for found in grid if found] == list("01234")
    assert {found[2] for found in grid if found} == set("xyz")
    assert sum("test_whole" in name for name in ran) == 15
    together = [re.fullmatch(r"test_together\[(\d)-(\w+)-(.)\]", name) for name in ran if "together" in name]
    assert len(together) == 6
    assert len({(found[2], found[3]) for found in together if found}) == 6
    assert {found[1] for found in together if found} == set("012345")
    assert [name for name in ran if "long" in name or "sizes" in name] == ["test_sizes[1]"]
    assert [name for name in ran if "some" in name] == ["test_some[0]", "test_some[1]"]
    assert "2 failed" in last
    assert "46 deselected" in last


def test_all_runs_where_it_is_asked_for(folder: Path) -> None:
    """`--full` leaves nothing out, and a name finds a case whether the sample has it or not."""
    ran, last = collected(folder, full=True)
    assert len(ran) == 75
    assert "deselected" not in last
    assert len(collected(folder, "test_grids.py", "-m", "full", full=True)[0]) == 46
    names = ["test_grid[4--4-x]", "test_grid[0-0-z]", "test_long"]
    assert collected(folder, *(f"test_grids.py::{name}" for name in names))[0] == names


def test_a_run_of_a_given_time_says_what_it_did_not_reach(folder: Path) -> None:
    """What would begin later is skipped, with one reason for all of it."""
    lines = output(folder, "test_grids.py::test_whole", "--within", "-1")
    assert "15 skipped" in lines[-1]
    assert "error" not in lines[-1]
    assert any("not reached within -1 s" in line for line in lines)
    assert "15 passed" in collected(folder, "test_grids.py::test_whole", "--within", "600")[1]


@pytest.mark.parametrize(("commit", "first"), [("a", "test_others.py"), ("d", "test_grids.py")])
def test_a_run_begins_at_a_file_that_its_commit_chooses(folder: Path, commit: str, first: str) -> None:
    """Each file is the first of some commits; the others follow."""
    (folder / "test_others.py").write_text("def test_other(): pass", "utf-8")
    lines = output(folder, "test_grids.py::test_whole", "test_others.py", "--begin-at", commit)
    ran = [line.partition("::")[0] for line in lines if "::" in line]
    assert ran[0] == first
    assert len(ran) == 16
