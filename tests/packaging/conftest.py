"""The helpers beside this file are importable, as `tests/server` has it; and one environment for all tests here."""

from __future__ import annotations

import shutil
import sys
from pathlib import Path

import pytest

sys.path.append(str(Path(__file__).parent))  # last: other folders have a conftest too

from clean_env import EXAMPLES, ROOT, CleanEnv, build_wheel
from warm_starts import WarmStarts


@pytest.fixture(scope="session")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Dovetail's wheel."""
    return build_wheel(ROOT, tmp_path_factory.mktemp("wheel"))


@pytest.fixture(scope="session")
def clean(tmp_path_factory: pytest.TempPathFactory, wheel: Path, warm: WarmStarts) -> CleanEnv:
    """An environment with the built wheel and every example, installed by pip from their folders."""
    folder = tmp_path_factory.mktemp("clean")
    env = CleanEnv(folder)
    copies = [Path(shutil.copytree(path, folder / "src" / path.name)) for path in EXAMPLES]
    env.install(wheel, *copies)
    warm.add(env.bin / "python")
    return env
