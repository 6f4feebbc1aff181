"""What is installed, read from distribution metadata alone: nothing is imported.

`scan()` walks `importlib.metadata.distributions()`, which unlike `entry_points()` also shows an install that another
one of the same name hides. Static facts come from JSON manifests (`dovetail-plugins.json`); see `docs/plugins.md`.
"""

from __future__ import annotations

import importlib.util
import json
import os
import re
import sys
from collections.abc import Iterable, Iterator
from importlib.metadata import Distribution, distributions
from typing import Any, NamedTuple

import dovetail
from dovetail.base.distribution import DISTRIBUTION, OTHER_PROJECT
from dovetail.plugins.clues import PARSERS, Clue, parse_clues
from dovetail.plugins.kinds import KIT_GROUP, MANIFEST_GROUP, ROLES, normalise_distribution

MANIFEST_FILE = "dovetail-plugins.json"
MANIFEST_VERSION = 1
_LIST_FACTS = ("aliases", "devices", "packages", "roles")
_PARSER_FACTS = ("clues", "opens")
_OWN_FACTS = {"quantization": ("reads",), "model": ("config",)}


class EntryPoint(NamedTuple):
    """One line of an `entry_points.txt`. `target` is `module:attr`."""

    group: str
    name: str
    target: str


class PluginFacts(NamedTuple):
    """Static facts of one plugin, from its package's manifest.

    Attributes:
        aliases: Further names.
        devices: Device types that it runs on; empty for any.
        packages: Distributions that it needs beyond its own requirements.
        roles: Processes that import it; empty for the kind's own.
        matches: For `auto`: patterns by fact (`device`, `architecture`, `quantization`, `vision`); None: `auto` never
            takes it.
        clues: For `auto`, of a parser: how it knows the chat templates of its models.
        opens: Likewise: what opens its thinking, or its calls, in any model's replies; "" for nothing of its own.
        reads: Every `quant_method` that a quantisation reads, `none` for plain checkpoints; empty: its class is asked.
        config: Of a model: `module:class` of what translates `config.json` without torch; "" for none.
    """

    aliases: tuple[str, ...] = ()
    devices: tuple[str, ...] = ()
    packages: tuple[str, ...] = ()
    roles: tuple[str, ...] = ()
    matches: dict[str, tuple[str, ...]] | None = None
    clues: tuple[Clue, ...] = ()
    opens: str = ""
    reads: tuple[str, ...] = ()
    config: str = ""


NO_FACTS = PluginFacts()


class Installed(NamedTuple):
    """A distribution that registers something with Dovetail.

    Attributes:
        name: As its metadata writes it.
        version: Its version.
        location: The folder on `sys.path` where it is installed.
        entry_points: Those in `dovetail.` groups, without manifests and conformance classes.
        facts: By (kind, name as the manifest writes it).
        problems: What is wrong with its manifest, one line each.
        shadowed_by: `version at location` of the same distribution found earlier on `sys.path`, or None.
        unmet: What it requires of Dovetail or Python that is not so here, with the fix; or None.
    """

    name: str
    version: str
    location: str
    entry_points: tuple[EntryPoint, ...]
    facts: dict[tuple[str, str], PluginFacts]
    problems: tuple[str, ...]
    shadowed_by: str | None
    unmet: str | None = None


def scan(path: list[str] | None = None) -> Iterator[Installed]:
    """Yield the distributions that name a `dovetail.` entry-point group, in the order of `sys.path`.

    Args:
        path: Folders to search instead of `sys.path`.
    """
    first_seen: dict[str, tuple[str, str]] = {}
    done: set[tuple[str, str, str]] = set()
    for dist in distributions() if path is None else distributions(path=path):
        entry_points = tuple(_parse_entry_points(_read(dist, "entry_points.txt")))
        if not entry_points:
            continue
        name, version = _name_and_version(dist)
        location = str(dist.locate_file(""))
        key = normalise_distribution(name)
        if (key, version, location) in done:  # one folder can stand twice on sys.path
            continue
        done.add((key, version, location))
        if key not in first_seen:
            first_seen[key] = _first_install(name, path) or (version, location)
        winner = first_seen[key]
        shadowed = winner != (version, location)
        facts, problems = ({}, ()) if shadowed else _manifests(entry_points)
        yield Installed(
            name=name,
            version=version,
            location=location,
            entry_points=tuple(e for e in entry_points if e.group not in (MANIFEST_GROUP, KIT_GROUP)),
            facts=facts,
            problems=problems,
            shadowed_by=f"{winner[0]} at {winner[1]}" if shadowed else None,
            unmet=None if key == DISTRIBUTION else _unmet(dist),
        )


def _first_install(name: str, path: list[str] | None) -> tuple[str, str] | None:
    """Return version and location of the install of `name` that Python imports: it need not have entry points."""
    for dist in distributions(name=name) if path is None else distributions(name=name, path=path):
        return _name_and_version(dist)[1], str(dist.locate_file(""))
    return None


def installed_version(distribution: str) -> str | None:
    """Return the version of a distribution as it is installed now; None if it is not."""
    found = _first_install(distribution, None)
    return None if found is None else found[0]


def _parse_entry_points(text: str) -> Iterator[EntryPoint]:
    """Read the lines of `dovetail.` groups. An INI file, but configparser takes longer than the whole scan."""
    if "dovetail." not in text:
        return
    group = ""
    for raw in text.splitlines():
        line = raw.strip()
        if line.startswith("[") and line.endswith("]"):
            group = line[1:-1].strip()
        elif group.startswith("dovetail.") and line and line[0] not in "#;":
            name, equals, target = line.partition("=")
            if equals:
                yield EntryPoint(group, name.strip(), target.partition("[")[0].strip())


def _read(dist: Distribution, file: str) -> str:
    """Return a metadata file, or "" where it is absent or unreadable: a damaged install registers nothing."""
    try:
        return dist.read_text(file) or ""
    except (OSError, UnicodeDecodeError):
        return ""


def _headers(dist: Distribution) -> Iterator[tuple[str, str]]:
    """Yield names and values of headers. `dist.metadata` would parse the whole file, long description included."""
    for line in (_read(dist, "METADATA") or _read(dist, "PKG-INFO")).splitlines():
        if not line.strip():
            return
        header, _, value = line.partition(":")
        yield header.lower(), value.strip()


def _name_and_version(dist: Distribution) -> tuple[str, str]:
    found: dict[str, str] = {}
    for header, value in _headers(dist):
        found.setdefault(header, value)
    return found.get("name", "(unnamed)"), found.get("version", "0")


def unmet_by_next(distribution: str) -> str | None:
    """Say why Dovetail's next minor version would refuse a distribution that is installed, None if it would not."""
    major, minor = map(int, dovetail.__version__.split(".")[:2])
    dist = next(iter(distributions(name=distribution)), None)
    return None if dist is None else _unmet(dist, f"{major}.{minor + 1}.0")


def _unmet(dist: Distribution, version: str = dovetail.__version__) -> str | None:
    """Compare what a distribution requires of Dovetail and of Python with what is here: pip may have been overruled."""
    wanted, python = [], ""
    for header, value in _headers(dist):
        if header == "requires-python":
            python = value
        elif header == "requires-dist" and _required(value) in (DISTRIBUTION, OTHER_PROJECT):
            wanted.append(value)
    is_bare = all(_required(line) == DISTRIBUTION and not set(line) & set("<>=~!") for line in wanted)
    if is_bare and not set(python) & set("<>=~!"):
        return None
    from packaging.requirements import InvalidRequirement, Requirement  # only here: it costs `plugin list` 10 ms
    from packaging.specifiers import InvalidSpecifier, SpecifierSet

    try:
        here = ".".join(map(str, sys.version_info[:3]))
        if not SpecifierSet(python).contains(here, prereleases=True):
            return f"it requires Python {python}, this is {here}; use such a Python, or upgrade the package"
        for requirement in map(Requirement, wanted):
            if requirement.marker is not None and not requirement.marker.evaluate({"extra": ""}):
                continue
            if _required(requirement.name) == OTHER_PROJECT:
                text = f"it requires {OTHER_PROJECT!r}, another project's package"
                return f"{text}; take a version that requires {DISTRIBUTION!r}"
            if not requirement.specifier.contains(version, prereleases=True):
                needed = f"{DISTRIBUTION} {requirement.specifier}"
                return f"it requires {needed}, this is {version}; upgrade one of the two"
    except (InvalidRequirement, InvalidSpecifier) as error:
        return f"its requirements cannot be read: {' '.join(str(error).split())}; reinstall it"
    return None


def _required(requirement: str) -> str:
    """Return the distribution that a requirement names, "" if it names none."""
    found = re.match(r"\s*([\w.-]+)", requirement)
    return normalise_distribution(found[1]) if found else ""


def _manifests(entry_points: Iterable[EntryPoint]) -> tuple[dict[tuple[str, str], PluginFacts], tuple[str, ...]]:
    """Read the manifests named by a distribution's entry points."""
    facts: dict[tuple[str, str], PluginFacts] = {}
    problems: list[str] = []
    for entry in entry_points:
        if entry.group != MANIFEST_GROUP:
            continue
        try:
            facts.update(read_manifest(entry.target))
        except (OSError, ValueError) as error:
            problems.append(f"manifest of {entry.target!r} ignored: {error}")
    return facts, tuple(problems)


def read_manifest(package: str) -> dict[tuple[str, str], PluginFacts]:
    """Read `dovetail-plugins.json` of a top-level package without importing it.

    Raises:
        ValueError: The package cannot be found or the file does not have the documented form.
        OSError: The file cannot be read.
    """
    if not package.isidentifier():
        raise ValueError("a manifest entry point names a top-level package")
    spec = importlib.util.find_spec(package)
    if spec is None or not spec.submodule_search_locations:
        raise ValueError(f"package {package!r} is not installed")
    paths = [os.path.join(folder, MANIFEST_FILE) for folder in spec.submodule_search_locations]
    with open(next(filter(os.path.exists, paths), paths[0]), encoding="utf-8") as file:
        return parse_manifest(json.load(file))


def parse_manifest(data: Any) -> dict[tuple[str, str], PluginFacts]:
    """Turn a manifest's JSON into facts by (kind, name).

    Raises:
        ValueError: It does not have the documented form; the message names the place.
    """
    if not isinstance(data, dict) or data.get("manifest") != MANIFEST_VERSION:
        raise ValueError(f'expected {{"manifest": {MANIFEST_VERSION}, "plugins": …}}')
    found: dict[tuple[str, str], PluginFacts] = {}
    for kind, plugins in _object(data.get("plugins"), "plugins").items():
        for name, facts in _object(plugins, f"plugins.{kind}").items():
            found[kind, name] = parse_facts(kind, _object(facts, f"plugins.{kind}.{name}"))
    return found


def parse_facts(kind: str, facts: dict[str, Any]) -> PluginFacts:
    """Check the facts of one plugin, from a manifest or from `registry.add(…, **facts)`.

    Raises:
        ValueError: An unknown fact or role, a fact that other kinds have, or a value of the wrong type.
    """
    possible = (*_LIST_FACTS, *(_PARSER_FACTS if kind in PARSERS else _OWN_FACTS.get(kind, ())), "matches")
    unknown = set(facts) - {*possible}
    if unknown:
        raise ValueError(f"unknown fact {sorted(unknown)[0]!r}; possible: {', '.join(possible)}")
    matches = facts.get("matches")
    if matches is not None:
        matches = {fact: _strings(value, f"matches.{fact}") for fact, value in _object(matches, "matches").items()}
    lists = {fact: _strings(facts[fact], fact) if fact in facts else () for fact in (*_LIST_FACTS, "reads")}
    for role in lists["roles"]:
        if role not in ROLES:
            raise ValueError(f"unknown role {role!r}; possible: {', '.join(ROLES)}")
    clues, opens, config = parse_clues(facts.get("clues", ())), facts.get("opens", ""), facts.get("config", "")
    for fact, text in (("opens", opens), ("config", config)):
        if not isinstance(text, str):
            raise ValueError(f"{fact}: expected a string, got {text!r}")
    return PluginFacts(**lists, matches=matches, clues=clues, opens=opens, config=config)


def _object(value: Any, where: str) -> dict[str, Any]:
    if not isinstance(value, dict):
        raise ValueError(f"{where}: expected an object")
    return value


def _strings(value: Any, where: str) -> tuple[str, ...]:
    if not isinstance(value, list | tuple) or not all(isinstance(item, str) for item in value):
        raise ValueError(f"{where}: expected a list of strings")
    return tuple(value)
