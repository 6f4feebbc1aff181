"""The compiler's worker starts early where nothing was compiled yet, and never outlives who might need it."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from dovetail_backends.kernels.ahead import spare as module
from dovetail_backends.kernels.ahead.spare import Spare, cache_folder, records


@pytest.fixture
def made(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Spare]:
    """A spare on a machine that has an empty cache; its worker only waits."""
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path / "cache"))
    monkeypatch.setattr(module, "start_worker", waiting)
    spare = Spare()
    yield spare
    spare.close()


def waiting() -> subprocess.Popen[bytes]:
    """A process that ends when its input does."""
    program = "import sys; sys.stdin.read()"
    return subprocess.Popen([sys.executable, "-c", program], stdin=subprocess.PIPE, stdout=subprocess.PIPE)


def test_it_is_started_once_and_taken_once(made: Spare) -> None:
    """Who compiles first has it."""
    made.start()
    made.start()
    worker = made.take()
    assert worker is not None
    assert worker.poll() is None
    assert made.take() is None
    worker.communicate()


def test_one_that_nobody_took_is_ended(made: Spare) -> None:
    """Also when that is said twice."""
    made.start()
    worker = made._worker
    assert worker is not None
    made.close()
    made.close()
    assert worker.poll() is not None


def test_where_something_was_compiled_it_waits_to_be_needed(made: Spare) -> None:
    """Figures of attention backends lie there, too, and say nothing of kernels."""
    records().mkdir(parents=True)
    (records() / f"attention-{32 * 'a'}.json").touch()
    made.start()
    worker = made.take()
    assert worker is not None
    worker.communicate()
    (records() / f"{32 * 'a'}.json").touch()
    made.start()
    assert made.take() is None


def test_a_worker_that_cannot_be_started_is_no_error(made: Spare, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whoever needs one finds out."""

    def fail() -> subprocess.Popen[bytes]:
        raise OSError("no more processes")

    monkeypatch.setattr(module, "start_worker", fail)
    made.start()
    assert made.take() is None


@pytest.mark.parametrize("variables", [{}, {"TRITON_HOME": "/somewhere"}, {"TRITON_CACHE_DIR": "/elsewhere"}], ids=str)
def test_it_looks_where_triton_keeps_kernels(variables: dict[str, str], monkeypatch: pytest.MonkeyPatch) -> None:
    """By the same variables."""
    for name in ("TRITON_HOME", "TRITON_CACHE_DIR"):
        monkeypatch.delenv(name, raising=False)
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    program = "import triton; print(triton.knobs.cache.dir)"
    done = subprocess.run([sys.executable, "-c", program], env=os.environ, capture_output=True, text=True, check=True)
    assert Path(done.stdout.strip()) == cache_folder()


def test_the_real_worker_ends_with_its_input() -> None:
    """Of an engine that dies before it compiles nothing is left."""
    worker = module.start_worker()
    worker.communicate(timeout=120)
    assert worker.returncode == 0
