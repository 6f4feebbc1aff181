"""Other projects' programs, installed from their registries as anyone would, in front of servers of the demo model."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

sys.path.append(str(Path(__file__).parent))  # last: other folders have helpers of these names, too

from programs import Worker, install


@pytest.fixture(scope="session")
def python_package(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Path]:
    """Installs packages into a folder of their own and returns it, for PYTHONPATH."""

    def get(*packages: str) -> Path:
        folder = tmp_path_factory.mktemp("packages")
        pip = [sys.executable, "-m", "pip", "install", "-q", "--disable-pip-version-check", "--no-deps"]
        pip += ["--no-compile"]  # what is imported is compiled then: a twentieth of SGLang
        install([*pip, "--only-binary", ":all:", "--target", str(folder), *packages], packages[0])
        return folder

    return get


@pytest.fixture(scope="session")
def workers() -> Iterator[list[Worker]]:
    """Two servers."""
    started = [Worker("--metrics-style sglang"), Worker("--metrics-style vllm")]
    try:
        yield [worker.wait() for worker in started]
    finally:
        for worker in started:
            worker.close()
