"""A test that no signal ends stops neither the run nor the others, and is named."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
from clean_env import ROOT

STUCK = "ctypes.PyDLL(None).sleep(600)"  # keeps the interpreter's lock
PLACES = {
    "call": f"def test_it():\n    {STUCK}",
    "teardown": f"@pytest.fixture\ndef late():\n    yield\n    {STUCK}\n\ndef test_it(late):\n    assert False",
    "end": f"import atexit\natexit.register(lambda: {STUCK})\n\ndef test_it():\n    pass",
}


@pytest.mark.parametrize("place", PLACES)
def test_what_is_stuck_is_shown_and_ended(tmp_path: Path, place: str) -> None:
    """In a test, after one that failed, and after the last."""
    (tmp_path / "conftest.py").write_text((ROOT / "tests/conftest.py").read_text("utf-8"), "utf-8")
    stuck = tmp_path / "test_stuck.py"
    stuck.write_text(f"import ctypes\nimport pytest\n\n{PLACES[place]}\n", "utf-8")
    options = ["-c", str(ROOT / "pyproject.toml"), "--rootdir", str(tmp_path), "-o", "faulthandler_timeout=2"]
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", *options, str(stuck)]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False, timeout=120)
    assert done.returncode == 1
    assert "Timeout (0:00:02)!" in done.stderr
    assert f'File "{stuck}", line' in done.stderr
