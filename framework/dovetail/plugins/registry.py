"""The registry: one record per installed plugin, and the rules that turn a name into one of them.

A built-in wins its bare name, with one warning that names the third party. Two third parties on one bare name are an
error when that name is used. `distribution:name` always works. A name that cannot be used is an error that says why
and what to do; nothing ever falls back to something else.
"""

from __future__ import annotations

import difflib
from collections import Counter
from collections.abc import Collection
from dataclasses import dataclass, field
from typing import Any

from dovetail.contracts.errors import PluginError
from dovetail.plugins.kinds import KINDS, normalise, normalise_distribution, split_qualified
from dovetail.plugins.records import (
    NAMES,
    Lock,
    PluginRecord,
    PluginState,
    Rules,
    can_be_typed,
    facts_without_plugin,
    is_target,
    record_of,
)
from dovetail.plugins.scan import parse_facts, scan


@dataclass(slots=True)
class Registry:
    """All plugins known to this process. Make one with `Registry.scan()`.

    Attributes:
        records: In the order found.
        problems: Manifests that could not be used, one line each.
        rules: What may be used.
    """

    records: list[PluginRecord] = field(default_factory=list)
    problems: list[str] = field(default_factory=list)
    rules: Rules = field(default_factory=Rules)
    _warned: set[tuple[str, str]] = field(default_factory=set)

    @classmethod
    def scan(
        cls,
        *,
        deny: Collection[str] = (),
        allow: Collection[str] = (),
        lock: Lock | None = None,
        path: list[str] | None = None,
    ) -> Registry:
        """Read the metadata of everything installed; import nothing.

        Args:
            deny: Distributions, or `distribution:name`, that must not be used.
            allow: The only ones that may be used, beside the built-ins; empty for all.
            lock: Says for (distribution, version) why a lock file refuses it, or None.
            path: Folders to search instead of `sys.path`.
        """
        registry = cls(rules=Rules(deny, allow, lock))
        for installed in scan(path):
            records = [record_of(installed, entry, registry.rules) for entry in installed.entry_points]
            problems = (*installed.problems, *facts_without_plugin(installed, records))
            registry.problems += [f"{installed.name} {installed.version}: {line}" for line in problems]
            registry.records += records
        _note_taken_names(registry.records)
        return registry

    def of_kind(self, kind: str) -> list[PluginRecord]:
        """Return the records of one kind, unusable ones included."""
        return [record for record in self.records if record.kind == kind]

    def names(self, kind: str) -> list[str]:
        """Return the names of `kind` that can be used, sorted; qualified where a bare one would be ambiguous."""
        usable = [record for record in self.of_kind(kind) if record.usable]
        claims = Counter(key for record in usable for key in record.keys)
        return sorted({r.name if r.builtin or claims[normalise(kind, r.name)] == 1 else r.qualified for r in usable})

    def name_of(self, record: PluginRecord) -> str:
        """Return the name that means this usable plugin: its own, qualified where that would be ambiguous."""
        others = [other for other in self.of_kind(record.kind) if other.usable and other.answers_to(record.name)]
        return record.name if record.builtin or len(others) == 1 else record.qualified

    def resolve(self, kind: str, name: str) -> PluginRecord:
        """Return the plugin that `name` means.

        Args:
            kind: A key of `KINDS`.
            name: A bare name, an alias, or `distribution:name`.

        Raises:
            PluginError: The name is unknown, ambiguous, or its plugin is blocked, incompatible or shadowed.
        """
        distribution, bare = split_qualified(name)
        matching = [record for record in self.of_kind(kind) if record.answers_to(bare)]
        if distribution is not None:
            matching = [r for r in matching if normalise_distribution(r.distribution) == distribution]
        usable = [record for record in matching if record.usable]
        if not usable:
            raise PluginError(_unusable(name, matching) if matching else self._unknown(kind, name))
        builtin = [record for record in usable if record.builtin]
        chosen = _own_name_first(builtin or usable, bare)
        if len(chosen) > 1:
            raise PluginError(_ambiguous(name, chosen))
        if builtin and len(usable) > len(builtin):
            self._warn_taken(chosen[0], [record for record in usable if not record.builtin])
        return chosen[0]

    def add(
        self,
        kind: str,
        name: str,
        target: str,
        *,
        distribution: str = "",
        version: str = "",
        file: str = "",
        **facts: Any,
    ) -> PluginRecord:
        """Register a plugin that entry points cannot list statically. Hooks use `for_kind`.

        Args:
            kind: A key of `KINDS`.
            name: Its name.
            target: `module:attr`, a string so that the plan can carry it to other processes.
            distribution: The package that registers it.
            version: That package's version.
            file: The `--plugin-file` that defines it.
            **facts: As in a manifest: `aliases`, `devices`, `packages`, `reads`, `roles`, `matches`, `clues`, `opens`.

        Raises:
            PluginError: The kind is unknown, the target is not `module:attr`, a fact is wrong, or this distribution
                already has that name with another target.
        """
        who = f"{distribution or 'registry.add'}: {kind} {name!r}"
        if kind not in KINDS:
            raise PluginError(f"{who}: unknown kind; possible: {', '.join(KINDS)}")
        if not can_be_typed(name):
            raise PluginError(f"{who}: nobody can ask for such a name; {NAMES}")
        if not is_target(target):
            raise PluginError(f"{who}: target {target!r} is not of the form 'module:attr'")
        try:
            checked = parse_facts(kind, facts)
        except ValueError as error:
            raise PluginError(f"{who}: {error}") from error
        record = PluginRecord(
            kind=kind,
            name=name,
            target=target,
            distribution=distribution,
            version=version,
            api=KINDS[kind].api,
            facts=checked,
            location=file,
            file=file,
        )
        if (blocked := self.rules.why_blocked(distribution, version, name)) is not None:
            record.state, record.reason = PluginState.BLOCKED, blocked
        for other in self.of_kind(kind):
            same = normalise(kind, other.name) == normalise(kind, name) and other.distribution == distribution
            if same and other.usable:
                if other.target == target:
                    return other
                by = f"defined by {other.file}" if other.file else f"registered as {other.target!r}"
                raise PluginError(f"{who}: already {by}; give the second one another name")
        self.records.append(record)
        _note_taken_names(self.records)
        return record

    def for_kind(self, kind: str, distribution: str = "", version: str = "", file: str = "") -> KindRegistry:
        """Return what a registration hook is given: an object with `add(name, target, **facts)`."""
        return KindRegistry(self, kind, distribution, version, file)

    def sorted(self) -> list[PluginRecord]:
        """Return all records by kind, name and distribution."""
        return sorted(self.records, key=_listing_order)

    def listing(self) -> dict[str, Any]:
        """Return plain JSON values: the body of `GET /v1/plugins` and of `dovetail plugin list --json`."""
        data = [record.as_dict() for record in self.sorted()]
        return {"object": "list", "data": data, "problems": list(self.problems)}

    def mark(self, kind: str, qualified: str, state: str, reason: str = "") -> None:
        """Note what became of a plugin, for the listing.

        Args:
            kind: Its kind.
            qualified: Its `distribution:name`, as in `PlannedPlugin.qualified`.
            state: The new state, a value of `PluginState`.
            reason: Why; "" leaves the old one.
        """
        for record in self.of_kind(kind):
            if record.qualified == qualified and record.usable:
                record.state, record.reason = PluginState(state), reason or record.reason

    def _unknown(self, kind: str, name: str) -> str:
        installed = self.names(kind)
        close = self._close_names(kind, split_qualified(name)[1])
        hint = f"; did you mean {' or '.join(close)}?" if close else ""
        label = KINDS[kind].label if kind in KINDS else kind
        return (
            f"{label} {name!r}: not installed; installed: {', '.join(installed) or 'none'}{hint}"
            f"; to add one, pip install a package that provides it (`dovetail plugin list` shows what is there)"
        )

    def _close_names(self, kind: str, name: str) -> list[str]:
        """Return names and aliases like `name`, the closest first, one per plugin."""
        owners = {
            normalise(kind, own): (own, record.qualified)
            for record in self.of_kind(kind)
            if record.usable
            for own in (*record.facts.aliases, record.name)
        }
        close = difflib.get_close_matches(normalise(kind, name), owners, n=4, cutoff=0.7)
        best: dict[str, str] = {}
        for key in close:
            own, plugin = owners[key]
            best.setdefault(plugin, own)
        return list(best.values())[:2]

    def _warn_taken(self, chosen: PluginRecord, others: list[PluginRecord]) -> None:
        key = (chosen.kind, normalise(chosen.kind, chosen.name))
        if key in self._warned:
            return
        self._warned.add(key)
        import logging  # only here: importing it would cost `dovetail plugin list` 10 ms

        logging.getLogger("dovetail.plugins").warning(
            "%s %r is the built-in of %s %s; %s has the same name and is reached as %s",
            KINDS[chosen.kind].label,
            chosen.name,
            chosen.distribution,
            chosen.version,
            " and ".join(f"{other.distribution} {other.version}" for other in others),
            " or ".join(other.qualified for other in others),
        )


@dataclass(frozen=True, slots=True)
class KindRegistry:
    """What a registration hook is given. Everything it adds belongs to one kind and one distribution."""

    registry: Registry
    kind: str
    distribution: str
    version: str
    file: str = ""

    def add(self, name: str, target: str, **facts: Any) -> None:
        """Register `name` as `module:attr`; facts as in a manifest.

        Raises:
            PluginError: The target or a fact is wrong, or the name is taken within the distribution.
        """
        self.registry.add(
            self.kind, name, target, distribution=self.distribution, version=self.version, file=self.file, **facts
        )


def _note_taken_names(records: list[PluginRecord]) -> None:
    """Say at each third-party plugin whose bare name does not reach it how to reach it."""
    by_key: dict[tuple[str, str], list[PluginRecord]] = {}
    for record in records:
        if record.usable:
            for own in record.keys:
                by_key.setdefault((record.kind, own), []).append(record)
    for record in records:
        if record.usable and not record.builtin and not record.reason:
            conflicts = [r for r in by_key[record.kind, normalise(record.kind, record.name)] if r is not record]
            if conflicts:
                owner = next((r for r in conflicts if r.builtin), conflicts[0])
                record.reason = f"{owner.qualified} has this name too; use {record.qualified}"


def _own_name_first(records: list[PluginRecord], bare: str) -> list[PluginRecord]:
    """Within one distribution a plugin's name wins over another's alias; between distributions nothing wins."""
    if len({normalise_distribution(record.distribution) for record in records}) > 1:
        return records
    key = normalise(records[0].kind, bare)
    named = [record for record in records if normalise(record.kind, record.name) == key] or records
    newest = max(record.api or 0 for record in named)  # a package may serve several API versions under one name
    return [record for record in named if record.api == newest]


def _ambiguous(name: str, records: list[PluginRecord]) -> str:
    label = KINDS[records[0].kind].label
    packages = {normalise_distribution(record.distribution) for record in records}
    if len(packages) > 1:
        names = sorted(record.qualified for record in records)
        return f"{label} {name!r}: provided by {len(packages)} packages; choose one: {' or '.join(names)}"
    targets = " and ".join(sorted(record.target for record in records))
    owner = records[0]
    return (
        f"{label} {name!r}: {owner.distribution} {owner.version} registers it twice, as {targets}; "
        f"remove one of the entry points and reinstall it"
    )


def _unusable(name: str, records: list[PluginRecord]) -> str:
    label = KINDS[records[0].kind].label
    causes = "; ".join(f"{r.distribution} {r.version} is {r.state.value}: {r.reason}" for r in records)
    return f"{label} {name!r}: installed but not usable: {causes}"


def _listing_order(record: PluginRecord) -> tuple[int, str, str]:
    kinds = [*KINDS, record.kind]
    return kinds.index(record.kind), normalise(record.kind, record.name), record.distribution
