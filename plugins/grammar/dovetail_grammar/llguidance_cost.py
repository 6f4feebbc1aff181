"""What llguidance may spend on a grammar at most, told from its source: only cheap ones are compiled in the engine.

The library bounds its lexer's and parser's work, but not how it turns keywords into expressions: a `multipleOf` becomes
an automaton of as many states, an `allOf` of alternatives their product, an object the square of its properties. The
costs below are upper bounds in units of about a microsecond, measured on one core; what they cannot bound is infinite.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from functools import lru_cache
from typing import Any

from dovetail.contracts.errors import RequestError
from dovetail.contracts.grammar import GrammarSpec, Kind
from dovetail.sdk.schemas import schema
from dovetail.sdk.schemas.structural import schemas_with_places
from dovetail_grammar.llguidance_schema import is_inexact, num_states

MAX_INLINE = 32 * 1024
MAX_INLINE_EBNF = 2 * 1024
MAX_COST = 20_000
"""About 20 ms."""
MAX_DEPTH = 40
_REPEAT = re.compile(r"\{(\d+)(?:,(\d*))?\}")
_NUMBERS = frozenset(("minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum"))
_COSTLY = frozenset(
    [
        *(*_NUMBERS, "$ref", "allOf", "anyOf", "const", "enum", "multipleOf", "oneOf", "pattern", "patternProperties"),
        "properties",
    ]
)
"""Keywords that cost more than a schema itself."""
_JOINING = frozenset(("$ref", "allOf", "anyOf", "oneOf"))
NUM_KEPT = 8
"""Grammars whose answers are kept: those that are just being compiled."""
NODE, PER_CHARACTER, PER_DIGIT, PER_STATE = 20, 2, 20, 4


def is_cheap(spec: GrammarSpec) -> bool:
    """Whether compiling a grammar is known to take some milliseconds at most."""
    is_small = len(spec.source) <= (MAX_INLINE_EBNF if spec.kind is Kind.EBNF else MAX_INLINE)
    return is_small and _is_cheap(spec)


@lru_cache(maxsize=NUM_KEPT)
def _is_cheap(spec: GrammarSpec) -> bool:
    """Answer for a small one; the same is asked where to compile it, and again once it is compiled."""
    try:
        return cost_of(spec) <= MAX_COST
    except (ValueError, TypeError, KeyError, AttributeError, RecursionError, RequestError):
        return False  # its compiler will say what is wrong with it


def cost_of(spec: GrammarSpec) -> float:
    """Bound the cost of a grammar; of its size, the kinds without a part that could blow up."""
    if spec.kind is Kind.JSON:
        return SchemaCost(schema.parse(spec.source), schema.nodes(spec.source)).total()
    if spec.kind is Kind.STRUCTURAL:
        value = json.loads(spec.source)
        inner = sum(SchemaCost(found).total() for _, found in schemas_with_places(value))
        return inner + sum(pattern_cost(text) for text in _patterns(value)) + PER_CHARACTER * len(spec.source)
    if spec.kind is Kind.LARK and "%json" in spec.source:
        return math.inf  # the library reads that schema as it stands, and some end its process
    return PER_CHARACTER * len(spec.source) if spec.kind is Kind.CHOICE else pattern_cost(spec.source)


def pattern_cost(pattern: str) -> float:
    """Bound an expression's: repetitions within repetitions multiply."""
    states = float(len(pattern))
    for low, high in _REPEAT.findall(pattern):
        states *= max(int(low), int(high or 0), 1)
    return PER_STATE * states


def _patterns(value: Any) -> Iterator[str]:
    stack = [value]
    while stack:
        item = stack.pop()
        if isinstance(item, Mapping):
            if isinstance(item.get("pattern"), str) and item.get("type") == "regex":
                yield item["pattern"]
            stack += item.values()
        elif isinstance(item, list):
            stack += item


class SchemaCost:
    """Sums up one schema: each part once, and what `allOf` multiplies."""

    def __init__(self, root: Any, nodes: Iterable[tuple[str, Mapping[str, Any]]] | None = None) -> None:
        self._root = root
        self._nodes = schema.reachable(root) if nodes is None else nodes
        self._counts: dict[int, float] = {}

    def total(self) -> float:
        """Return the bound."""
        return sum(NODE if _COSTLY.isdisjoint(node) else self._of(node) for _, node in self._nodes)

    def _of(self, node: Mapping[str, Any]) -> float:
        cost = NODE + len(node.get("properties", ())) ** 2 / 4
        for key in node.keys() & _WRITTEN:
            cost += _WRITTEN[key](node[key])
        if "multipleOf" in node and not _NUMBERS.isdisjoint(node):
            cost *= 4
        count = 1.0 if _JOINING.isdisjoint(node) else self._count_of(node, 0)
        return cost + NODE * (count if count > 1 else 0)

    def _count_of(self, node: Any, depth: int) -> float:
        """How many alternatives a schema may become once its conjunctions are multiplied out."""
        if not isinstance(node, Mapping):
            return 1.0
        if depth > MAX_DEPTH:
            return math.inf
        known = self._counts.get(id(node))
        if known is not None:
            return known
        self._counts[id(node)] = 1.0  # a reference to itself, which the library refuses here
        count = 1.0
        for key in ("anyOf", "oneOf"):
            if node.get(key):
                count *= sum(self._count_of(option, depth + 1) for option in node[key])
        for part in node.get("allOf", ()):
            count *= self._count_of(part, depth + 1)
        reference = node.get("$ref")
        if isinstance(reference, str):
            count *= self._count_of(schema.resolve(self._root, reference), depth + 1)
        if len(node.get("allOf", ())) > 1 or (count > 1 and len(node.keys() & {"anyOf", "oneOf", "allOf", "$ref"}) > 1):
            count *= 4
        self._counts[id(node)] = count
        return count


def _digits(value: float) -> int:
    return len(repr(value)) if abs(value) < 1e25 else 400


def _beyond(value: Any) -> float:
    """No bound where a number may end the process that compiles it: what is prepared for the library has none."""
    return math.inf if is_inexact(value) else 0


_WRITTEN: dict[str, Callable[[Any], float]] = {
    **dict.fromkeys(("enum", "const"), lambda value: PER_CHARACTER * len(json.dumps(value)) + _beyond(value)),
    **dict.fromkeys(_NUMBERS, lambda value: PER_DIGIT * _digits(value)),
    "pattern": pattern_cost,
    "patternProperties": lambda value: sum(pattern_cost(pattern) * 4 for pattern in value),
    "multipleOf": lambda value: PER_STATE * num_states(value),
}
"""What a keyword costs by its value."""
