"""Requests at, within and beyond every bound of the inventory, and broken ones: what a server is asked.

Made of `inventory/routes.txt` as it is on record, so that an old tree and a new one are asked the same. Each request
has a name that says what is wrong with it, and which is drawn follows from that name alone: a field more changes no
other field's requests.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Iterable, Iterator
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple
from urllib.parse import quote

from wishes import WISHES

ROUTES = Path(__file__).parent / "inventory/routes.txt"
SEED = "1"
SHARE = {"type": 0.1, "bound": 0.4}
"""How much of each kind of request is drawn, by the hash of its name; of fields that lie in no other, every bound."""
PAIRS = 6
"""Requests of each body with two mutated fields at once: which is told first is an answer, too."""
MOST_LEN = 4_200
"""Longest text or list that is made: the bounds of whole prompts are not tried."""
USER = [{"role": "user", "content": "Hey"}]
TOOL = {"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}
GOOD: dict[str, dict[str, Any]] = {
    "/abort_request": {"rid": "a"},
    "/v1/batches": {"input_file_id": "file-1", "endpoint": "/v1/chat/completions", "completion_window": "24h"},
    "/v1/chat/completions": {"model": "tiny", "messages": USER},
    "/v1/completions": {"model": "tiny", "prompt": "Hey"},
    "/v1/embeddings": {"model": "tiny", "input": "Hey"},
    "/generate": {"text": "Hey"},
    "/v1/messages/batches": {"requests": [{"custom_id": "a", "params": {}}]},
    "/v1/messages": {"model": "tiny", "max_tokens": 50, "messages": USER},
    "/v1/messages/count_tokens": {"model": "tiny", "messages": USER},
    "/separate_reasoning": {"text": "<think>\nhm\n</think>\n\nHi"},
    "/parse_function_call": {"text": "Hi", "tools": [TOOL]},
    "/start_profile": {},
    "/v1/responses": {"model": "tiny", "input": "Hey", "store": False},
    "/v1/responses/input_tokens": {"model": "tiny", "input": "Hey"},
    "/v1/responses/compact": {"model": "tiny", "input": USER},
    "/v1/conversations": {"items": USER},
    "/v1/conversations/{conversation_id}": {"metadata": {"a": "b"}},
    "/v1/conversations/{conversation_id}/items": {"items": USER},
    "/rerank": {"model": "tiny", "query": "Hey", "documents": ["Ho"]},
    "/classify": {"model": "tiny", "input": "Hey"},
    "/score": {"model": "tiny", "query": "Hey", "items": ["Ho"], "label_token_ids": [39]},
    "/v1/chat/completions/{completion_id}": {"metadata": {"a": "b"}},
    "/tokenize": {"model": "tiny", "prompt": "Hey"},
    "/detokenize": {"model": "tiny", "tokens": [39]},
}
"""A good body for each; of routes that share one, the shortest is asked about its fields."""
TYPES: dict[str, Any] = {
    "null": None, "true": True, "7": 7, "-3": -3, "1.5": 1.5, "0": 0, "text": "text", "digits": "12", "empty": "",
    "list": [], "object": {}, "list of a list": [[]], "list of null": [None], "object of an object": {"a": {}},
}  # fmt: skip
RAW: dict[str, bytes] = {
    "nothing": b"", "a list": b"[]", "a text": b'"a"', "null": b"null", "a number": b"1", "an empty object": b"{}",
    "half an object": b'{"model": "tiny"', "more behind": b"{} {}", "NaN": b'{"temperature": NaN}',
    "a large number": b'{"temperature": 1e400}', "a long number": b'{"seed": ' + b"9" * 5000 + b"}",
    "a lone surrogate": b'{"model": "\\ud800"}', "no UTF-8": b'{"model": "\xff"}',
    "UTF-16": '{"a": 1}'.encode("utf-16"),
    "a mark in front": b"\xef\xbb\xbf{}", "a zero": b'{"model": "\\u0000"}', "many lists": b"[" * 5000,
    "many objects": b'{"a":' * 5000, "a long name": b'{"' + b"a" * 5000 + b'": 1}', "an empty name": b'{"": 1}',
    "many names": b"{" + b",".join(b'"a%d":1' % at for at in range(3000)) + b"}", "single quotes": b"{'a': 1}",
    "a comma behind": b'{"a": 1,}', "a comment": b'{"a": 1} // x',
}  # fmt: skip
JSON = (("content-type", "application/json"),)
HEADERS: dict[str, tuple[tuple[str, str], ...]] = {
    "no media type": (),
    "another media type": (("content-type", "text/plain"),),
    "a form": (("content-type", "application/x-www-form-urlencoded"),),
    "a charset": (("content-type", "application/json; charset=utf-16"),),
    "a long length": (*JSON, ("content-length", "99999999999")),
    "a wrong length": (*JSON, ("content-length", "-1")),
}
UNSTEADY = (
    "/metrics", "/loads", "/v1/loads", "/v1/steps", "/server_info",
    "/get_server_info", "/version", "/v1/usage", "/v1/plugins",
)  # fmt: skip
"""Routes whose replies are of the moment, or of the machine."""
PART = re.compile(r"(<[^>]*>)|(\[\])|\.?([^.\[<]+)")


class Asked(NamedTuple):
    """One request; `name` is unique."""

    name: str
    method: str
    path: str
    body: bytes = b""
    headers: tuple[tuple[str, str], ...] = JSON


class Field(NamedTuple):
    """A field or a parameter of the inventory: its path, and of each branch of its type the words."""

    path: str
    branches: tuple[str, ...]
    is_required: bool


class Body:
    """The fields of one body."""

    def __init__(self) -> None:
        self.fields: dict[str, Field] = {}

    def sample(self, path: str) -> Any:
        """Return a small good value of what stands at a path."""
        branches = self.fields[path].branches if path in self.fields else ("object",)
        words = next((text for text in branches if text != "null"), "null")
        kind, (low, high) = kind_of(words), bounds(words)
        if kind == "enum":
            return json.loads(words)
        if kind == "object":
            return self.object(path)
        if kind == "array":
            return [self.sample(f"{path}[]")] * int(low or 0)
        if kind == "string":
            return "a" * int(low or 1)
        return {"boolean": True, "number": low or high or 1, "integer": int(low or 1)}.get(kind, "a")

    def object(self, path: str) -> dict[str, Any]:
        """Return an object with the fields that are required below a path."""
        own = [field for name, field in self.fields.items() if name.rpartition(".")[0] == path and field.is_required]
        return {field.path.rpartition(".")[2]: self.sample(field.path) for field in own}

    def around(self, path: str, value: Any) -> tuple[str, Any]:
        """Return the first name of a path and what it holds, with a value at the path; `Ellipsis` leaves it out."""
        parts = [tag or items or name for tag, items, name in PART.findall(path)]
        return parts[0], self._within(parts[0], parts[1:], value)

    def _within(self, at: str, parts: list[str], value: Any) -> Any:
        if not parts:
            return value
        part, rest = parts[0], parts[1:]
        if part == "[]":
            return [self._within(f"{at}[]", rest, value)]
        if part.startswith("<"):
            return self._within(at + part, rest, value)
        found = self.object(at) if part != "*" else {}
        inner = self._within(f"{at}.{part}", rest, value)
        if inner is ...:
            found.pop(part, None)
            return found
        return {**found, part if part != "*" else "a": inner}


def kind_of(words: str) -> str:
    """Return the kind of a branch: `enum` for one value."""
    if words[0] in '"{[' or words in ("true", "false") or words[0].isdigit():
        return "enum"
    return words.removeprefix("closed ").split()[0]


def bounds(words: str) -> tuple[float | None, float | None]:
    """Return the least and the most of a branch, in its unit; None for no bound."""
    for word in words.split():
        low, dots, high = word.partition("..")
        if dots:
            return (float(low.strip(">")) if low else None), (float(high.strip("<")) if high else None)
    return None, None


def read(text: str) -> tuple[dict[str, Body], dict[str, str], dict[str, list[Field]]]:
    """Read the record: bodies by their first route, the first route of each with a body, parameters by route."""
    bodies: dict[str, Body] = {}
    firsts: dict[str, str] = {}
    parameters: dict[str, list[Field]] = {}
    for line in text.splitlines():
        what, _, rest = line.partition(" ")
        key, _, facts = rest.partition(": ")
        route = " ".join(key.split()[:2])
        if what == "route" and "json" in facts:
            firsts[route] = facts.partition(", as ")[2] or route
        elif what in ("query", "path", "header") and "[]" not in key:
            parameters.setdefault(route, []).append(field_of(f"{what} {key.split()[2]}", facts))
        elif what == "route":
            parameters.setdefault(route, [])
        elif what == "field":
            path = key.split(" ", 2)[2]
            bodies.setdefault(route, Body()).fields[path] = field_of(path, facts)
    return bodies, firsts, parameters


def field_of(path: str, facts: str) -> Field:
    """Read one line's facts."""
    is_required = facts.endswith(", required")
    texts = [re.sub(r" = [^|]*$", "", text.removesuffix(", required")) for text in facts.split(" or ")]
    return Field(path, tuple(dict.fromkeys(word for text in texts for word in text.split(" | "))), is_required)


def mutations(body: Body, field: Field) -> Iterator[tuple[str, str, Any]]:
    """Yield values for a field: what kind of mutation it is, its name, and the value; `Ellipsis` for none."""
    for name, value in TYPES.items():
        yield "type", name, value
    if field.is_required:
        yield "bound", "left out", ...
    for number, words in enumerate(field.branches):
        for name, value in of_branch(body, field.path, words):
            yield "bound", f"{name}, {number}" if number else name, value


def of_branch(body: Body, path: str, words: str) -> Iterator[tuple[str, Any]]:
    """Yield values at, within and beyond the bounds of one branch."""
    kind, (low, high) = kind_of(words), bounds(words)
    if kind in ("number", "integer"):
        step = 1 if kind == "integer" else 0.001
        for name, value in (("least", low), ("most", high)):
            if value is not None:
                as_kind = int if kind == "integer" else float
                yield f"at {name}", as_kind(value)
                yield f"beyond {name}", as_kind(value) - step if name == "least" else as_kind(value) + step
    elif kind in ("string", "array", "object"):
        ends = (
            ("at least", low),
            ("under least", low and low - 1),
            ("at most", high),
            ("over most", high and high + 1),
        )
        for name, value in ends:
            if value is not None and value <= MOST_LEN:
                yield name, of_len(body, path, kind, int(value))
        if kind == "string" and "/" in words:
            yield "of other characters", "a b\n"
    elif kind == "enum":
        yield f"{words}", json.loads(words)
        yield "no such value", "no-such-value"
    elif kind == "boolean":
        yield "false", False


def of_len(body: Body, path: str, kind: str, length: int) -> Any:
    """Return a text, a list or an object of a length."""
    if kind == "string":
        return "a" * length
    if kind == "array":
        return [body.sample(f"{path}[]") if f"{path}[]" in body.fields else 1] * length
    return {f"a{at}": body.sample(f"{path}.*") if f"{path}.*" in body.fields else 1 for at in range(length)}


def is_drawn(kind: str, name: str) -> bool:
    """Return whether a request of a kind is one of those that are asked."""
    digest = hashlib.sha256(f"{SEED} {name}".encode()).digest()
    return int.from_bytes(digest[:4]) < SHARE[kind] * 2**32


@cache
def all_requests() -> tuple[Asked, ...]:
    """Return every request, by route and name."""
    bodies, firsts, parameters = read(ROUTES.read_text("utf-8"))
    mains = {first: min((route for route in firsts if firsts[route] == first), key=len) for first in firsts.values()}
    # What only reads comes first: lists are still empty.
    found = [one for route, fields in parameters.items() for one in of_parameters(route, fields)]
    found += [one for route, first in firsts.items() for one in of_route(route, mains[first], bodies[first])]
    return tuple(found)


def of_route(route: str, main: str, body: Body) -> Iterator[Asked]:
    """Yield the requests of a route with a body; only the main one of those that share it has those about fields."""
    method, path = route.split()
    good = GOOD[main.split()[1]]
    at = path.replace("{completion_id}", "chatcmpl-1").replace("{conversation_id}", "conv_1")

    def asked(name: str, value: Any) -> Asked:
        return Asked(f"{route} {name}", method, at, value if isinstance(value, bytes) else json.dumps(value).encode())

    yield asked("as it should be", good)
    for name, raw in RAW.items():
        yield asked(f"body: {name}", raw)
    for name, headers in HEADERS.items():
        yield asked(f"header: {name}", good)._replace(headers=headers)
    yield asked("method: PATCH", good)._replace(method="PATCH")
    yield asked("a field twice", json.dumps(good).encode()[:-1] + b', "model": "tiny", "model": "x"}')
    yield asked("an unknown field", {**good, "no_such_field": 1})
    if route == main:
        yield from (asked(name, changed) for name, changed in of_fields(body, good))
        yield from (asked(name, changed) for name, changed in of_pairs(route, body, good))
        for name, wish in WISHES.get(path, {}).items():
            yield asked(f"wish: {name}", {key: value for key, value in {**good, **wish}.items() if value is not ...})


def of_fields(body: Body, good: dict[str, Any]) -> Iterator[tuple[str, Any]]:
    """Yield a body for each mutation of each field that is drawn."""
    for field in body.fields.values():
        for kind, name, value in mutations(body, field):
            text = f"{field.path}: {name}"
            if (kind == "bound" and field.path.isidentifier()) or is_drawn(kind, text):
                yield text, changed(body, good, field, value)
        if is_drawn("type", f"{field.path}: misspelt"):
            yield f"{field.path}: misspelt", changed(body, good, field._replace(path=f"{field.path}x"), 1)


def changed(body: Body, good: dict[str, Any], field: Field, value: Any) -> dict[str, Any]:
    """Return a good body with a value at a field."""
    name, held = body.around(field.path, value)
    return {key: item for key, item in ({**good, name: held}).items() if item is not ...}


def of_pairs(route: str, body: Body, good: dict[str, Any]) -> Iterator[tuple[str, Any]]:
    """Yield bodies with two mutated fields of their own."""
    fields = [field for field in body.fields.values() if re.fullmatch(r"\w+", field.path)]
    for number in range(PAIRS if len(fields) > 1 else 0):
        digest = hashlib.sha256(f"{SEED} {route} {number}".encode()).digest()
        both = fields[digest[0] % len(fields)], fields[digest[1] % len(fields)]
        result, told = good, []
        for place, field in enumerate(both, 2):
            choices = list(mutations(body, field))
            _, name, value = choices[digest[place] % len(choices)]
            result = changed(body, result, field, value)
            told.append(f"{field.path} {name}")
        yield f"pair {number}: {', '.join(told)}", result


def of_parameters(route: str, fields: Iterable[Field]) -> Iterator[Asked]:
    """Yield the requests of a route without a body: as it should be, and with mutated parameters."""
    method, path = route.split()
    plain = re.sub(r"\{\w+\}", "nothing-1", path)
    if path in UNSTEADY:
        return
    yield Asked(f"{route} with no body", method, plain)
    yield Asked(f"{route} an unknown parameter", method, f"{plain}?no_such=1")
    yield Asked(f"{route} method: PUT", "PUT", plain)
    for field in fields:
        where, name = field.path.split()
        for _, text, value in mutations(Body(), field):
            shown = quote(value if isinstance(value, str) else json.dumps(value), safe="") if value is not ... else ""
            if len(shown) > 2000:
                continue
            if where == "path" and shown:
                at, headers = re.sub(r"\{\w+\}", "nothing-1", path.replace(f"{{{name}}}", shown)), JSON
            elif where == "query":
                at, headers = f"{plain}?{name}={shown}", JSON
            else:
                at, headers = plain, (*JSON, (name, shown))
            yield Asked(f"{route} {name}: {text}", method, at, headers=headers)
