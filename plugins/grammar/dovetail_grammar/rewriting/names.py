"""`propertyNames` in terms of which properties there are: by name, or by pattern."""

from __future__ import annotations

import re
from typing import Any

from dovetail_grammar.rewriting.finder import Finder
from dovetail_grammar.rewriting.logic import Logic, Node

_LENGTHS = frozenset(("minLength", "maxLength"))


class NameRules:
    """Reads the rules of one document."""

    def __init__(self, logic: Logic, finder: Finder) -> None:
        """Keep what follows references and writes opposites, and what finds expressions in names."""
        self._logic = logic
        self._finder = finder

    def said_of(self, node: Node) -> Node | None:
        """Return the keywords that say what a schema's `propertyNames` says.

        Returns:
            None where plain keywords cannot.
        """
        allowed = self._allowed(node["propertyNames"])
        if allowed is None:
            return None
        names, patterns = allowed
        given = node.get("patternProperties", {})
        if given and not patterns:
            return None
        rest, listed = node.get("additionalProperties", True), node.get("properties", {})
        try:
            made: Node = {name: part if self._is_one(name, names, patterns) else False for name, part in listed.items()}
        except ValueError:
            return None
        made |= {name: rest for name in names if name not in listed}
        found: Node = {"properties": made, "additionalProperties": False}
        if given:
            (rule,) = patterns
            found["patternProperties"] = {_all_of([rule, pattern]): part for pattern, part in given.items()}
            patterns = [_neither(rule, list(given))]
        if patterns and rest not in (True, False, {}):
            said = [name for name, part in made.items() if part is not False]
            patterns = [_but_names(pattern, said) for pattern in patterns]
        if patterns and rest is not False:
            found.setdefault("patternProperties", {}).update(dict.fromkeys(patterns, rest))
        return found

    def _is_one(self, name: str, names: list[str], patterns: list[str]) -> bool:
        return name in names or any(self._finder.matches(pattern, name) for pattern in patterns)

    def _allowed(self, rule: Any) -> tuple[list[str], list[str]] | None:
        """Return names, and patterns of names, of which each key is one."""
        rule = self._logic.followed(rule)
        if not isinstance(rule, dict):
            return None
        given = {key: value for key, value in rule.items() if key != "type" or value != "string"}
        names = given.get("enum", [given["const"]] if "const" in given else None)
        if names is not None:
            return ([name for name in names if isinstance(name, str)], []) if len(given) == 1 else None
        if given and set(given) <= _LENGTHS | {"pattern"}:
            sizes = [_of_length(given.get("minLength", 0), given.get("maxLength"))] if _LENGTHS & set(given) else []
            return [], [_all_of([*sizes, *([given["pattern"]] if "pattern" in given else [])])]
        return None


def _all_of(patterns: list[str]) -> str:
    """Write that each of some expressions is found."""
    return patterns[0] if len(patterns) == 1 else "^" + "".join(rf"(?=[\s\S]*(?:{each}))" for each in patterns)


def _neither(pattern: str, others: list[str]) -> str:
    """Write that an expression is found, and none of some others is."""
    return "^" + "".join(rf"(?![\s\S]*(?:{each}))" for each in others) + rf"(?=[\s\S]*(?:{pattern}))"


def _but_names(pattern: str, names: list[str]) -> str:
    """Write an expression that does not match some names: those are said elsewhere."""
    listed = "|".join(re.sub(r"[\^$.|?*+()\[\]{}/\\]", r"\\\g<0>", name) for name in names)
    return rf"^(?!(?:{listed})$)(?=[\s\S]*(?:{pattern}))" if names else pattern


def _of_length(least: int, most: int | None) -> str:
    return rf"^[\s\S]{{{least},{'' if most is None else most}}}$"
