"""SGLang's frontend language (`gen`, `select`, `fork`), as its package brings it, on `/generate`."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from programs import Worker

pytestmark = [pytest.mark.registry, pytest.mark.timeout(480)]
PACKAGES = (
    "sglang==0.5.23", "orjson==3.13.0", "psutil==7.2.2", "pybase64==1.5.1", "ipython==9.18.1", "traitlets==5.16.1",
)  # fmt: skip
"""The frontend, without what SGLang's own engine needs."""


def test_a_program_of_sglangs_runs_unchanged(python_package: Callable[..., Path], workers: list[Worker]) -> None:
    """It generates, chooses the likeliest text, forks, keeps to an expression, and streams."""
    folder = python_package(*PACKAGES)
    program = Path(__file__).parent / "sglang_program.py"
    paths = os.pathsep.join([str(folder), os.environ.get("PYTHONPATH", "")])
    done = subprocess.run(
        [sys.executable, str(program), workers[0].base],
        capture_output=True, text=True, timeout=200, check=False, env={**os.environ, "PYTHONPATH": paths},
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-3000:]
    found = json.loads(done.stdout.splitlines()[-1])
    assert "Paris" in found["gen"]
    assert found["stream"] == found["gen"]
    assert found["select"] == " Paris"
    assert "Rome" in found["fork"]
    assert "Tokyo" in found["fork"]
    assert re.fullmatch("[0-9]{3}", found["regex"])
    assert "Paris" in found["batch"][0]
    assert "Rome" in found["batch"][1]
