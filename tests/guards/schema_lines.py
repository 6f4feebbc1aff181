"""JSON schemas as lines: each field by its path, with its types, bounds, values and default."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from typing import Any

Schema = Mapping[str, Any]
Lines = dict[str, list[str]]
"""What is said of each path; more than one text where branches of a union have a field of the same path."""
BOUNDS = (
    ("minimum", "exclusiveMinimum", "maximum", "exclusiveMaximum", ""),
    ("minLength", "", "maxLength", "", "len "),
    ("minItems", "", "maxItems", "", "len "),
    ("minProperties", "", "maxProperties", "", "names "),
)
"""Keywords of the lower and the upper bound, each inclusive and exclusive, and what stands before them."""


def lines(schema: Schema, definitions: Schema) -> Iterator[tuple[str, str]]:
    """Yield path and text of each field of an object's schema.

    `[]` stands for a list's items, `.*` for any name of an object, and `<user>` for that branch of a union which a
    constant tells from the others. A definition within itself is said to be so and not entered again.
    """
    found: Lines = {}
    for branch, tag, inside in branches(schema, definitions, frozenset()):
        enter(branch, tag, inside, definitions, found)
    for path, texts in found.items():
        yield path.removeprefix("."), " or ".join(dict.fromkeys(texts))


def branches(node: Schema, definitions: Schema, inside: frozenset[str]) -> list[tuple[Schema, str, frozenset[str]]]:
    """Return the branches of a schema, each with the tag of its path and the definitions that it stands in."""
    if "$ref" in node:
        name = node["$ref"].rpartition("/")[2]
        return (
            [({"again": True}, "", inside)]
            if name in inside
            else branches(definitions[name], definitions, inside | {name})
        )
    parts = [part for union in ("anyOf", "oneOf", "allOf") for part in node.get(union, ())]
    if not parts:
        return [(node, "", inside)]
    found = [one for part in parts for one in branches(part, definitions, inside)]
    if sum("properties" in branch for branch, _, _ in found) < 2:
        return found
    return [(branch, tag or constant(branch), deeper) for branch, tag, deeper in found]


def constant(branch: Schema) -> str:
    """Return the tag of a branch: the constant of its first field that has one."""
    for value in branch.get("properties", {}).values():
        if "const" in value:
            return f"<{value['const']}>"
    return ""


def enter(branch: Schema, path: str, inside: frozenset[str], definitions: Schema, found: Lines) -> None:
    """Note the fields of one branch: of an object its names, of a list what its items hold."""
    for name, value in branch.get("properties", {}).items():
        field(value, f"{path}.{name}", inside, definitions, found, is_required=name in branch.get("required", ()))
    if isinstance(branch.get("additionalProperties"), Mapping):
        field(branch["additionalProperties"], f"{path}.*", inside, definitions, found)
    if isinstance(branch.get("items"), Mapping):
        field(branch["items"], f"{path}[]", inside, definitions, found)


def field(
    node: Schema, path: str, inside: frozenset[str], definitions: Schema, found: Lines, *, is_required: bool = False
) -> None:
    """Note one field, and what is below it."""
    parts = branches(node, definitions, inside)
    text = " | ".join(dict.fromkeys(text_of(branch) for branch, _, _ in parts))
    if "default" in node:
        text += f" = {json.dumps(node['default'], ensure_ascii=False)}"
    found.setdefault(path, []).append(text + (", required" if is_required else ""))
    for branch, tag, deeper in parts:
        enter(branch, path + tag, deeper, definitions, found)


def text_of(branch: Schema) -> str:
    """Return the type of a branch with its values and bounds."""
    if "again" in branch:
        return "as around it"
    if "const" in branch or "enum" in branch:
        return " | ".join(json.dumps(value) for value in branch.get("enum", [branch.get("const")]))
    words = [str(branch.get("type", "any"))]
    if words == ["object"] and branch.get("additionalProperties") is False:
        words = ["closed object"]
    words += [f"({branch['format']})"] if "format" in branch else []
    for least, above, most, below, unit in BOUNDS:
        low = str(branch[least]) if least in branch else f">{branch[above]}" if above in branch else ""
        high = str(branch[most]) if most in branch else f"<{branch[below]}" if below in branch else ""
        words += [f"{unit}{low}..{high}"] if low or high else []
    words += [f"/{branch['pattern']}/"] if "pattern" in branch else []
    words += ["unique"] if branch.get("uniqueItems") else []
    if "propertyNames" in branch:
        words.append(f"named {text_of(branch['propertyNames'])}")
    return " ".join(words)
