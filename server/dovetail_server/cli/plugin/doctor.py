"""`dovetail plugin doctor`: everything that is wrong with what is installed, each with its fix."""

from __future__ import annotations

import argparse
import json
import re
import subprocess
import sys
from collections.abc import Iterator
from importlib.metadata import Distribution, PackageNotFoundError
from itertools import groupby

from dovetail.contracts.errors import PluginError
from dovetail.plugins.files import add_file
from dovetail.plugins.kinds import KINDS, normalise, normalise_distribution
from dovetail.plugins.lock import changed_files
from dovetail.plugins.plan import PluginPlan, as_planned
from dovetail.plugins.records import PluginRecord
from dovetail.plugins.registry import Registry
from dovetail_server.cli.plugin import files_of, scan_as_configured

START_S = 30.0
"""Time for a probe's own start, on top of what its plugins may take."""


def run(args: argparse.Namespace) -> int:
    """Print one line per problem; exit code 1 where there is any."""
    registry = scan_as_configured()
    problems = list(_in_files(registry, args))
    problems += in_metadata(registry)
    if not args.no_load:
        problems += found_by_loading(registry, args.timeout)
    for problem in problems:
        print(f"problem: {problem}")
    count = len(registry.records)
    looked = "read" if args.no_load else "read and loaded"
    print(f"{count} plugins {looked}; {len(problems) or 'no'} problem{'s' if len(problems) != 1 else ''}")
    return 1 if problems else 0


def _in_files(registry: Registry, args: argparse.Namespace) -> Iterator[str]:
    """Register what plugin files define; yield why one cannot be used."""
    for file, given in files_of(args).items():
        try:
            add_file(registry, file, args.timeout, given)
        except PluginError as error:
            yield str(error)


def in_metadata(registry: Registry) -> Iterator[str]:
    """Yield what metadata alone shows."""
    yield from registry.problems
    for record in registry.sorted():
        if not record.usable:
            yield f"{_label(record)} is {record.state.value}: {record.reason}"
    yield from _conflicts(registry)
    for name in sorted({record.distribution for record in registry.records if record.usable}):
        yield from _missing_requirements(name)
        if changed := changed_files(name):
            more = f" and {len(changed) - 1} more files" if len(changed) > 1 else ""
            yield f"{name}: {changed[0]}{more} differs from what was installed; reinstall {name}"
    for record in registry.sorted():
        optional = _optional(record.distribution)
        missing = [name for name in _missing_packages(record) if normalise_distribution(name) not in optional]
        if missing:
            yield f"{_label(record)} needs {', '.join(missing)}; run: pip install {' '.join(missing)}"


def found_by_loading(registry: Registry, timeout_s: float) -> Iterator[str]:
    """Yield what loading every usable plugin shows, one process per package."""
    usable = sorted(
        (r for r in registry.records if r.usable and not _missing_packages(r)), key=lambda r: r.distribution
    )
    for distribution, group in groupby(usable, key=lambda r: r.distribution):
        plan = PluginPlan(plugins=tuple(as_planned(record) for record in group), timeout_s=timeout_s)
        yield from _probe(distribution, plan)


def _probe(distribution: str, plan: PluginPlan) -> list[str]:
    command = [sys.executable, "-m", "dovetail_server.cli.plugin.probe"]
    limit = plan.timeout_s * len(plan.plugins) + START_S if plan.timeout_s > 0 else None
    try:
        done = subprocess.run(command, input=plan.encode(), capture_output=True, check=False, timeout=limit)
    except subprocess.TimeoutExpired:
        return [f"{distribution}: loading its plugins did not end within {limit:g} s; fix or uninstall it"]
    try:
        found: list[str] = json.loads(done.stdout.decode().splitlines()[-1])
    except (ValueError, IndexError):
        last = " ".join(done.stderr.decode(errors="replace").split()[-30:])
        return [f"{distribution}: loading its plugins ended the process with exit code {done.returncode}: {last}"]
    return found


def _conflicts(registry: Registry) -> Iterator[str]:
    """Yield bare names that more than one package claims, aliases included."""
    claims: dict[tuple[str, str], list[PluginRecord]] = {}
    for record in registry.sorted():
        if record.usable:
            for own in dict.fromkeys(normalise(record.kind, n) for n in (record.name, *record.facts.aliases)):
                claims.setdefault((record.kind, own), []).append(record)
    for (kind, name), records in claims.items():
        packages = {normalise_distribution(record.distribution) for record in records}
        if len(packages) < 2 or kind not in KINDS:
            continue
        reached = " or ".join(sorted(record.qualified for record in records))
        builtin = next((record for record in records if record.builtin), None)
        who = f"means {builtin.qualified}" if builtin else "is an error"
        yield f"{KINDS[kind].label} {name!r} {who}: {len(packages)} packages have the name; write {reached}"


def _missing_requirements(name: str) -> Iterator[str]:
    try:
        requirements = Distribution.from_name(name).requires or []
    except PackageNotFoundError:
        return
    for line in requirements:
        requirement, _, marker = (part.strip() for part in line.partition(";"))
        match = re.match(r"[A-Za-z0-9._-]+", requirement)
        if match and not marker and not _version(match[0]):
            yield f"{name} needs {requirement}, which is not installed; run: pip install '{requirement}'"


def _missing_packages(record: PluginRecord) -> list[str]:
    return [package for package in record.facts.packages if record.usable and not _version(package)]


def _optional(name: str) -> set[str]:
    """Return the packages that a distribution installs with an extra only: who leaves them out does without."""
    try:
        lines = [line.partition(";") for line in Distribution.from_name(name).requires or ()]
    except PackageNotFoundError:
        return set()
    extras = (re.match(r"[A-Za-z0-9._-]+", line) for line, _, marker in lines if re.search(r"\bextra\b", marker))
    return {normalise_distribution(found[0]) for found in extras if found}


def _version(name: str) -> str | None:
    try:
        return Distribution.from_name(name).version
    except PackageNotFoundError:
        return None


def _label(record: PluginRecord) -> str:
    return f"{record.kind} {record.name!r} of {record.distribution} {record.version}"
