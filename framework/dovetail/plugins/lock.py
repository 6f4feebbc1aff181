"""The lock file: which distributions may provide plugins, with version and the hash of their installed file list.

`dovetail plugin lock` writes it, `--plugins-locked FILE` refuses every other plugin. A distribution's `RECORD` lists
the hash of each of its files, so the hash of `RECORD` stands for all of them; before a locked plugin is imported, its
files are compared with it.
"""

from __future__ import annotations

import base64
import csv
import hashlib
import json
from collections.abc import Callable, Iterable
from importlib.metadata import Distribution, distributions
from pathlib import Path

from dovetail.contracts.errors import PluginError
from dovetail.plugins.kinds import normalise_distribution

LOCK_VERSION = 1
DEFAULT_FILE = "dovetail-plugins.lock"


def record_hash(distribution: str) -> str:
    """Return `sha256:…` of a distribution's RECORD, or "" where there is none."""
    text = _record(_installed(distribution))
    return f"sha256:{hashlib.sha256(text.encode()).hexdigest()}" if text else ""


def read_lock(path: Path) -> Callable[[str, str], str | None]:
    """Return what `Registry.scan(lock=…)` takes: says why a distribution is refused, or None.

    Raises:
        PluginError: The file cannot be read or does not have the form that `dovetail plugin lock` writes.
    """
    try:
        data = json.loads(path.read_text("utf-8"))
        if data["lock"] != LOCK_VERSION:
            raise ValueError(f"lock version {data['lock']!r}; this dovetail reads {LOCK_VERSION}")
        locked = {normalise_distribution(d["name"]): (d["version"], d["record"]) for d in data["distributions"]}
    except OSError as error:
        raise PluginError(
            f"--plugins-locked {str(path)!r}: {error.strerror}; write it with dovetail plugin lock"
        ) from None
    except (ValueError, KeyError, TypeError) as error:
        raise PluginError(
            f"--plugins-locked {str(path)!r}: not a lock file ({error}); write it with dovetail plugin lock"
        ) from None

    def why_not(distribution: str, version: str) -> str | None:
        entry = locked.get(normalise_distribution(distribution))
        if entry is None:
            return f"not in the lock file {path.name}; check it and run dovetail plugin lock"
        if entry[0] != version:
            return f"the lock file {path.name} has version {entry[0]}; install that, or run dovetail plugin lock"
        if entry[1] != record_hash(distribution):
            return f"its files are not those of the lock file {path.name}; reinstall it, or run dovetail plugin lock"
        return None

    return why_not


def changed_files(distribution: str) -> list[str]:
    """Return the files of an installed distribution whose contents differ from its RECORD, or that are gone."""
    if (dist := _installed(distribution)) is None:
        return []
    changed = []
    for path, expected in _hashes(_record(dist).splitlines()):
        algorithm, _, digest = expected.partition("=")
        try:
            data = Path(str(dist.locate_file(path))).read_bytes()
        except OSError:
            changed.append(path)
            continue
        found = base64.urlsafe_b64encode(hashlib.new(algorithm, data).digest()).rstrip(b"=").decode()
        if found != digest:
            changed.append(path)
    return changed


def check_files(distributions: Iterable[str]) -> None:
    """Compare the files of distributions with their RECORDs.

    Raises:
        PluginError: A file differs.
    """
    for distribution in distributions:
        if changed := changed_files(distribution):
            raise PluginError(
                f"--plugins-locked: {distribution}: {changed[0]} differs from what was installed; "
                f"reinstall {distribution}"
            )


def _installed(distribution: str) -> Distribution | None:
    return next(iter(distributions(name=distribution)), None)


def _record(dist: Distribution | None) -> str:
    return "" if dist is None else dist.read_text("RECORD") or ""


def _hashes(lines: Iterable[str]) -> Iterable[tuple[str, str]]:
    """Yield (path, `sha256=…`) of each line of a RECORD that has a hash."""
    for row in csv.reader(lines):
        if len(row) >= 2 and row[1].partition("=")[0] in hashlib.algorithms_guaranteed:
            yield row[0], row[1]
