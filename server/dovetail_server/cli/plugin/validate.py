"""`dovetail plugin validate DIR`: the whole check of a plugin's project before it is installed.

The project's `pyproject.toml` is written down as the metadata of an installed package, in a folder of its own that the
checking processes have on their path; its modules are imported from where they lie.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import tempfile
import tomllib
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from dovetail.contracts.errors import PluginError
from dovetail.plugins.kinds import KINDS, KIT_GROUP, normalise_distribution
from dovetail.plugins.records import PluginRecord
from dovetail.plugins.registry import Registry
from dovetail_testing.site import FakeSite


def run(args: argparse.Namespace) -> int:
    """Print what the metadata says and what the kit finds; exit code 1 where anything is wrong."""
    folder = Path(args.folder)
    project = read_project(folder)
    with tempfile.TemporaryDirectory(prefix="dovetail-validate-") as site, _on_path(Path(site), folder):
        records, problems = _registered(project, Path(site))
        for problem in problems:
            print(f"problem: {problem}")
        print(f"{project['name']} {project.get('version', '')}: {_listed(records)}", flush=True)
        failed = [record.qualified for record in records if record.usable and _check(record) != 0]
    if failed and KIT_GROUP not in project["entry-points"]:
        print(
            "only what the kit knows by itself was tried: name the classes of your own tests, with their samples or "
            f'reference, in pyproject.toml: [project.entry-points."{KIT_GROUP}"] NAME = "MODULE:CLASS"'
        )
    print(f"plugins: {len(records)}, problems: {len(problems)}, kit failures: {', '.join(failed) or 'none'}")
    return 1 if problems or failed else 0


def read_project(folder: Path) -> dict[str, Any]:
    """Return the table `project` of a folder's `pyproject.toml`.

    Raises:
        PluginError: There is none, it cannot be read, or it lacks what a plugin's package needs.
    """
    file = folder / "pyproject.toml"
    try:
        text = file.read_text(encoding="utf-8")
        project = tomllib.loads(text).get("project")
    except OSError as error:
        raise PluginError(f"{str(file)!r}: {error.strerror}; give the folder of a plugin's project") from None
    except (UnicodeDecodeError, tomllib.TOMLDecodeError) as error:
        raise PluginError(f"{str(file)!r}: {error}; correct the file") from None
    if not isinstance(project, dict) or not isinstance(project.get("name"), str):
        raise PluginError(f"{str(file)!r}: has no project.name; `dovetail plugin new` writes one to start from")
    groups = project.get("entry-points", {})
    for group, entries in groups.items() if isinstance(groups, dict) else [("", groups)]:
        if not isinstance(entries, dict) or not all(isinstance(target, str) for target in entries.values()):
            where = f"project.entry-points.{group!r}" if group else "project.entry-points"
            raise PluginError(f'{str(file)!r}: {where} is no table of name = "module:attr"')
    if not any(group.startswith("dovetail.") for group in groups):
        possible = ", ".join(kind.entry_point_group for kind in KINDS.values())
        raise PluginError(f"{str(file)!r}: has no entry point of Dovetail; groups: {possible}")
    return project


@contextmanager
def _on_path(site: Path, folder: Path) -> Iterator[None]:
    """Let this process and those that it starts import from the project and find its metadata before all others."""
    source = folder / "src" if (folder / "src").is_dir() else folder
    front = [str(site), str(source.resolve())]
    path, before = list(sys.path), os.environ.get("PYTHONPATH")
    sys.path[:0] = front
    os.environ["PYTHONPATH"] = os.pathsep.join([*front, *([before] if before else [])])
    try:
        yield
    finally:
        sys.path[:] = path
        if before is None:
            del os.environ["PYTHONPATH"]
        else:
            os.environ["PYTHONPATH"] = before


def _registered(project: dict[str, Any], site: Path) -> tuple[list[PluginRecord], list[str]]:
    """Write the metadata down and return what it registers, and what is wrong with it."""
    headers = [f"Requires-Dist: {requirement}" for requirement in project.get("dependencies", ())]
    headers += [f"Requires-Python: {python}"] if (python := project.get("requires-python")) else []
    version = str(project.get("version", "0"))  # one that the build works out is not known here
    FakeSite(site).add(project["name"], version, project["entry-points"], requires=headers)
    registry = Registry.scan()
    key = normalise_distribution(project["name"])
    records = [
        r for r in registry.sorted() if r.location == str(site) and normalise_distribution(r.distribution) == key
    ]
    problems = [f"{r.kind} {r.name!r} is {r.state.value}: {r.reason}" for r in records if not r.usable]
    problems += [line for line in registry.problems if line.startswith(f"{project['name']} ")]
    if records:
        from dovetail_testing.own import unused_classes

        problems += unused_classes(project["name"], records)
    return records, problems


def _listed(records: list[PluginRecord]) -> str:
    return ", ".join(f"{record.kind} {record.name!r}" for record in records) or "no plugins"


def _check(record: PluginRecord) -> int:
    """Run the kit in a process of its own, which a plugin can crash."""
    command = [
        sys.executable,
        "-P",
        "-m",
        "dovetail_server",
        "plugin",
        "check",
        record.qualified,
        "--kind",
        record.kind,
    ]
    done = subprocess.run(command, check=False, capture_output=True, text=True)
    print(done.stdout + done.stderr, end="", flush=True)
    return done.returncode
