"""The helpers beside this file are importable, as `tests/server` has it; and one environment for all tests here."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

sys.path.append(str(Path(__file__).parent))  # last: other folders have a conftest too

from clean_env import EXAMPLES, ROOT, SMALLEST, CleanEnv, build_wheel, copy_of
from warm_starts import WarmStarts


@pytest.fixture(scope="session")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Dovetail's wheel."""
    return build_wheel(ROOT, tmp_path_factory.mktemp("wheel"))


@pytest.fixture(scope="session")
def clean(tmp_path_factory: pytest.TempPathFactory, wheel: Path, warm: WarmStarts) -> CleanEnv:
    """An environment with the built wheel and the smallest example, installed by pip from its folder."""
    env = CleanEnv(tmp_path_factory.mktemp("clean"))
    env.install(wheel, copy_of(SMALLEST, env))
    warm.add(env.bin / "python")
    return env


@pytest.fixture(scope="session")
def with_examples(clean: CleanEnv) -> CleanEnv:
    """The same environment with every example."""
    clean.install(*(copy_of(path, clean) for path in EXAMPLES if path != SMALLEST))
    return clean
