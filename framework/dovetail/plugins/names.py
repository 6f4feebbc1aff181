"""The kinds of plugin, their entry-point groups and API versions, and how names compare.

A plugin's key is (kind, name). Names compare case-insensitively with `_` equal to `-`, except model architectures,
which are the exact string of `config.json`. `distribution:name` names one plugin of one package.
"""

from __future__ import annotations

import re
from typing import NamedTuple

ROLES = ("api", "engine", "worker", "compiler")
"""Kinds of process: HTTP server, engine, a tensor-parallel rank beside it, grammar compiler."""

BUILTIN_DISTRIBUTION = "dovetail"
"""Plugins of this distribution are the built-ins: they win their bare names."""

MANIFEST_GROUP = "dovetail.manifest"
"""Entry points of this group name a top-level package that holds a `dovetail-plugins.json`."""


class Kind(NamedTuple):
    """One kind of plugin.

    Attributes:
        name: As in `PlannedPlugin.kind`, manifests and `GET /v1/plugins`.
        group: Entry-point group without the version: `dovetail.models`.
        api: The API version this Dovetail speaks.
        oldest_api: The oldest API version it still speaks, through an adapter.
        roles: The processes that import a selected plugin of this kind; hook plugins declare theirs in a manifest.
        contract: `module:attr` of the class that a plugin subclasses, or None for hooks.
        label: How a name of this kind is given by a user: the flag, or a word.
    """

    name: str
    group: str
    api: int
    oldest_api: int
    roles: tuple[str, ...]
    contract: str | None
    label: str

    @property
    def entry_point_group(self) -> str:
        """The group that a package of today uses: `dovetail.models.v1`."""
        return f"{self.group}.v{self.api}"

    def speaks(self, api: int) -> bool:
        """Whether a plugin written for `api` can be used."""
        return self.oldest_api <= api <= self.api


_IN_ENGINE = ("engine", "worker")

KINDS: dict[str, Kind] = {
    kind.name: kind
    for kind in (
        Kind("model", "dovetail.models", 1, 1, _IN_ENGINE, "dovetail.contracts.model:ModelPlugin", "architecture"),
        Kind(
            "attention_backend",
            "dovetail.attention_backends",
            1,
            1,
            _IN_ENGINE,
            "dovetail.contracts.attention:AttentionBackend",
            "--attention-backend",
        ),
        Kind(
            "reasoning_parser",
            "dovetail.reasoning_parsers",
            1,
            1,
            ("api",),
            "dovetail.contracts.reasoning:ReasoningParser",
            "--reasoning-parser",
        ),
        Kind(
            "tool_parser",
            "dovetail.tool_parsers",
            1,
            1,
            ("api",),
            "dovetail.contracts.tools:ToolParser",
            "--tool-call-parser",
        ),
        Kind(
            "grammar_backend",
            "dovetail.grammar_backends",
            1,
            1,
            ("api", "engine", "compiler"),
            "dovetail.contracts.grammar:GrammarBackend",
            "--grammar-backend",
        ),
        Kind("hooks", "dovetail.hooks", 1, 1, ("api",), None, "--plugin"),
    )
}

_KIND_OF_GROUP = {kind.group: kind for kind in KINDS.values()}


def split_group(group: str) -> tuple[Kind | None, int | None]:
    """Split an entry-point group into its kind and API version; None for what is not recognised."""
    base, dot, version = group.rpartition(".v")
    if dot and version.isdecimal():
        return _KIND_OF_GROUP.get(base), int(version)
    return _KIND_OF_GROUP.get(group), None


def normalise(kind: str, name: str) -> str:
    """Return the form of `name` in which two names of `kind` are compared."""
    name = name.strip()
    return name if kind == "model" else name.replace("_", "-").lower()


def normalise_distribution(name: str) -> str:
    """Return a distribution's name as package indexes compare it: `Acme_Parser` is `acme-parser`."""
    return re.sub(r"[-_.]+", "-", name.strip()).lower()


def split_qualified(name: str) -> tuple[str | None, str]:
    """Split `distribution:name` into its normalised distribution (None for a bare name) and the name."""
    distribution, colon, rest = name.partition(":")
    return (normalise_distribution(distribution), rest.strip()) if colon else (None, name)
