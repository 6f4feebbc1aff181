"""Walking JSON Schemas: which keyword holds subschemas, what is reachable, what is wrong with one.

Knows the keywords of draft 2020-12 and draft 7. All walks are iterative: depth is the client's choice.
"""

from __future__ import annotations

import json
import math
import threading
from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any, Generic, TypeVar
from urllib.parse import unquote

from dovetail.contracts.errors import RequestError
from dovetail.sdk.schemas.keywords import COMPANIONS, DEFINITIONS, HOLDING, LISTS, MAPS, ONE

TYPES = ("array", "boolean", "integer", "null", "number", "object", "string")
_TYPES = frozenset(TYPES)
Node = Mapping[str, Any]


T = TypeVar("T")
MAX_KEPT, MAX_CHARS = 4, 64 * 1024
"""Texts that are kept, and their characters in all: what was made of a longer one goes as the next one comes."""


class LRUMemo(Generic[T]):
    """A function of one text that remembers. Thread-safe."""

    def __init__(self, make: Callable[[str], T]) -> None:
        """Keep nothing yet."""
        self._make = make
        self._lock = threading.Lock()
        self._made: OrderedDict[str, T] = OrderedDict()
        self.__doc__ = make.__doc__

    def __call__(self, source: str) -> T:
        """Return what the function makes of a text; shared, and not to be changed."""
        with self._lock:
            if source in self._made:
                self._made.move_to_end(source)
                return self._made[source]
        made = self._make(source)
        with self._lock:
            self._made[source] = made
            size = sum(map(len, self._made))
            while len(self._made) > 1 and (len(self._made) > MAX_KEPT or size > MAX_CHARS):
                size -= len(self._made.popitem(last=False)[0])
        return made

    def cache_clear(self) -> None:
        """Forget all."""
        with self._lock:
            self._made.clear()


@LRUMemo
def parse(source: str) -> Any:
    """Read a schema's text; every backend asks for the same one, so the result is shared and must not be changed.

    Raises:
        RequestError: It is not JSON, or neither an object nor a boolean.
    """
    try:
        schema = json.loads(source)
    except RecursionError:
        raise RequestError("the JSON schema is nested too deeply", code="grammar_too_complex") from None
    except ValueError as error:
        raise RequestError(f"the JSON schema is not valid JSON: {error}", code="invalid_json_schema") from None
    if not isinstance(schema, (dict, bool)):
        raise RequestError(
            f"a JSON schema is an object, true or false, not {json.dumps(schema)[:60]}", code="invalid_json_schema"
        )
    return schema


def children(node: Node, pointer: str, *, definitions: bool) -> list[tuple[str, Any]]:
    """Return pointer and value of every direct subschema."""
    found: list[tuple[str, Any]] = []
    for key, value in node.items():
        if key not in HOLDING:
            continue
        if key in ONE and isinstance(value, (dict, bool)):
            found.append((f"{pointer}/{key}", value))
        elif key in LISTS and isinstance(value, list):
            found += [(f"{pointer}/{key}/{i}", item) for i, item in enumerate(value)]
        elif key in MAPS and isinstance(value, dict) and (definitions or key not in DEFINITIONS):
            found += [
                (f"{pointer}/{key}/{escape(name)}", item)
                for name, item in value.items()
                if not (key == "dependencies" and isinstance(item, list))
            ]
    return found


def every(schema: Any) -> Iterator[tuple[str, Any]]:
    """Yield pointer and value of the schema and all schemas in it."""
    stack: list[tuple[str, Any]] = [("", schema)]
    while stack:
        pointer, node = stack.pop()
        yield pointer, node
        if isinstance(node, dict) and not HOLDING.isdisjoint(node):
            stack += children(node, pointer, definitions=True)


def reachable(schema: Any) -> Iterator[tuple[str, Node]]:
    """Yield pointer and object of every schema an instance can be judged by: definitions only where referred to."""
    stack: list[tuple[str, Any]] = [("", schema)]
    seen: set[int] = set()
    while stack:
        pointer, node = stack.pop()
        if not isinstance(node, dict) or id(node) in seen:
            continue
        seen.add(id(node))
        yield pointer, node
        if not HOLDING.isdisjoint(node):
            stack += children(node, pointer, definitions=False)
        reference = node.get("$ref")
        if isinstance(reference, str):
            try:
                stack.append((reference.removeprefix("#"), resolve(schema, reference)))
            except KeyError:
                continue  # `check` has judged references


@LRUMemo
def nodes(source: str) -> tuple[tuple[str, Node], ...]:
    """Return what `reachable` yields of a schema's text; shared as `parse`'s result is.

    Raises:
        RequestError: See `parse`.
    """
    return tuple(reachable(parse(source)))


def resolve(schema: Any, reference: str) -> Any:
    """Return what a local reference names: `#`, `#/json/pointer` or `#anchor`.

    Raises:
        KeyError: Nothing.
    """
    if reference in ("#", ""):
        return schema
    if not reference.startswith("#/"):
        for _, node in every(schema):
            if isinstance(node, dict) and reference in (f"#{node.get('$anchor')}", node.get("$id"), node.get("id")):
                return node
        raise KeyError(reference)
    return follow(schema, reference[1:])


def follow(node: Any, pointer: str) -> Any:
    """Return what a JSON pointer that begins with a slash names below a node.

    Raises:
        KeyError: Nothing.
    """
    for part in pointer[1:].split("/"):
        name = unquote(part).replace("~1", "/").replace("~0", "~")
        if isinstance(node, dict):
            node = node[name]
        elif isinstance(node, list) and name.isdecimal() and int(name) < len(node):
            node = node[int(name)]
        else:
            raise KeyError(pointer)
    return node


def leave_out(root: Any, places: Iterable[str]) -> Any:
    """Return a copy of JSON without the keywords at some places, and without what goes with them."""
    wanted = set(places)

    def copy(node: Any, pointer: str) -> Any:
        if isinstance(node, list):
            return [copy(item, f"{pointer}/{index}") for index, item in enumerate(node)]
        if not isinstance(node, dict):
            return node
        inner = {key: f"{pointer}/{escape(key)}" for key in node}
        gone = {key for key in node if inner[key] in wanted}
        gone |= {also for key in gone for also in COMPANIONS.get(key, ())}
        made = {key: copy(value, inner[key]) for key, value in node.items() if key not in gone}
        if "oneOf" in gone and isinstance(node["oneOf"], list):
            options = {"anyOf": copy(node["oneOf"], inner["oneOf"])}
            made = {**made, "allOf": [*made.get("allOf", ()), options]} if "anyOf" in made else made | options
        return made

    return copy(root, "")


def check(schema: Any) -> None:
    """Refuse what is no schema, naming the place: wrong types of keywords.

    Raises:
        RequestError: With the JSON pointer and the keyword.
    """
    if _is_right(schema):
        return
    for pointer, node in every(schema):
        if not isinstance(node, dict):
            if isinstance(node, bool):
                continue
            raise wrong(pointer, "must be a schema: an object, true or false")
        for key, value in node.items():
            why_wrong = _CHECKS.get(key)
            if why_wrong is not None and (why := why_wrong(value)) is not None:
                raise wrong(f"{pointer}/{escape(key)}", why)


def _is_right(schema: Any) -> bool:
    """Whether `check` has nothing to say: the same walk without the places, which most schemas never need."""
    stack = [schema]
    while stack:
        node = stack.pop()
        if isinstance(node, bool):
            continue
        if not isinstance(node, dict):
            return False
        for key, value in node.items():
            if key in _CHECKS and _CHECKS[key](value) is not None:
                return False
            if key in HOLDING:
                stack += _held(key, value)
    return True


def _held(key: str, value: Any) -> Iterable[Any]:
    """Return the schemas that a keyword's value holds."""
    if key in ONE and isinstance(value, (dict, bool)):
        return (value,)
    if key in LISTS and isinstance(value, list):
        return value
    if key in MAPS and isinstance(value, dict):
        parts = value.values()
        return parts if key != "dependencies" else [part for part in parts if not isinstance(part, list)]
    return ()


def _type(value: Any) -> str | None:
    if isinstance(value, str) and value in _TYPES:
        return None
    given = value if isinstance(value, list) else [value]
    if given and _strings(given) and all(name in _TYPES for name in given):
        return None
    return f"must be one or more of {', '.join(TYPES)} (given: {json.dumps(value)[:60]})"


def _bound(value: Any) -> str | None:
    return None if _number(value) else "must be a number"


def _exclusive(value: Any) -> str | None:
    return None if isinstance(value, bool) else _bound(value)  # draft 4 says true


def _step(value: Any) -> str | None:
    return None if _number(value) and value > 0 else "must be a number above 0"


def _count(value: Any) -> str | None:
    return None if _number(value) and value >= 0 and value == int(value) else "must be a whole number, 0 or above"


def _string(value: Any) -> str | None:
    return None if isinstance(value, str) else "must be a string"


def _names(value: Any) -> str | None:
    return None if isinstance(value, list) and _strings(value) else "must be a list of strings"


def _values(value: Any) -> str | None:
    return None if isinstance(value, list) and value else "must be a list of one or more values"


def _flag(value: Any) -> str | None:
    return None if isinstance(value, bool) else "must be true or false"


def _map(value: Any) -> str | None:
    return None if isinstance(value, dict) else "must be an object"


def _items(value: Any) -> str | None:
    return None if isinstance(value, (dict, bool, list)) else "must be a schema"


def _list(value: Any) -> str | None:
    return None if isinstance(value, list) and value else "must be a list of one or more schemas"


def _one(value: Any) -> str | None:
    return None if isinstance(value, (dict, bool)) else "must be a schema: an object, true or false"


_CHECKS: dict[str, Callable[[Any], str | None]] = {
    **dict.fromkeys(ONE, _one),
    **dict.fromkeys(LISTS, _list),
    **dict.fromkeys(MAPS, _map),
    **dict.fromkeys(("minimum", "maximum"), _bound),
    **dict.fromkeys(("exclusiveMinimum", "exclusiveMaximum"), _exclusive),
    **dict.fromkeys(("$anchor", "$dynamicRef", "$id", "$ref", "format", "pattern"), _string),
    **dict.fromkeys(
        [*("maxContains", "maxItems", "maxLength", "maxProperties"),
         *("minContains", "minItems", "minLength", "minProperties")], _count),
    **{"type": _type, "required": _names, "enum": _values, "uniqueItems": _flag, "multipleOf": _step, "items": _items},
}  # fmt: skip
"""By the keyword, what says why a value of it is wrong, or None."""


def _strings(values: list[Any]) -> bool:
    return all(isinstance(value, str) for value in values)


def _number(value: Any) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool) and math.isfinite(value)


def wrong(pointer: str, why: str) -> RequestError:
    """Word a fault of a schema, with its place."""
    keyword = pointer.rsplit("/", 1)[-1]
    return RequestError(f"JSON schema, {pointer or '/'} ({keyword}): {why}", code="invalid_json_schema")


def escape(name: str) -> str:
    """Write a name as a part of a JSON pointer."""
    return name.replace("~", "~0").replace("/", "~1") if "~" in name or "/" in name else name
