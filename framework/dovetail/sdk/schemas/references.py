"""What a `$ref` names: JSON pointers, anchors and URIs relative to the `$id` around it. Nothing is fetched.

The drafts' own metaschemas are known. A schema is named by where it stands: its JSON pointer in the document, or a URI.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any
from urllib.parse import unquote, urldefrag, urljoin

from dovetail.sdk.schemas import schema
from dovetail.sdk.schemas.keywords import MEANING, draft_of

Node = Mapping[str, Any]
_NAMED = re.compile(r'"(?:\$?id|\$(?:dynamicA|a)nchor)"\s*:\s*"')
REFERENCES = ("$ref", "$recursiveRef", "$dynamicRef")


@dataclass(frozen=True, slots=True)
class ReferencedSchema:
    """A schema that a reference names: it, where it stands, and the URI that its own references start from."""

    node: Any
    pointer: str
    base: str


class References:
    """The references of one document."""

    def __init__(self, root: Any, draft: int | None = None, *, is_named: bool = True) -> None:
        """Note every `$id` (`id` in draft 4, and where no draft is named) and every anchor, where there may be any."""
        self._ids = ("$id", "id") if draft is None or draft <= 4 else ("$id",)
        self._is_alone = draft is not None and draft < 2019  # what stands beside `$ref` says nothing
        self._by_uri: dict[str, ReferencedSchema] = {}
        self._resources: dict[str, ReferencedSchema] = {}
        self._bases: dict[int, str] = {}
        if is_named:
            self._add(root, "", "")
        else:
            self._resources[""] = ReferencedSchema(root, "", "")

    def base_of(self, node: Any) -> str:
        """Return the URI that a schema's references start from."""
        return self._bases.get(id(node), "")

    def resolve(self, reference: str, base: str) -> ReferencedSchema:
        """Return what a reference names.

        Raises:
            KeyError: Nothing.
        """
        uri, fragment = ("", reference[1:]) if not base and reference[:1] == "#" else urldefrag(_join(base, reference))
        if uri not in self._resources:
            self._add_metaschema(uri)
        resource = self._resources.get(uri) or self._resources.get(uri.rstrip("#"))
        if resource is None:
            raise KeyError(reference)
        if not fragment:
            return resource
        if not fragment.startswith("/"):
            return self._by_uri[f"{uri}#{unquote(fragment)}"]
        node = schema.follow(resource.node, fragment)
        return ReferencedSchema(node, resource.pointer + unquote(fragment), self._bases.get(id(node), resource.base))

    def _add(self, root: Any, pointer: str, uri: str) -> None:
        self._resources[uri] = ReferencedSchema(root, pointer, uri)
        stack: list[tuple[str, Any, str]] = [(pointer, root, uri)]
        while stack:
            pointer, node, base = stack.pop()
            if not isinstance(node, dict):
                continue
            given = next((node[key] for key in self._ids if isinstance(node.get(key), str)), None)
            if self._is_alone and "$ref" in node:
                given = None
            if given is not None and (given.startswith("#") and len(given) > 1):
                self._by_uri.setdefault(base + given, ReferencedSchema(node, pointer, base))  # draft 4 to 7: an anchor
            elif given is not None:
                base = urldefrag(_join(base, given))[0]
                self._resources.setdefault(base, ReferencedSchema(node, pointer, base))
            for key in ("$anchor", "$dynamicAnchor"):
                if isinstance(node.get(key), str):
                    self._by_uri.setdefault(f"{base}#{node[key]}", ReferencedSchema(node, pointer, base))
            self._bases[id(node)] = base
            for inner, child in schema.children(node, pointer, definitions=True):
                stack.append((inner, child, base))

    def _add_metaschema(self, uri: str) -> None:
        from jsonschema_specifications import REGISTRY  # type: ignore[import-untyped]  # few schemas need it

        found = REGISTRY.get(uri) or REGISTRY.get(uri + "#")
        if found is not None:
            self._add(found.contents, uri, uri)


def may_refer(source: str) -> bool:
    """Whether a schema's text may hold a reference; most hold none, and need not be searched."""
    return 'ef"' in source or "\\u" in source


def may_name(source: str) -> bool:
    """Whether a schema's text may name a schema by an anchor or a URI, so that pointers are not all there is."""
    return "\\u" in source or _NAMED.search(source) is not None


def check_references(root: Any, *, is_named: bool = True) -> None:
    """Refuse a schema with a reference, where an instance could come to it, that leads nowhere in the document.

    One that leads out of the document is left out later, unless it is all that the schema says.

    Args:
        root: The schema.
        is_named: Whether it may hold names: see `may_name`.

    Raises:
        RequestError: With the place.
    """
    references: References | None = None  # which few schemas need
    stack, seen = [("", root)], set()
    while stack:
        pointer, node = stack.pop()
        if not isinstance(node, dict) or id(node) in seen:
            continue
        seen.add(id(node))
        stack += schema.children(node, pointer, definitions=False)
        for key in REFERENCES:
            if isinstance(node.get(key), str):
                references = references or References(root, draft_of(root), is_named=is_named)
                target = _checked(references, node, key, pointer, is_all=node is root and not MEANING & set(node))
                stack += [] if target is None else [(target.pointer, target.node)]


def _checked(references: References, node: Node, key: str, pointer: str, *, is_all: bool) -> ReferencedSchema | None:
    reference = node[key]
    try:
        found = references.resolve(reference, references.base_of(node))
    except (KeyError, ValueError):
        if reference.startswith("#"):
            raise schema.wrong(f"{pointer}/{key}", f"{reference!r} names nothing in this schema") from None
        if is_all:
            why = f"{reference!r} is not in this schema; nothing is fetched: put it under $defs"
            raise schema.wrong(f"{pointer}/{key}", why) from None
        return None
    if not isinstance(found.node, (dict, bool)):
        raise schema.wrong(f"{pointer}/{key}", f"{reference!r} names no schema")
    return found


def _join(base: str, reference: str) -> str:
    """Join URIs; a base that is no hierarchical URI (`urn:…`) keeps itself before a fragment."""
    if reference.startswith("#"):
        return base + reference
    try:
        return urljoin(base, reference)
    except ValueError:
        return reference
