"""What llguidance enforces of a JSON Schema, and schemas rewritten so that it refuses no more than it must.

The walk is static: it may call FULL what the compiler refuses in the end (an error, and the next way is tried), never
what the compiler would accept and not enforce. Known of the latter kind, found by tests: a pattern whose character
class excludes a quote or a backslash, which their escapes get past; `minProperties` above 1 over keys that are not
listed, as a repeated key counts twice.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Callable, Iterable, Mapping
from typing import Any

from dovetail.contracts.grammar import GrammarSpec, Kind, Support, SupportLevel
from dovetail.sdk.schemas import keywords, schema
from dovetail.sdk.schemas.formats import FORMATS, PATTERNS
from dovetail.sdk.schemas.schema import escape
from dovetail_grammar.gbnf import GbnfError
from dovetail_grammar.patterns import has_control, is_leaky, is_odd, is_unreadable, rewritten, tightened
from dovetail_grammar.schema_backend import LibrarySupport

REFUSED = frozenset(
    [
        "$dynamicAnchor",
        "$dynamicRef",
        "$recursiveAnchor",
        "$recursiveRef",
        "contains",
        "contentEncoding",
        "contentMediaType",
        "dependencies",
        "dependentRequired",
        "dependentSchemas",
        "else",
        "if",
        "maxContains",
        "minContains",
        "not",
        "propertyNames",
        "then",
        "unevaluatedItems",
        "unevaluatedProperties",
        "uniqueItems",
    ]
)
"""Keywords of the drafts that the library does not know."""
_LOOKED_AT = REFUSED | {
    "const",
    "enum",
    "exclusiveMaximum",
    "exclusiveMinimum",
    "format",
    "maxProperties",
    "maximum",
    "minProperties",
    "minimum",
    "multipleOf",
    "pattern",
    "patternProperties",
}
"""Keywords that are not always enforced."""
MAX_WHITESPACE = 20
"""Whitespace characters in a row between JSON tokens: enough for indented JSON, not for a model that runs away."""
STEP, MAX_STEPPED = 1e-6, 10**9
"""How far beyond an exclusive bound numbers begin where it is stepped over; bounds for which floats are that fine."""
_EXCLUSIVE: dict[str, tuple[str, int, Callable[[float, float], float]]] = {
    "exclusiveMinimum": ("minimum", 1, max),
    "exclusiveMaximum": ("maximum", -1, min),
}
MAX_WORK = 40_000
"""What expressions of one schema may take to be written anew (`expressions.terms`): about 0.3 s."""
EXACT = 2**53
"""Whole numbers up to this one are all floats."""
_FURTHER = {"minimum": math.inf, "exclusiveMinimum": math.inf, "maximum": -math.inf, "exclusiveMaximum": -math.inf}
_BOUNDS = frozenset(_FURTHER)
EXCLUSIVE_FAR, INCLUSIVE_FAR, FLOAT_FAR = 9 * 10**15, 10**17, 10**15
"""Bounds beyond these, of integers and of numbers, are refused by the library or taken for others; two of them can end
its process."""
MAX_STATES = 2**32 // 10 - 1
"""States of a divisor's automaton with which the library counts in 32 bits: with more no digit follows."""
_GUIDANCE = "x-guidance"
_REWRITTEN = _BOUNDS | {"pattern", "patternProperties", "format"}
"""Keywords that are written in another way for the library."""
_NUMBERED = re.compile(r"\\u(?:00[01][0-9a-fA-F]|007[fF])|\x7f")
PLAIN_ESCAPES = '"\\bfnrt'
"""Escapes in strings: without those by number no key can be spelled in a second way."""
USUAL_ESCAPES = '"\\nrt'
"""The same where patterns of names are `tightened`: what those leave out must be no name that no pattern finds."""


class SchemaWalk:
    """Finds what is not enforced in one schema."""

    def __init__(self, source: str) -> None:
        self._ignored: list[str] = []
        self._refused: list[str] = []
        self._annotations: list[str] = []
        self._work = 0
        self._states = 1
        self._needs_escapes = needs_escapes(source)
        self._nodes = schema.nodes(source)
        self._has_numbers = self._needs_escapes or not any(is_open(node) for _, node in self._nodes)

    def support(self) -> Support:
        """Return the answer for the whole schema."""
        for pointer, node in self._nodes:
            if not _LOOKED_AT.isdisjoint(node):
                for key in node:
                    self._keyword(pointer, key, node)
            if self._needs_escapes and is_open(node):
                self._ignored.append(f"{pointer}/properties")
        if not self._ignored:
            return Support.full(self._annotations)
        return LibrarySupport(SupportLevel.APPROXIMATE, tuple(self._ignored), refused=tuple(self._refused))

    def _keyword(self, pointer: str, key: str, node: Mapping[str, Any]) -> None:
        where = f"{pointer}/{key}"
        if key in REFUSED or (key in ("const", "enum") and is_inexact(node[key])):
            self._refuse(where)
        elif key == "pattern":
            self._pattern(where, node[key])
        elif key == "multipleOf":
            self._divisor(where, int(num_states(node[key])))
        elif key == "patternProperties":
            for pattern in node[key]:
                self._pattern(f"{where}/{escape(pattern)}", pattern, in_one=True)
        elif key in ("minProperties", "maxProperties"):
            self._count(where, key, node)
        elif key in _BOUNDS:
            if _is_too_far(key, node):
                self._refuse(where)
        elif key == "format" and node[key] not in FORMATS and node[key] not in PATTERNS:
            self._annotations.append(where)

    def _divisor(self, where: str, states: int) -> None:
        """A divisor, with those that may hold beside it."""
        joint = math.lcm(self._states, states)
        if joint > MAX_STATES:
            self._refuse(where)
        else:
            self._states = joint

    def _count(self, where: str, key: str, node: Mapping[str, Any]) -> None:
        """Counts are refused where a property may be missing; a repeated key that is not listed counts twice."""
        required = set(node.get("required", ()))
        if any(name not in required for name, part in node.get("properties", {}).items() if part is not False):
            self._refuse(where)
        elif key == "minProperties" and node[key] - len(required) > 1 and node.get("additionalProperties") is not False:
            self._ignored.append(where)

    def _pattern(self, where: str, pattern: str, *, in_one: bool = False) -> None:
        said, work = rewritten(pattern, in_one=in_one)
        self._work += work
        if is_odd(pattern) or any(map(is_unreadable, said)) or self._work > MAX_WORK:
            self._refuse(where)
        elif any(is_leaky(tightened(part)) for part in said):
            self._ignored.append(where)
        elif not self._has_numbers and any(map(has_control, said)):
            self._refuse(where)

    def _refuse(self, where: str) -> None:
        self._ignored.append(where)
        self._refused.append(where)


def _far(key: str, node: Mapping[str, Any]) -> int:
    """Return up to where the library counts with a bound as it stands in a schema."""
    if node.get("type") != "integer":
        return FLOAT_FAR
    return EXCLUSIVE_FAR if key in _EXCLUSIVE else INCLUSIVE_FAR


def _is_too_far(key: str, node: Mapping[str, Any]) -> bool:
    """Whether all numbers within a bound are beyond that."""
    bound = node[key]
    return bool((bound if _FURTHER[key] > 0 else -bound) > _far(key, node))


def num_states(divisor: float) -> float:
    """Return the states of an automaton that divides by a number: as many as it has without its decimal point."""
    text = f"{divisor:.20f}".rstrip("0").rstrip(".")
    return float(text.replace(".", "").lstrip("0") or 1)


def is_inexact(value: Any) -> bool:
    """Whether a value holds a whole number that no float is, or one beyond `INCLUSIVE_FAR`.

    The library would allow its neighbour instead, or end its process.
    """
    stack = [value]
    while stack:
        item = stack.pop()
        if isinstance(item, (list, dict)):
            stack += item.values() if isinstance(item, dict) else item
        elif isinstance(item, int | float) and abs(item) > EXACT and (abs(item) > INCLUSIVE_FAR or float(item) != item):
            return True
    return False


def _renamed(parts: Mapping[str, Any], write: Callable[[str], str]) -> dict[str, Any]:
    """Write patterns of names in another way; what becomes the same is said of both."""
    made: dict[str, Any] = {}
    for name, part in parts.items():
        known = made.get(write(name))
        made[write(name)] = part if known is None else {"allOf": [known, part]}
    return made


def is_open(node: Mapping[str, Any]) -> bool:
    """Whether an object may have keys beside those that are named, whose own escapes could spell one of these."""
    return ("properties" in node or "patternProperties" in node) and node.get("additionalProperties") is not False


def needs_escapes(source: str) -> bool:
    """Whether a schema's own strings hold a control character that JSON can write as a number only."""
    return ("\\u" in source or "\x7f" in source) and _NUMBERED.search(source) is not None


def spacing(spec: GrammarSpec) -> str:
    """Return the expression of what may stand between JSON tokens."""
    return (
        spec.whitespace
        if spec.whitespace is not None
        else whitespace(MAX_WHITESPACE if spec.max_whitespace is None else spec.max_whitespace)
    )


def prepare_schema(spec: GrammarSpec, between: str) -> str:
    """Return the text of a schema for the library; `between` may stand between JSON tokens."""
    if spec.kind is Kind.JSON_OBJECT:
        return json.dumps(prepare_value({"type": "object"}, between))
    root, nodes = schema.parse(spec.source), [node for _, node in schema.nodes(spec.source)]
    if not isinstance(root, dict) or any(_is_rewritten(node) for node in nodes):
        return json.dumps(prepare_value(root, between, spec.source), ensure_ascii=False)
    options = json.dumps(_options(between, nodes, spec.source))
    comma = "," if root else ""
    return f'{spec.source.rstrip()[:-1]}{comma}"{_GUIDANCE}":{options}}}'


def _is_rewritten(node: Mapping[str, Any]) -> bool:
    """Whether a schema stands in another way in the library's form."""
    if _GUIDANCE in node or "patternProperties" in node:
        return True
    if "format" in node and node["format"] not in FORMATS:
        return True
    if "pattern" in node and not _is_unchanged(node["pattern"]):
        return True
    if "anyOf" in node and sum(_lengths(option) is not None for option in node["anyOf"]) > 1:
        return True
    return not _BOUNDS.isdisjoint(node) and any(
        type(node[key]) is not int or abs(node[key]) > FLOAT_FAR for key in _BOUNDS & node.keys()
    )


def _is_unchanged(pattern: str) -> bool:
    """Whether a pattern is written as it came."""
    parts = rewritten(pattern).parts
    return len(parts) == 1 and tightened(parts[0]) == pattern


def _options(between: str, nodes: Iterable[Mapping[str, Any]], source: str) -> dict[str, Any]:
    """Return the library's options in a schema.

    Args:
        between: What may stand between JSON tokens.
        nodes: The schemas in it.
        source: Its text.
    """
    opened = [node for node in nodes if is_open(node)]
    if not opened or needs_escapes(source):
        return {"whitespace_pattern": between}
    has_patterns = any("patternProperties" in node for node in opened)
    return {"whitespace_pattern": between, "json_allowed_escapes": USUAL_ESCAPES if has_patterns else PLAIN_ESCAPES}


def prepare_value(root: Any, between: str, source: str | None = None) -> Any:
    """Copy a schema for the library: formats as patterns, whitespace bounded, no other spelling of a key.

    The library's own options in a schema (`x-guidance`) are replaced: they could loosen what is enforced.

    Args:
        root: The schema.
        between: What may stand between JSON tokens.
        source: The schema's text, where it is at hand.
    """
    copied: list[dict[str, Any]] = []
    made = {} if root is True else _prepare(root, copied)
    if isinstance(made, dict):
        bounded = [node for node in copied if not _BOUNDS.isdisjoint(node)]
        if bounded and any(map(_has_fraction, bounded)):
            for node in bounded:
                _step_over(node)
        text = source if source is not None else json.dumps(root, ensure_ascii=False)
        made[_GUIDANCE] = _options(between, copied, text)
    return made


def _has_fraction(node: Mapping[str, Any]) -> bool:
    return any(key in node and node[key] % 1 for key in _BOUNDS)


def _step_over(node: dict[str, Any]) -> None:
    """Write exclusive whole bounds as inclusive ones a little further.

    Between such a bound and a fraction before the next whole number (above 1, up to 1.5) the library lets the bound
    itself through; which bounds meet shows only once it has put alternatives together.
    """
    for key, (plain, sign, nearest) in _EXCLUSIVE.items():
        bound = node.get(key)
        if bound is not None and not isinstance(bound, bool) and bound % 1 == 0 and abs(bound) < MAX_STEPPED:
            del node[key]
            further = bound + sign * STEP
            node[plain] = nearest(node.get(plain, further), further)


def _inside(bound: int, further: float) -> int:
    """Return a bound that a float can be, no wider than the given one."""
    found = float(bound)
    is_wider = found < bound if further > 0 else found > bound
    return int(math.nextafter(found, further)) if is_wider else int(found)


def _prepare(root: Any, copied: list[dict[str, Any]]) -> Any:
    """Copy a schema and those in it, noting the copies; depth is bounded, the source was checked."""
    if not isinstance(root, dict):
        return root
    made = dict(root)
    copied.append(made)
    made.pop(_GUIDANCE, None)
    if not keywords.HOLDING.isdisjoint(root):
        for key in root.keys() & keywords.HOLDING:
            made[key] = _prepare_keyword(key, root[key], copied)
    if not _REWRITTEN.isdisjoint(root):
        _rewrite(made, root)
    return made


def _rewrite(made: dict[str, Any], root: Mapping[str, Any]) -> None:
    """Write keywords of one schema as the library reads them."""
    for key, further in _FURTHER.items():
        bound = made.get(key)
        if bound is None or isinstance(bound, bool):
            continue
        if isinstance(bound, float) and bound.is_integer():
            made[key] = bound = int(bound)  # which the library reads to the last digit
        far = _far(key, made)
        if _is_too_far(key, made):
            raise GbnfError(f"{key} is beyond {far:.0e}")
        if abs(bound) > far:
            made[key] = -far if further > 0 else far  # some numbers that conform are not offered then
        elif isinstance(bound, int) and abs(bound) > EXACT:
            made[key] = _inside(bound, further)
    also: list[Any] = []
    if isinstance(made.get("pattern"), str):
        first, *others = map(tightened, rewritten(made["pattern"]).parts)
        made["pattern"] = first
        also += ({"pattern": other} for other in others)
    if "patternProperties" in made:
        made["patternProperties"] = _renamed(
            made["patternProperties"], lambda name: tightened(rewritten(name, in_one=True).parts[0])
        )
    named = made.pop("format", None)
    if named in FORMATS:
        made["format"] = named
    elif named in PATTERNS and "pattern" in made:
        also.append({"pattern": PATTERNS[named]})
    elif named in PATTERNS:
        made["pattern"] = PATTERNS[named]
    if also:
        made["allOf"] = [*made.get("allOf", ()), *also]


def _prepare_keyword(key: str, value: Any, copied: list[dict[str, Any]]) -> Any:
    """Copy a keyword's value."""
    if key in keywords.ONE and isinstance(value, dict):
        return _prepare(value, copied)
    if key in keywords.LISTS and isinstance(value, list):
        options = [_prepare(item, copied) for item in value]
        return merge_strings(options) if key == "anyOf" else options
    if key in keywords.MAPS and isinstance(value, dict):
        return {name: _prepare(part, copied) for name, part in value.items()}
    return value


def merge_strings(options: list[Any]) -> list[Any]:
    """Join alternatives that are strings of certain lengths.

    Two kinds of long strings at once keep the library from its shortcuts: a mask within them costs fifty times as much.
    """
    spans = sorted(span for option in options if (span := _lengths(option)) is not None)
    if len(spans) < 2:
        return options
    joined = [spans[0]]
    for low, high in spans[1:]:
        if low <= joined[-1][1] + 1:
            joined[-1] = (joined[-1][0], max(high, joined[-1][1]))
        else:
            joined.append((low, high))
    strings: list[Any] = [
        {"type": "string", "minLength": int(low)} | ({} if high == math.inf else {"maxLength": int(high)})
        for low, high in joined
    ]
    others = [option for option in options if _lengths(option) is None]
    if joined == [(0, math.inf)]:
        others = [option for option in others if not (isinstance(option, dict) and option.get("type") == "string")]
    return strings + others


def _lengths(option: Any) -> tuple[float, float] | None:
    """Return the lengths of a schema that is nothing but a string of these lengths."""
    if not isinstance(option, dict) or option.get("type") != "string":
        return None
    if any(key not in ("type", "minLength", "maxLength") and key not in keywords.ANNOTATIONS for key in option):
        return None
    low, high = option.get("minLength", 0), option.get("maxLength", math.inf)
    return (low, high) if low <= high else None


def whitespace(most: int) -> str:
    """The pattern of whitespace between JSON tokens."""
    return rf"[ \t\r\n]{{0,{most}}}"
