"""What reading a body takes of the system's memory: Python's own figures leave out what tokenizers take."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

BENCH = Path(__file__).parents[1] / "benchmarks" / "body_memory.py"
MOST = 14
"""Times the body: the worst is 11.4 to 12.3 of the same code, by when two threads meet."""
MIB = "1"
"""The body."""


@pytest.mark.full
def test_a_body_of_a_megabyte_takes_a_few_times_its_size() -> None:
    """Texts, conversations, ids and items of each route that reads prompts."""
    ran = subprocess.run(
        [sys.executable, str(BENCH), "--mib", MIB, "--most", str(MOST)],
        capture_output=True,
        text=True,
        timeout=280,
        check=False,
    )
    assert ran.returncode == 0, ran.stdout + ran.stderr
    rows = [line for line in ran.stdout.splitlines() if line.endswith("done")]
    assert len(rows) >= 13, ran.stdout
