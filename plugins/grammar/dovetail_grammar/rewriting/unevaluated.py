"""Which properties a schema's keywords in place have evaluated, where that does not depend on the instance."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from dovetail_grammar.rewriting.logic import Logic, Node

MAX_DEPTH = 8


@dataclass(slots=True)
class Evaluated:
    """What was evaluated.

    Attributes:
        names: Of properties.
        patterns: Of others' names.
        all_of_them: Nothing is left.
        seen: Schemas that were looked at, by identity.
    """

    names: dict[str, None] = field(default_factory=dict)
    patterns: dict[str, None] = field(default_factory=dict)
    all_of_them: bool = False
    seen: set[int] = field(default_factory=set)

    def has(self, other: Evaluated) -> bool:
        """Whether something else evaluates nothing beyond this."""
        is_in = other.names.keys() <= self.names.keys() and other.patterns.keys() <= self.patterns.keys()
        return self.all_of_them or (is_in and not other.all_of_them)


class EvaluatedReader:
    """Reads the schemas of one document."""

    def __init__(self, logic: Logic) -> None:
        """Keep what follows references."""
        self._logic = logic

    def evaluated(self, node: Node) -> Evaluated | None:
        """Return what is evaluated for certain in a schema, None where more may be, in some instances.

        Its own `unevaluatedProperties` does not count.
        """
        certain, possible = Evaluated(), Evaluated()
        if not self._collect(node, certain, possible, 0):
            return None
        return certain if certain.has(possible) else None

    def _collect(self, node: Any, certain: Evaluated, possible: Evaluated, depth: int) -> bool:
        """Note what a schema evaluates, and may evaluate; returns whether that can be told."""
        if not isinstance(node, dict) or id(node) in certain.seen:
            return True
        certain.seen.add(id(node))
        if depth > MAX_DEPTH or node.get("$ref") == "#":
            return False
        certain.names |= dict.fromkeys(node.get("properties", ()))
        certain.patterns |= dict.fromkeys(node.get("patternProperties", ()))
        if "additionalProperties" in node or (depth and "unevaluatedProperties" in node):
            certain.all_of_them = True
        parts = list(node.get("allOf", ()))
        if "$ref" in node:
            target = self._logic.followed({"$ref": node["$ref"]})
            if isinstance(target, dict) and target == {"$ref": node["$ref"]}:
                return False
            parts.append(target)
        if not all(self._collect(part, certain, possible, depth + 1) for part in parts):
            return False
        options = [option for key in ("anyOf", "oneOf") for option in node.get(key, ())]
        options += [node[key] for key in ("if", "then", "else") if key in node]
        options += list(node.get("dependentSchemas", {}).values())
        return all(self._collect(option, possible, possible, depth + 1) for option in options)
