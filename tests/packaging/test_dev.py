"""The short loop of development finds the folders that belong to a change, and ends in time."""

from __future__ import annotations

import subprocess
import sys
from types import SimpleNamespace
from typing import Any, cast

import dev
import pytest
from clean_env import ROOT
from dev import Budget, files_of, folders_of, full_of, nearest


@pytest.mark.parametrize(
    ("changed", "folders"),
    [
        ("plugins/parsers/dovetail_parsers/tools/llama3.py", ["tests/parsers"]),
        ("framework/dovetail/engine/scheduler.py", ["tests/engine"]),
        ("server/dovetail_server/storage/files.py", ["tests/storage"]),
        ("server/dovetail_server/cli/info.py", ["tests/server"]),
        ("docs/serve.md", ["tests/docs"]),
        ("tests/grammar/test_tools.py", ["tests/grammar"]),
        ("framework/dovetail/messages/step.py", ["tests/engine"]),
        ("framework/dovetail_offline/llm.py", ["tests/engine", "tests/test_*.py"]),
        ("server/dovetail_server/batches/service.py", ["tests/storage"]),
        ("README.md", ["tests/docs", "tests/packaging"]),
        ("tests/conftest.py", ["tests/packaging"]),
    ],
)
def test_a_change_belongs_to_a_folder_of_tests(changed: str, folders: list[str]) -> None:
    """By the names of the folders that it lies in, or by the table of those that are tested elsewhere."""
    assert folders_of([changed]) == folders


def test_every_file_of_the_product_has_tests() -> None:
    """None is without a file of tests that `make dev` would run for it."""
    listed = subprocess.run(["git", "ls-files"], cwd=ROOT, capture_output=True, text=True, check=True).stdout
    names = listed.splitlines()
    assert len(names) > 1000
    assert [name for name in names if not any(map(files_of, folders_of([name])))] == []


def test_of_a_folder_the_files_that_import_what_changed_are_collected() -> None:
    """By the name of its module, whichever way it is imported."""
    found = nearest(["tests/engine"], ["framework/dovetail/engine/tree/radix.py"], {"nothing"})
    assert found == files_of("tests/engine")
    found = nearest(["tests/engine"], ["server/dovetail_server/supervision/engine_process.py"], {"nothing"})
    assert "tests/engine/test_process.py" in found
    assert 0 < len(found) < len(files_of("tests/engine"))


@pytest.mark.parametrize(
    ("changed", "folders"),
    [
        (
            ["plugins/parsers/dovetail_parsers/tools/llama3.py", "docs/serve.md"],
            ["tests/docs", "tests/guards", "tests/parsers"],
        ),
        (["docs/serve.md"], ["tests/docs"]),
        (["docs/serve.md", "framework/dovetail/messages/step.py"], ["tests"]),
    ],
)
def test_what_differs_says_which_full_tests_run(
    changed: list[str], folders: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Those of its folders, and the guards of the product; all, where the framework or nobody knows what differs."""
    monkeypatch.setattr(dev, "changed_files", lambda base: changed)
    assert full_of("a commit") == folders
    assert full_of("") == ["tests"]


def test_the_nearest_tests_come_first() -> None:
    """Those that share words with the files that changed, in their order."""
    budget = Budget(["plugins/parsers/dovetail_parsers/tools/llama3.py"])
    items = [SimpleNamespace(nodeid=f"tests/parsers/test_{name}.py::test_it") for name in ("a", "llama3", "b")]
    budget.pytest_collection_modifyitems(cast("Any", items))
    assert [item.nodeid.split("/")[2][5:-12] for item in items] == ["llama3", "a", "b"]


def test_of_a_folder_the_nearest_files_are_collected() -> None:
    """Those whose names have words of the files that changed; where there are none, the folder."""
    assert nearest(["tests/packaging"], [], {"dev"}) == ["tests/packaging/test_dev.py"]
    assert nearest(["tests/packaging"], [], {"nothing"}) == files_of("tests/packaging")


@pytest.mark.first(1)
@pytest.mark.parametrize(("fails", "code"), [(False, 0), (True, 1)])
def test_it_stops_in_time_and_says_what_is_left(tmp_path: Any, fails: bool, code: int) -> None:
    """A test that fails before is not forgotten."""
    (tmp_path / "test_many.py").write_text(
        f"import time, pytest\ntime.sleep(0.5)\n@pytest.mark.parametrize('i', range(50))\n"
        f"def test_it(i):\n    time.sleep(0.05)\n    assert not {fails}\n"
    )
    run = f"import sys, dev; dev.BUDGET_S = 0.2; sys.argv[1:] = [{str(tmp_path)!r}]; sys.exit(dev.main())"
    command = [sys.executable, "-c", f"import sys; sys.path.append({str(ROOT / 'tests/packaging')!r}); {run}"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False)
    assert done.returncode == code, done.stdout + done.stderr
    told = f" of the 50 nearest tests in 0 s, none failed; all of them: make test ARGS='{tmp_path}'"
    assert fails or told in done.stdout
