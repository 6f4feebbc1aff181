"""One record per plugin of each installed distribution, with the state that metadata alone determines."""

from __future__ import annotations

import enum
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from dovetail.base.distribution import DISTRIBUTION
from dovetail.plugins.kinds import (
    KINDS,
    PluginKind,
    normalise,
    normalise_distribution,
    split_group,
    split_qualified,
)
from dovetail.plugins.scan import NO_FACTS, EntryPoint, Installed, PluginFacts


class PluginState(enum.StrEnum):
    """What became of a plugin. The first four are known from metadata, the others follow from use."""

    FOUND = "found"
    BLOCKED = "blocked"
    INCOMPATIBLE = "incompatible"
    SHADOWED = "shadowed"
    SELECTED = "selected"
    LOADED = "loaded"
    FAILED = "failed"
    ACTIVE = "active"


UNUSABLE = frozenset({PluginState.BLOCKED, PluginState.INCOMPATIBLE, PluginState.SHADOWED})
"""States that a plugin never leaves: it is listed and refused."""


@dataclass(slots=True, kw_only=True)
class PluginRecord:
    """One plugin of one installed distribution.

    `kind` is a key of `KINDS`, or the middle of an entry-point group that this Dovetail does not know. `api` is None
    where the group carries no version. `reason` says why the state is what it is, or what to know about the name.
    `file` is the path of a `--plugin-file`, "" for what a distribution registers.
    """

    kind: str
    name: str
    target: str
    distribution: str
    version: str
    api: int | None
    state: PluginState = PluginState.FOUND
    reason: str = ""
    facts: PluginFacts = NO_FACTS
    location: str = ""
    file: str = ""

    @property
    def qualified(self) -> str:
        """`distribution:name`, which is unambiguous."""
        return f"{self.distribution}:{self.name}"

    @property
    def builtin(self) -> bool:
        """Whether it comes with Dovetail."""
        return normalise_distribution(self.distribution) == DISTRIBUTION

    @property
    def usable(self) -> bool:
        """Whether it may be selected."""
        return self.state not in UNUSABLE

    @property
    def keys(self) -> set[str]:
        """Its name and aliases, in the form in which names of its kind are compared."""
        return {normalise(self.kind, own) for own in (self.name, *self.facts.aliases)}

    def answers_to(self, name: str) -> bool:
        """Whether its name or an alias equals the bare `name`."""
        return normalise(self.kind, name) in self.keys

    def as_dict(self) -> dict[str, Any]:
        """Return plain JSON values: what `dovetail plugin list --json` and `GET /v1/plugins` show."""
        return {
            "kind": self.kind,
            "name": self.name,
            "state": self.state.value,
            "reason": self.reason,
            "distribution": self.distribution,
            "version": self.version,
            "api": self.api,
            "target": self.target,
            "aliases": list(self.facts.aliases),
            "devices": list(self.facts.devices),
            "packages": list(self.facts.packages),
            "location": self.location,
        }


def _key(item: str) -> tuple[str, str]:
    """Return how a distribution, or `distribution:name`, stands on the deny list and the allow list."""
    distribution, name = split_qualified(item)
    return (normalise_distribution(item), "") if distribution is None else (distribution, normalise("", name))


Lock = Callable[[str, str], str | None]
"""Says of (distribution, version) why it must not be used, or None."""


class Rules:
    """What may be used: the deny list, the allow list (empty: everything), and a lock; the built-ins always may."""

    def __init__(self, deny: Collection[str] = (), allow: Collection[str] = (), lock: Lock | None = None) -> None:
        """Take the lists as a user writes them."""
        self.deny, self.allow, self.lock = set(map(_key, deny)), set(map(_key, allow)), lock

    def why_blocked(self, distribution: str, version: str, name: str) -> str | None:
        """Say why a plugin must not be used, with the fix, or None."""
        names = {_key(distribution), _key(f"{distribution}:{name}")}
        if names & self.deny:
            return f"on the deny list; take {distribution} off it to use it"
        if normalise_distribution(distribution) == DISTRIBUTION:
            return None
        if self.allow and not names & self.allow:
            return f"not on the allow list; add {distribution} to --plugin-allow to use it"
        return self.lock(distribution, version) if self.lock is not None else None


NAMES = "use visible characters, no blanks, no : and no comma, 100 at most, and neither auto nor none"


def can_be_typed(name: str) -> bool:
    """Whether a flag can name a plugin so: settings list names with commas, `:` follows a distribution."""
    is_visible = name.isprintable() and not any(char.isspace() or char in ":," for char in name)
    return 0 < len(name) <= 100 and is_visible and name.lower() not in ("auto", "none")


def is_target(target: str) -> bool:
    """Whether `target` has the form `module:attr`."""
    module, colon, attr = target.partition(":")
    return bool(colon) and all(part.isidentifier() for part in (*module.split("."), *attr.split(".")))


def record_of(installed: Installed, entry: EntryPoint, rules: Rules) -> PluginRecord:
    """Make the record of one entry point, with the state that metadata alone determines."""
    kind, api = split_group(entry.group)
    name = kind.name if kind else entry.group.removeprefix("dovetail.").rpartition(".v")[0] or entry.group
    state, reason = _static_state(installed, entry, kind, api, rules)
    return PluginRecord(
        kind=name,
        name=entry.name,
        target=entry.target,
        distribution=installed.name,
        version=installed.version,
        api=api,
        state=state,
        reason=reason,
        facts=_facts_of(installed.facts, name, entry.name),
        location=installed.location,
    )


def _facts_of(facts: Mapping[tuple[str, str], PluginFacts], kind: str, name: str) -> PluginFacts:
    key = normalise(kind, name)
    return next((f for (k, n), f in facts.items() if k == kind and normalise(kind, n) == key), NO_FACTS)


def facts_without_plugin(installed: Installed, records: list[PluginRecord]) -> Iterator[str]:
    """Say which facts of a distribution's manifest describe nothing that it registers."""
    known = {(record.kind, normalise(record.kind, record.name)) for record in records}
    for kind, name in installed.facts:
        if (kind, normalise(kind, name)) not in known:
            yield f"manifest describes {kind} {name!r}, which has no entry point"


def _static_state(
    installed: Installed, entry: EntryPoint, kind: PluginKind | None, api: int | None, rules: Rules
) -> tuple[PluginState, str]:
    if installed.shadowed_by is not None:
        return PluginState.SHADOWED, f"hidden by {installed.name} {installed.shadowed_by}; uninstall one of the two"
    if kind is None:
        groups = ", ".join(known.entry_point_group for known in KINDS.values())
        return PluginState.INCOMPATIBLE, f"unknown entry-point group {entry.group!r}; groups: {groups}"
    if api is None:
        return PluginState.INCOMPATIBLE, f"group {entry.group!r} has no API version; use {kind.entry_point_group!r}"
    if not kind.oldest_api <= api <= kind.api:
        fix = "upgrade dovetail-llm" if api > kind.api else f"upgrade {installed.name}"
        return PluginState.INCOMPATIBLE, f"made for API {api} of {kind.name}; this dovetail speaks {_span(kind)}; {fix}"
    if installed.unmet is not None:
        return PluginState.INCOMPATIBLE, installed.unmet
    if not is_target(entry.target):
        return PluginState.INCOMPATIBLE, f"entry point {entry.target!r} is not of the form 'module:attr'"
    if not can_be_typed(entry.name):
        return PluginState.INCOMPATIBLE, f"nobody can ask for the name {entry.name!r}; {NAMES}"
    if (blocked := rules.why_blocked(installed.name, installed.version, entry.name)) is not None:
        return PluginState.BLOCKED, blocked
    return PluginState.FOUND, "" if api == kind.api else f"made for API {api} of {kind.name}; used through an adapter"


def _span(kind: PluginKind) -> str:
    return str(kind.api) if kind.api == kind.oldest_api else f"{kind.oldest_api} to {kind.api}"
