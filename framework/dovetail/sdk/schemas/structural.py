"""Structural grammars: free text with constrained parts, in xgrammar's `structural_tag` form.

```json
{"type": "structural_tag",
 "format": {"type": "triggered_tags", "triggers": ["<f"],
            "tags": [{"begin": "<f=get>", "content": {"type": "json_schema", "json_schema": {}}, "end": "</f>"}]}}
```

The older form with `structures` and `triggers` (SGLang, vLLM) is read too. Defined by xgrammar's documentation of
structural tags.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from dovetail.contracts.errors import RequestError
from dovetail.contracts.tables import table
from dovetail.sdk.expressions import ambiguity
from dovetail.sdk.schemas import schema
from dovetail.sdk.schemas.references import check_references

_DATA: dict[str, Any] = table(__file__)
FORMATS: dict[str, dict[str, Any]] = _DATA["formats"]
"""Formats that are read, each with its required fields, by JSON's types, and its optional ones."""
STYLES: list[str] = _DATA["styles"]
_FLAGS = ("at_least_one", "stop_after_first")
_KINDS: Mapping[str, tuple[type, str]] = {
    "array": (list, "a list"),
    "boolean": (bool, "true or false"),
    "integer": (int, "a whole number"),
    "object": (dict, "an object"),
    "string": (str, "a string"),
}
MAX_COUNT = 2**31 - 1


def formats_of(value: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return the outermost format of a structural grammar, in today's form.

    Raises:
        RequestError: It has none.
    """
    if "structures" in value:
        tags = [
            {
                "begin": item.get("begin"),
                "content": {"type": "json_schema", "json_schema": item.get("schema", {})},
                "end": item.get("end"),
            }
            for item in value["structures"]
        ]
        return {"type": "triggered_tags", "triggers": value.get("triggers", []), "tags": tags}
    found = value.get("format")
    if not isinstance(found, Mapping):
        raise _wrong("", 'expected {"type": "structural_tag", "format": {…}} or "structures" with "triggers"')
    return found


def check(value: Any) -> None:
    """Check a structural grammar.

    Raises:
        RequestError: With the place that is wrong.
    """
    if not isinstance(value, Mapping):
        raise _wrong("", "must be an object")
    structures = value.get("structures", [])
    if not isinstance(structures, list) or not all(isinstance(item, Mapping) for item in structures):
        raise _wrong("/structures", "must be a list of objects")
    _check_format(formats_of(value), "/format")


def _check_format(node: Any, where: str) -> None:
    if not isinstance(node, Mapping):
        raise _wrong(where, "must be an object")
    kind = str(node.get("type"))
    if kind not in FORMATS:
        raise _wrong(f"{where}/type", f"must be one of {', '.join(FORMATS)} (given: {kind!r})")
    required, optional = FORMATS[kind]["required"], FORMATS[kind].get("optional", ())
    for name, kinds in required.items():
        if not isinstance(node.get(name), tuple(_KINDS[one][0] for one in kinds)):
            raise _wrong(f"{where}/{name}", f"is required, as {' or '.join(_KINDS[one][1] for one in kinds)}")
    unknown = set(node) - set(required) - set(optional) - {"type"}
    if unknown:
        raise _wrong(f"{where}/{sorted(unknown)[0]}", "is not known here")
    if "json_schema" in node:
        schema.check(node["json_schema"])
        check_references(node["json_schema"])
    if "content" in node:
        _check_format(node["content"], f"{where}/content")
    _check_values(node, where)
    for i, inner in enumerate(node.get("elements", ())):
        _check_format(inner, f"{where}/elements/{i}")
    _check_tags(node, where)


def _check_values(node: Mapping[str, Any], where: str) -> None:
    """Check what the types alone do not say."""
    if node.get("style", "json") not in STYLES:
        raise _wrong(f"{where}/style", f"must be one of {', '.join(STYLES)}")
    excludes = node.get("excludes", [])
    if not isinstance(excludes, list) or not all(isinstance(text, str) and text for text in excludes):
        raise _wrong(f"{where}/excludes", "must be a list of strings that are not empty")
    for name in ("exclude_tokens", "trigger_tokens"):
        tokens = node.get(name, [])
        if not isinstance(tokens, list) or not all(map(_is_token, tokens)):
            raise _wrong(f"{where}/{name}", "must be a list of tokens: ids, or texts that are not empty")
    for name in ("max_tokens", "max_chars", "max_whitespace_cnt"):
        if (most := node.get(name)) is not None and not (_is_whole(most) and 0 <= most <= MAX_COUNT):
            raise _wrong(f"{where}/{name}", f"must be null, or a whole number from 0 to {MAX_COUNT}")
    for name in ("any_order", "loop", *_FLAGS):
        if not isinstance(node.get(name, False), bool):
            raise _wrong(f"{where}/{name}", "must be true or false")
    for name in ("begin", "end"):
        value = node.get(name)
        if isinstance(value, Mapping) and (value.get("type") != "token" or not _is_token(value.get("token"))):
            raise _wrong(f"{where}/{name}", 'must be a text, or {"type": "token", "token": …}')
    if node["type"] == "regex" and (why := ambiguity(node["pattern"])) is not None:
        raise _wrong(f"{where}/pattern", why)
    if node["type"] == "token" and not _is_token(node["token"]):
        raise _wrong(f"{where}/token", "must be an id, or a text that is not empty")
    if node["type"] == "repeat":
        low, high = node["min"], node["max"]
        if not (0 <= low <= MAX_COUNT and (high == -1 or low <= high <= MAX_COUNT)):
            raise _wrong(f"{where}/max", f"must be -1, or from min to {MAX_COUNT}")
    for i, rule in enumerate(node.get("rules", ())):
        is_named = _is_token if node["type"] == "token_dispatch" else _is_text
        if not isinstance(rule, list) or len(rule) != 2 or not is_named(rule[0]):
            what = "a token" if node["type"] == "token_dispatch" else "a text that is not empty"
            raise _wrong(f"{where}/rules/{i}", f"must be {what}, and a format")
        _check_format(rule[1], f"{where}/rules/{i}/1")


def _check_tags(node: Mapping[str, Any], where: str) -> None:
    for name in ("elements", "tags", "triggers", "trigger_tokens", "rules"):
        if name in node and not node[name]:
            raise _wrong(f"{where}/{name}", "must not be empty")
    for i, tag in enumerate(node.get("tags", ())):
        if not isinstance(tag, Mapping):
            raise _wrong(f"{where}/tags/{i}", "must be an object")
        _check_format({**tag, "type": "tag"}, f"{where}/tags/{i}")
        triggers = node.get("triggers")
        if node["type"] == "token_triggered_tags" or isinstance(tag["begin"], Mapping):
            continue
        if triggers is not None and not any(isinstance(t, str) and t and tag["begin"].startswith(t) for t in triggers):
            raise _wrong(f"{where}/tags/{i}/begin", "must begin with one of the triggers")


def _is_text(value: Any) -> bool:
    return isinstance(value, str) and value != ""


def _is_whole(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _is_token(value: Any) -> bool:
    return _is_text(value) or (_is_whole(value) and value >= 0)


def _wrong(where: str, why: str) -> RequestError:
    return RequestError(f"structural_tag, {where or '/'}: {why}", code="invalid_grammar")


def schemas_with_places(root: Any, *, but: str = "") -> Iterator[tuple[str, Any]]:
    """Yield pointer and value of every JSON schema in a structural grammar, but those of a style."""
    stack: list[tuple[str, Any]] = [("", root)]
    while stack:
        pointer, node = stack.pop()
        if isinstance(node, list):
            stack += ((f"{pointer}/{index}", item) for index, item in enumerate(node))
        elif isinstance(node, dict) and not (but and node.get("style") == but):
            for key, value in node.items():
                inner = f"{pointer}/{schema.escape(key)}"
                if key == "json_schema" or (key == "schema" and "begin" in node):
                    yield inner, value
                else:
                    stack.append((inner, value))
