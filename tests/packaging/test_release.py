"""What a release uploads: its checks refuse what should not go out, and the wheel works where it is installed."""

from __future__ import annotations

import re
import sys
import tarfile
import tomllib
import zipfile
from importlib.metadata import version
from pathlib import Path

import pytest
import release
from clean_env import ROOT
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

import dovetail
from dovetail.base.distribution import DISTRIBUTION

TEXT = {".md", ".py", ".toml", ".tmpl", ".yml", ".yaml", ".html", ".js"}


def test_the_version_stands_in_one_place() -> None:
    """The package's, the metadata's and the release's are the same, and `pyproject.toml` has none of its own."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))["project"]
    assert "version" in project["dynamic"]
    assert project["name"] == DISTRIBUTION
    assert release.version() == dovetail.__version__ == version(DISTRIBUTION)


def test_supported_pythons_are_those_that_are_tested() -> None:
    """The classifiers name what `make release` tests, and the oldest is the one that is required."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))["project"]
    named = [line.rpartition(" :: ")[2] for line in project["classifiers"] if "Python :: 3." in line]
    assert tuple(named) == release.PYTHONS
    assert project["requires-python"] == f">={release.PYTHONS[0]}"


@pytest.mark.install
def test_the_wheel_is_fit_to_be_uploaded(wheel: Path) -> None:
    """Under 25 MB, our packages and nothing else, no corpus, no test, with the licence; twine takes its metadata."""
    assert list(release.wheel_problems(wheel)) == []
    assert list(release.metadata_problems(wheel)) == []


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("demo_training/corpus/facts.py", "packages that should not be there or are missing: demo_training"),
        ("dovetail/demo/corpus/facts.txt", "nothing with 'corpus'"),
        ("dovetail/test_x.py", "nothing with '/test_'"),
        ("docs/index.md", "packages that should not be there or are missing: docs"),
    ],
)
def test_a_wheel_with_what_does_not_belong_is_refused(tmp_path: Path, name: str, said: str) -> None:
    """The corpus that the demo model is trained on, tests, documents."""
    made = tmp_path / "dovetail-1-py3-none-any.whl"
    files = [*(f"{package}/py.typed" for package in release.PACKAGES), "dovetail-1.dist-info/licenses/LICENSE", name]
    with zipfile.ZipFile(made, "w") as archive:
        for file in files:
            archive.writestr(file, "")
    assert any(said in problem for problem in release.wheel_problems(made))


def test_a_wheel_that_is_too_large_is_refused(tmp_path: Path) -> None:
    """With its size."""
    made = tmp_path / "dovetail-1-py3-none-any.whl"
    with zipfile.ZipFile(made, "w") as archive:
        archive.writestr("dovetail/weights", bytes(release.MAX_WHEEL_BYTES + 1))
    assert "25,000,1" in next(release.wheel_problems(made))


def test_bad_metadata_is_refused(tmp_path: Path) -> None:
    """As an index would."""
    made = tmp_path / "dovetail-1.tar.gz"
    (tmp_path / "PKG-INFO").write_text("Metadata-Version: 2.1\nName: dovetail\n")
    with tarfile.open(made, "w:gz") as archive:
        archive.add(tmp_path / "PKG-INFO", "dovetail-1/PKG-INFO")
    assert "twine" in next(release.metadata_problems(made))


@pytest.mark.parametrize(
    ("changelog", "fragment", "tag", "said"),
    [
        ("# Changelog\n", None, None, "has no section of 0.1.0"),
        ("## 0.1.0 (2026-11-22)\n", "a.feature.md", None, "1 fragments are not in the changelog: a.feature.md"),
        ("## 0.1.0 (2026-11-22)\n", None, "v0.2.0", "the tag is v0.2.0, the version 0.1.0"),
        ("## 0.1.0 (2026-11-22)\n", "README.md", "v0.1.0", None),
    ],
)
def test_a_tree_that_is_not_ready_is_refused(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    changelog: str,
    fragment: str | None,
    tag: str | None,
    said: str | None,
) -> None:
    """No section of the changelog, fragments that are left, another version's tag."""
    monkeypatch.setattr(release, "ROOT", tmp_path)
    (tmp_path / "framework/dovetail").mkdir(parents=True)
    (tmp_path / "framework/dovetail/__init__.py").write_text('__version__ = "0.1.0"\n')
    (tmp_path / "CHANGELOG.md").write_text(changelog)
    (tmp_path / "docs/changelog.d").mkdir(parents=True)
    if fragment:
        (tmp_path / "docs/changelog.d" / fragment).write_text("A.\n")
    found = list(release.tree_problems(tag))
    assert len(found) == (said is not None), found
    assert said is None or said in found[0]


def test_a_python_that_is_not_here_is_said(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It is neither an error nor passed over in silence."""
    monkeypatch.setenv("PATH", str(tmp_path))
    assert release.interpreter("3.99") is None
    assert release.interpreter(f"{sys.version_info.major}.{sys.version_info.minor}") == sys.executable


def test_the_pins_are_within_what_the_package_takes() -> None:
    """Every requirement has a pin, and each pin is in its range: who changes a range runs `make pins`."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))["project"]
    wanted = [project["dependencies"], *project["optional-dependencies"].values()]
    pins: dict[str, set[str]] = {}
    for line in (ROOT / "constraints.txt").read_text("utf-8").splitlines():
        if not line.startswith("#"):
            pin = Requirement(line)
            pins.setdefault(canonicalize_name(pin.name), set()).add(str(pin.specifier).removeprefix("=="))
    for requirement in (Requirement(line) for lines in wanted for line in lines):
        found = pins.get(canonicalize_name(requirement.name), set())
        assert found, requirement
        assert all(requirement.specifier.contains(version, prereleases=True) for version in found), requirement


def test_no_text_installs_another_project() -> None:
    """Whatever a text, a message or a package's requirements tell to install is ours: `dovetail` alone is not."""
    other = re.compile(r"pip install '?dovetail(?![\w-])|(?<![\w-])dovetail(\[[a-z]| *[<>=~]=+ *[\dX{])")
    folders = ("framework", "server", "plugins", "docs", ".github")
    files = [path for folder in folders for path in (ROOT / folder).rglob("*") if path.suffix in TEXT]
    files += [*ROOT.glob("*.md"), ROOT / "pyproject.toml", ROOT / "docs/deploy/Dockerfile"]
    assert len(files) > 1000
    found = {path: other.findall(path.read_text("utf-8")) for path in files}
    assert [path for path, hits in found.items() if hits] == []


def test_every_fragment_is_collected() -> None:
    """Its name has a type that towncrier knows: another one would be left out in silence."""
    folder = ROOT / "docs/changelog.d"
    types = {"feature", "bugfix", "doc", "removal", "misc"}
    names = [path.name for path in folder.iterdir() if path.name != "README.md"]
    assert [name for name in names if name.split(".")[1] not in types or not name.endswith(".md")] == []
    assert all(f"`{name}`" in (folder / "README.md").read_text("utf-8") for name in types)
