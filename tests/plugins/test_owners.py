"""A distribution called `dovetail` is another project's: its plugins are a stranger's, and so are its files."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

import dovetail_server
from dovetail.base.distribution import DISTRIBUTION, OTHER_PROJECT
from dovetail.plugins.records import PluginState
from dovetail.plugins.registry import Registry
from dovetail_testing import FakeSite

SCRIPTS = {"console_scripts": {"dovetail": "dovetail_server.cli:main"}}
PARSERS = "dovetail.reasoning_parsers.v1"


def own(site: FakeSite, name: str, version: str, *files: str, ours: bool = False) -> None:
    """Install a distribution with a list of its files; their code must not be imported."""
    info = site.add(name, version, SCRIPTS if ours else {}, dict.fromkeys(files, "raise SystemExit('imported')\n"))
    (info / "RECORD").write_text("".join(f"{file},sha256=x,1\n" for file in (*files, f"{info.name}/RECORD")))


def version(site: FakeSite) -> subprocess.CompletedProcess[str]:
    """Ask the command for its version, with a folder ahead of what is installed here."""
    env = {**os.environ, "PYTHONPATH": str(site.root)}
    command = [str(Path(sys.executable).with_name("dovetail")), "version"]
    return subprocess.run(command, env=env, capture_output=True, text=True, check=False)


def test_a_distribution_of_that_name_is_a_stranger(site: FakeSite) -> None:
    """It wins no name of a built-in, and an allow list has to name it."""
    site.add(OTHER_PROJECT, "0.6", {PARSERS: {"qwen3": "theirs:Qwen3"}})
    site.add(DISTRIBUTION, "0.1.0", {PARSERS: {"qwen3": "ours:Qwen3"}})
    registry = Registry.scan(path=[str(site.root)], allow=["acme"])
    (theirs,) = (record for record in registry.records if record.distribution == OTHER_PROJECT)
    assert (theirs.builtin, theirs.state) == (False, PluginState.BLOCKED)
    assert registry.resolve("reasoning_parser", "qwen3").target == "ours:Qwen3"


@pytest.mark.parametrize("is_beside", [True, False], ids=["in our folder", "ahead of ours"])
def test_another_owner_of_the_folder_is_found_before_it_is_imported(site: FakeSite, is_beside: bool) -> None:
    """One line that names it and the fix, whether both were installed into one folder or theirs hides ours."""
    own(site, OTHER_PROJECT, "0.6", "dovetail/__init__.py", "dovetail/build.py")
    if is_beside:
        own(site, DISTRIBUTION, "0.1.0", "dovetail/__init__.py", "dovetail/engine/core.py", ours=True)
    done = version(site)
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr == (
        f"dovetail: {site.root / 'dovetail'} belongs to another package too: dovetail 0.6; "
        "run `pip uninstall dovetail`, then install dovetail-llm again\n"
    )


def test_a_folder_that_another_one_took_along_is_said(site: FakeSite) -> None:
    """After that advice's first half: the other one's removal has taken `__init__.py`, which both had."""
    own(site, DISTRIBUTION, "0.1.0", "dovetail/engine/core.py", "dovetail/llm/__init__.py", ours=True)
    code = f"import sys; sys.path[:0] = {[str(site.root), str(Path(dovetail_server.__file__).parents[1])]!r}\n"
    code += "from dovetail_server.cli import problem; print(problem())"
    done = subprocess.run([sys.executable, "-S", "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.startswith("the package 'dovetail' has no __init__.py, as after another one was removed; ")
    assert done.stdout.endswith("install dovetail-llm again\n")


def test_others_beside_are_none_of_our_business(site: FakeSite) -> None:
    """A package whose files merely begin alike, and one without a list of files."""
    own(site, DISTRIBUTION, "0.1.0", "dovetail/__init__.py", ours=True)
    own(site, "dovetail-extras", "1.0", "dovetail_extras/__init__.py", "lib/dovetail/__init__.py")
    site.add("unlisted", "1.0")
    done = version(site)
    assert (done.returncode, done.stderr) == (1, "imported\n")  # ours, which says so here
