"""`make serve` in a fresh clone, with a small project in Dovetail's place and indexes that are folders."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import zipfile
from collections.abc import Iterator
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Thread

import downloads
import pytest
from clean_env import ROOT

PROJECT = """
[build-system]
requires = []
build-backend = "backend"
backend-path = ["."]

[project]
name = "dovetail-llm"
version = "1"
"""
BACKEND = """
import zipfile

def build_editable(folder, config_settings=None, metadata_directory=None):
    with zipfile.ZipFile(f"{folder}/dovetail_llm-1-py3-none-any.whl", "w") as wheel:
        info = "dovetail_llm-1.dist-info"
        wheel.writestr("small.py", "def main(): import sys; print('served', *sys.argv[1:])")
        about = ["Metadata-Version: 2.1", "Name: dovetail-llm", "Version: 1", "Requires-Dist: torch"]
        wheel.writestr(f"{info}/METADATA", "\\n".join(about))
        wheel.writestr(f"{info}/WHEEL", "Wheel-Version: 1.0\\nRoot-Is-Purelib: true\\nTag: py3-none-any")
        wheel.writestr(f"{info}/entry_points.txt", "[console_scripts]\\ndovetail = small:main")
        wheel.writestr(f"{info}/RECORD", "")
    return "dovetail_llm-1-py3-none-any.whl"
"""


def put(index: Path, version: str, num_bytes: int) -> None:
    """Lay a wheel of torch into a folder, as a package index has it."""
    folder = index / "torch"
    folder.mkdir(parents=True)
    name, info = f"torch-{version}-py3-none-any.whl", f"torch-{version}.dist-info"
    with zipfile.ZipFile(folder / name, "w") as wheel:
        wheel.writestr("torch.py", "#" * num_bytes)
        wheel.writestr(f"{info}/METADATA", f"Metadata-Version: 2.1\nName: torch\nVersion: {version}")
        wheel.writestr(f"{info}/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any")
        wheel.writestr(f"{info}/RECORD", "")
    (folder / "index.html").write_text(f'<a href="{name}">{name}</a>')


@pytest.fixture
def indexes(tmp_path: Path) -> Iterator[str]:
    """The address of a folder with two indexes: `plain`, and `cpu` with another build of the same torch."""
    put(tmp_path / "served/plain", "2.13.0", 3_000_000)
    put(tmp_path / "served/cpu", "2.13.0+cpu", 1_000_000)
    handler = partial(SimpleHTTPRequestHandler, directory=str(tmp_path / "served"))
    server = ThreadingHTTPServer(("127.0.0.1", 0), handler)
    Thread(target=server.serve_forever, daemon=True).start()
    yield f"http://127.0.0.1:{server.server_port}"
    server.shutdown()
    server.server_close()


@pytest.mark.full
@pytest.mark.install
def test_torch_comes_from_the_index_that_is_named(tmp_path: Path, indexes: str) -> None:
    """Its size is said before, the command after; an environment with another torch is not passed off as this one."""
    clone = tmp_path / "clone"
    (clone / "tests/packaging").mkdir(parents=True)
    shutil.copy(ROOT / "Makefile", clone)
    shutil.copy(ROOT / "tests/packaging/downloads.py", clone / "tests/packaging")
    for name, text in (("pyproject.toml", PROJECT), ("backend.py", BACKEND), ("constraints.txt", "torch==2.13.0\n")):
        (clone / name).write_text(text)
    env = {key: value for key, value in os.environ.items() if not key.startswith(("PIP_", "MAKE", "ARGS"))}
    env |= {"PIP_CONFIG_FILE": os.devnull, "PIP_INDEX_URL": f"{indexes}/plain", "PIP_NO_CACHE_DIR": "1"}

    def serve(*variables: str) -> subprocess.CompletedProcess[str]:
        command = ["make", "serve", f"PYTHON={sys.executable}", *variables]
        return subprocess.run(command, cwd=clone, env=env, capture_output=True, text=True, check=False)

    named = f"TORCH_INDEX={indexes}/cpu"
    done = serve(named)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "To download: 1 MB for 1 package, less what is in pip's cache; in MB: torch 1\n" in done.stdout
    assert done.stdout.index("To download") < done.stdout.index("Collecting torch")
    assert "The command is .venv/bin/dovetail; your own model: .venv/bin/dovetail serve Qwen/Qwen3-0.6B" in done.stdout
    assert done.stdout.endswith("served serve --port 30000\n")
    assert list(clone.glob(".venv/lib/python3*/site-packages/torch-2.13.0+cpu.dist-info"))
    assert serve().returncode == 0
    done = serve("TORCH_INDEX=http://127.0.0.1:9/other")
    assert (done.returncode, "was installed without this TORCH_INDEX; run make clean first" in done.stderr) == (2, True)


def test_what_is_downloaded_is_told_with_its_size() -> None:
    """The largest by name, how many are of unknown size, and what to do without a GPU."""
    sizes: dict[str, int | None] = {f"nvidia-{number}": number * 1_000_000 for number in range(8)} | {"torch": None}
    first, advice = downloads.told(sizes).split("\n")
    assert first.startswith(
        "To download: 28 MB for 9 packages, less what is in pip's cache; in MB: nvidia-7 7, nvidia-6 6,"
    )
    assert first.endswith(", nvidia-2 2, …; 1 package of unknown size")
    assert advice == downloads.ADVICE
    assert "\n" not in downloads.told({"torch": 1_000_000})
