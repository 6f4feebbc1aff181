"""A test that no signal ends stops neither the run nor the others, and is named."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
from clean_env import ROOT

pytestmark = pytest.mark.full

STUCK = "ctypes.PyDLL(None).sleep(600)"  # keeps the interpreter's lock
PLACES = {
    "call": f"def test_it():\n    {STUCK}",
    "teardown": f"@pytest.fixture\ndef late():\n    yield\n    {STUCK}\n\ndef test_it(late):\n    assert False",
    "end": f"import atexit\natexit.register(lambda: {STUCK})\n\ndef test_it():\n    pass",
}


def run_pytest(folder: Path, file: Path, options: list[str]) -> subprocess.CompletedProcess[str]:
    """pytest's outcome for one file, from outside: it may end without a word."""
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", *options, str(file)]
    return subprocess.run(command, cwd=folder, capture_output=True, text=True, check=False, timeout=120)


@pytest.mark.first(2)
@pytest.mark.parametrize("place", PLACES)
def test_what_is_stuck_is_shown_and_ended(tmp_path: Path, place: str) -> None:
    """In a test, after one that failed, and after the last."""
    (tmp_path / "conftest.py").write_text((ROOT / "tests/conftest.py").read_text("utf-8"), "utf-8")
    (tmp_path / "warm").symlink_to(ROOT / "tests/warm")
    stuck = tmp_path / "test_stuck.py"
    stuck.write_text(f"import ctypes\nimport pytest\n\n{PLACES[place]}\n", "utf-8")
    options = ["-c", str(ROOT / "pyproject.toml"), "--rootdir", str(tmp_path), "-o", "faulthandler_timeout=2"]
    done = run_pytest(tmp_path, stuck, options)
    assert done.returncode == 1
    assert "Timeout (0:00:02.2" in done.stderr
    assert f'File "{stuck}", line' in done.stderr


@pytest.mark.parametrize(("given", "status"), [(302, 1), (600, 0)])
def test_a_test_with_more_time_is_not_stuck_within_it(tmp_path: Path, given: int, status: int) -> None:
    """What a test's mark adds to the default of 300 s is added to the limit; 2 s more are too few for one of 5 s."""
    (tmp_path / "conftest.py").write_text((ROOT / "tests/conftest.py").read_text("utf-8"), "utf-8")
    (tmp_path / "warm").symlink_to(ROOT / "tests/warm")
    slow = tmp_path / "test_slow.py"
    mark, sleep = f"@pytest.mark.timeout({given})", "ctypes.PyDLL(None).sleep(5)"
    slow.write_text(f"import ctypes\nimport pytest\n\n{mark}\ndef test_it():\n    {sleep}\n", "utf-8")
    options = ["-c", str(ROOT / "pyproject.toml"), "--rootdir", str(tmp_path), "-o", "faulthandler_timeout=1"]
    done = run_pytest(tmp_path, slow, options)
    assert done.returncode == status, done.stderr
    assert ("Timeout (0:00:03.3" in done.stderr) == bool(status)


def test_each_test_has_all_of_its_time(tmp_path: Path) -> None:
    """One timer is kept for several tests while it leaves the next one as much as it may take."""
    (tmp_path / "conftest.py").write_text((ROOT / "tests/conftest.py").read_text("utf-8"), "utf-8")
    (tmp_path / "warm").symlink_to(ROOT / "tests/warm")
    slow = tmp_path / "test_slow.py"
    tests = "".join(f"def test_{n}():\n    ctypes.PyDLL(None).sleep(1)\n\n" for n in range(3))
    slow.write_text(f"import ctypes\n\n{tests}", "utf-8")
    options = ["-c", str(ROOT / "pyproject.toml"), "--rootdir", str(tmp_path), "-o", "faulthandler_timeout=2.5"]
    done = run_pytest(tmp_path, slow, options)
    assert done.returncode == 0, done.stderr
