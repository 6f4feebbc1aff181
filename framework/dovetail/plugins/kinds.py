"""The kinds of plugin, their entry-point groups and API versions, and how names compare.

A plugin's key is (kind, name). Names compare case-insensitively with `_` equal to `-`, except model architectures,
which are the exact string of `config.json`. `distribution:name` names one plugin of one package.
"""

from __future__ import annotations

import re
from typing import Any, NamedTuple

from dovetail.contracts.tables import table

ROLES = ("api", "engine", "worker", "compiler")
"""Kinds of process: HTTP server, engine, a tensor-parallel rank beside it, grammar compiler."""

MANIFEST_GROUP = "dovetail.manifest"
"""Entry points of this group name a top-level package that holds a `dovetail-plugins.json`."""

KIT_GROUP = "dovetail.conformance"
"""Entry points of this group name conformance classes: a package's own samples and configurations."""

SDK_API, SDK_MINOR = 1, 0
"""The version of `dovetail.sdk`, which grows as that of a kind."""


class PluginKind(NamedTuple):
    """One kind of plugin. All that goes over kinds reads this table: plan, loader, flags, list, scaffold, docs, kit.

    Attributes:
        name: As in `PlannedPlugin.kind`, manifests and `GET /v1/plugins`.
        group: Entry-point group without the version: `dovetail.models`.
        roles: The processes that import a selected plugin of this kind; hook plugins declare theirs in a manifest.
        contract: `module:attr` of the class that a plugin subclasses, or None for hooks.
        label: How a name of this kind is given by a user: the flag, or a word.
        kit: `module:attr` of its conformance class.
        about: What a new package of it says of itself; `{name}` is the plugin's.
        setting: The setting that names the plugin; "" where none does.
        many: It names any number of them, all of which are loaded; a list.
        without: Of a kind of which there may be many, the word that asks for none; `auto`, alone or behind names, then
            asks for those that say in their manifest that they fit. "": only names are given.
        default: The plugin of every engine that names none; "" where there need not be one.
        fact: `auto` looks for a plugin of this kind only if this fact is known of the model; "" always.
        watched: Core modules that loading such a plugin must not change, besides what every kind must leave alone.
        api: The API version this Dovetail speaks.
        oldest_api: The oldest API version it still speaks, through an adapter.
        minor: How often the API of this version has grown since its first release. A plugin says the lowest it needs.
    """

    name: str
    group: str
    roles: tuple[str, ...]
    contract: str | None
    label: str
    kit: str
    about: str
    setting: str = ""
    many: bool = False
    without: str = ""
    default: str = ""
    fact: str = ""
    watched: tuple[str, ...] = ()
    api: int = 1
    oldest_api: int = 1
    minor: int = 0

    @property
    def hook(self) -> str:
        """The hook through which plugins of this kind are registered at start; "" for hooks themselves."""
        return "" if self.contract is None else self.group.replace(".", "_")

    @property
    def entry_point_group(self) -> str:
        """The group that a package of today uses: `dovetail.models.v1`."""
        return f"{self.group}.v{self.api}"

    def usage(self, name: str) -> str:
        """Return how a user names a plugin: where `auto` may stand behind names, what it finds does the rest."""
        return f"{self.label} {name}{',auto' if self.without else ''}"

    def too_new(self, plugin: object) -> str:
        """Return why a plugin that needs a later minor version cannot be used, with the fix, or "" where it can.

        One that says it in no number cannot, either.
        """
        spoken = {"needs_minor": (self.name, self.api, self.minor), "needs_sdk": ("dovetail.sdk", SDK_API, SDK_MINOR)}
        for attr, (name, api, minor) in spoken.items():
            needed = getattr(plugin, attr, 0)
            if not isinstance(needed, int):
                return f"{attr} = {needed!r} is no number of a minor version; give one, such as {minor}"
            if needed > minor:
                return (
                    f"it needs API {api}.{needed} of {name}, this dovetail speaks {api}.{minor}; upgrade dovetail-llm"
                )
        return ""


def _kind(row: dict[str, Any]) -> PluginKind:
    """Make a kind of its row, whose lists are tuples."""
    for field in ("roles", "watched"):
        row[field] = tuple(row.get(field, ()))
    return PluginKind(**row)


_ROWS: list[dict[str, Any]] = table(__file__)
KINDS: dict[str, PluginKind] = {row["name"]: _kind(row) for row in _ROWS}
"""The rows of `kinds.json`, beside this file, by name."""

_KIND_OF_GROUP = {kind.group: kind for kind in KINDS.values()}


def split_group(group: str) -> tuple[PluginKind | None, int | None]:
    """Split an entry-point group into its kind and API version; None for what is not recognised."""
    base, dot, version = group.rpartition(".v")
    if dot and version.isdecimal():
        return _KIND_OF_GROUP.get(base), int(version)
    return _KIND_OF_GROUP.get(group), None


def normalise(kind: str, name: str) -> str:
    """Return the form of `name` in which two names of `kind` are compared."""
    name = name.strip()
    if not name.isascii():  # two spellings of one text look alike in every message
        from unicodedata import normalize

        name = normalize("NFKC", name)
    return name if kind == "model" else name.replace("_", "-").lower()


def normalise_distribution(name: str) -> str:
    """Return a distribution's name as package indexes compare it: `Acme_Parser` is `acme-parser`."""
    return re.sub(r"[-_.]+", "-", name.strip()).lower()


def split_qualified(name: str) -> tuple[str | None, str]:
    """Split `distribution:name` into its normalised distribution (None for a bare name) and the name."""
    distribution, colon, rest = name.partition(":")
    return (normalise_distribution(distribution), rest.strip()) if colon else (None, name)
