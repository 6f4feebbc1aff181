"""What servers of a whole file do to this process is gone before the next file."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
from clean_env import ROOT

pytestmark = pytest.mark.full

SERVED = """
import logging
import logging.config

import pytest
from dovetail_server.observe.logs import uvicorn_config

@pytest.fixture(scope="module")
def server():
    logging.config.dictConfig(uvicorn_config("error", lambda: True))

def test_it(server):
    assert logging.getLogger("uvicorn.error").filters and logging.getLogger("uvicorn.access").handlers
"""
NEXT = """
import logging

def test_it():
    for name in ("uvicorn.error", "uvicorn.access"):
        logger = logging.getLogger(name)
        assert (logger.filters, logger.handlers, logger.level) == ([], [], logging.NOTSET)
"""


def test_a_file_leaves_no_filters_behind(tmp_path: Path) -> None:
    """Uvicorn's configuration adds filters to its loggers, and takes none away: a hundred servers left five hundred."""
    (tmp_path / "conftest.py").write_text((ROOT / "tests/conftest.py").read_text("utf-8"), "utf-8")
    (tmp_path / "warm").symlink_to(ROOT / "tests/warm")
    (tmp_path / "test_a.py").write_text(SERVED, "utf-8")
    (tmp_path / "test_b.py").write_text(NEXT, "utf-8")
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-c", str(ROOT / "pyproject.toml")]
    command += ["--rootdir", str(tmp_path), "test_a.py", "test_b.py"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False, timeout=300)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "2 passed" in done.stdout
