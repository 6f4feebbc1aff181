"""Where the parts of a rewritten schema stood in the schema as it was given."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, slots=True)
class SchemaOrigin:
    """Where a schema stood: its pointer, and what its keywords were called there.

    Attributes:
        pointer: In the given document.
        names: Keywords that have another name there.
        whole: The schema was made of the keyword at `pointer`: what is in it stood there.
    """

    pointer: str
    names: Mapping[str, str] | None = None
    whole: bool = False

    def keyword(self, parts: Sequence[str]) -> str:
        """Return the pointer of what stands below the schema."""
        if self.whole or not parts:
            return self.pointer
        first = (self.names or {}).get(parts[0], parts[0])
        return "/".join((self.pointer, first, *parts[1:]))


def origin_of(root: Any, places: Mapping[int, SchemaOrigin], pointer: str) -> str:
    """Return where a keyword stood.

    Args:
        root: The rewritten schema.
        places: For schemas in it, by the identity of the object, where they stood; without any, where they do.
        pointer: Of the keyword in `root`, or in a copy of it.
    """
    if not places:
        return pointer
    parts = pointer.split("/")[1:]
    node, best, rest = root, places.get(id(root)), parts
    for index, part in enumerate(parts):
        name = part.replace("~1", "/").replace("~0", "~")
        if name == "anyOf" and isinstance(node, dict) and "anyOf" not in node and "oneOf" in node:
            name = "oneOf"  # what a `oneOf` that cannot be enforced becomes
        if isinstance(node, list):
            node = node[int(name)] if name.isdecimal() and int(name) < len(node) else None
        else:
            node = node.get(name) if isinstance(node, dict) else None
        found = places.get(id(node)) if isinstance(node, dict) else None
        if found is not None:
            best, rest = found, parts[index + 1 :]
    return pointer if best is None else best.keyword(rest)
