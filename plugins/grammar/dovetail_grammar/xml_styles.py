"""Arguments as tags, the styles of `json_schema` in structural grammars, told in terms of the other formats.

```
<parameter=city>Paris</parameter>                                              qwen_xml
<parameter name="city">Paris</parameter>                                       minimax_xml
<arg_key>city</arg_key><arg_value>Paris</arg_value>                            glm_xml
<|DSML|parameter name="city" string="true">Paris</|DSML|parameter>             deepseek_xml
<cofl:value name="city" type="raw">Paris</cofl:value>                          cohere_xml
<|open|>argument key="city" type="string"<|sep|>Paris<|close|>argument<|sep|>  kimi_k3_xml
]<]minimax[>[<city>Paris]<]minimax[>[</city>                                   minimax_m3_xml
```

The bars of `deepseek_xml` are wide ones, U+FF5C. Strings stand as they are, other values as JSON; in `cohere_xml` and
`minimax_m3_xml` objects and lists are tags, too. Declared properties come in the schema's order. Defined by xgrammar's
documentation of structural tags (0.2.8).
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping, Sequence
from itertools import count
from typing import Any
from xml.sax.saxutils import escape as escape_xml

from dovetail.sdk.formats.schema_types import types_of
from dovetail.sdk.schemas import keywords, schema
from dovetail.sdk.schemas.keywords import ANNOTATIONS
from dovetail.sdk.schemas.schema import TYPES, escape
from dovetail_grammar.plain_texts import lost_of

Node = dict[str, Any]
SPACE: Node = {"type": "regex", "pattern": r"[ \t\r\n]{0,20}"}
MARK = "]<]minimax[>["
"""Before each tag of `minimax_m3_xml`."""
_HELD = frozenset(("type", "properties", "required", "additionalProperties", "$defs", "definitions"))
_TO_WHOLE = re.compile(r"#(?:$|/(?!\$defs/|definitions/))")
"""References to a schema itself, or to a part of it that is no definition."""
MAX_DEPTH = 16
_QUOTE = {'"': "&quot;"}
ANY_NAME: Node = {"type": "regex", "pattern": "[a-zA-Z_][a-zA-Z0-9_]*"}
"""Of an argument that no schema names."""
_NAMELESS = "\0"
"""Stands for such a name where a tag is written."""
DSML = "\uff5cDSML\uff5c"


def _dsml(name: str, kind: str, gap: str = "") -> tuple[str, str]:
    is_string = "true" if kind == "string" else "false"
    return f'<{DSML}{gap}parameter name="{name}" string="{is_string}">', f"</{DSML}{gap}parameter>"


def _cohere(name: str | None, kind: str) -> tuple[str, str]:
    word = {"string": "raw", "object": "dict", "array": "list"}.get(kind, "json")
    named = "" if name is None else f' name="{escape_xml(name, _QUOTE)}"'
    return f'<cofl:value{named} type="{word}">', "</cofl:value>"


def _kimi(name: str, kind: str) -> tuple[str, str]:
    word = "number" if kind == "integer" else kind
    key = name.replace("&", "&amp;").replace('"', "&quot;")
    return f'<|open|>argument key="{key}" type="{word}"<|sep|>', "<|close|>argument<|sep|>"


STYLES: Mapping[str, Callable[[str, str], tuple[str, str]]] = {
    "qwen_xml": lambda name, _: (f"<parameter={name}>", "</parameter>"),
    "minimax_xml": lambda name, _: (f'<parameter name="{name}">', "</parameter>"),
    "glm_xml": lambda name, _: (f"<arg_key>{name}</arg_key>", "</arg_value>"),
    "deepseek_xml": _dsml,
    "deepseek_v4_1_xml": lambda name, kind: _dsml(name, kind, " "),
    "cohere_xml": _cohere,
    "kimi_k3_xml": _kimi,
    "minimax_m3_xml": lambda name, _: (f"{MARK}<{name}>", f"{MARK}</{name}>"),
}
"""What stands around a value of a name and a type."""
_TYPED = frozenset(("deepseek_xml", "deepseek_v4_1_xml", "cohere_xml", "kimi_k3_xml"))
"""Styles that say what type a value has."""
_NESTED = frozenset(("cohere_xml", "minimax_m3_xml"))


class TaggedArguments:
    """One schema's arguments in one style.

    Attributes:
        lost: Places in the schema of what the tags do not say.
    """

    def __init__(self, root: Any, style: str, *, any_order: bool = False) -> None:
        """Keep what there is; `any_order`: keys come as they like, and are not counted one by one."""
        self.lost: list[str] = []
        self._root: Mapping[str, Any] = _split(root) if isinstance(root, Mapping) else {}
        self._shared = {key: self._root[key] for key in ("$defs", "definitions") if key in self._root}
        self._style, self._any_order = style, any_order

    def format(self) -> Node:
        """Describe the arguments.

        Raises:
            ValueError: The style cannot write values of the schema.
        """
        return self._properties(self._root, "", 0)

    def _properties(self, node: Mapping[str, Any], where: str, depth: int) -> Node:
        if depth > MAX_DEPTH:
            raise ValueError(f"{self._style} is nested too deeply at {where or '/'}")
        self.lost += [f"{where}/{escape(key)}" for key in node if key not in _HELD and key not in ANNOTATIONS]
        required = node.get("required", ())
        declared = node.get("properties", {})
        parts = {
            name: self._sequence(SPACE, self._property(name, part, f"{where}/properties/{escape(name)}", depth))
            for name, part in declared.items()
        }
        if any(name not in parts for name in required):
            self.lost.append(f"{where}/required")
        if not parts and "properties" not in node and node.get("additionalProperties") is not False:
            return self._open(node.get("additionalProperties", True), f"{where}/additionalProperties", depth)
        if not parts:
            return SPACE
        if self._any_order:
            self.lost += [f"{where}/required"] if required else []
            most = node.get("maxProperties", -1)
            num = len([name for name in required if name in parts])
            many: Node = {"type": "repeat", "content": _either([*parts.values()]), "min": num, "max": most}
            return self._sequence(many, SPACE)
        made = [part if name in required else {"type": "optional", "content": part} for name, part in parts.items()]
        return self._sequence(*made, SPACE)

    def _open(self, declared: Any, where: str, depth: int) -> Node:
        """Describe arguments of any name, where no properties are declared."""
        if self._style == "minimax_m3_xml":
            raise ValueError(f"{self._style} needs the properties of the object at {where.rpartition('/')[0] or '/'}")
        one = self._sequence(SPACE, self._property(_NAMELESS, declared, where, depth))
        return self._sequence({"type": "star", "content": one}, SPACE)

    def _property(self, name: str | None, declared: Any, where: str, depth: int) -> Node:
        """Describe one tag: an alternative for each type whose values are written in a way of their own."""
        options = []
        for kind, content in self._values(declared, where, depth):
            begin, end = _cohere(name, kind) if name is None else STYLES[self._style](name, kind)
            before, named, begin = begin.partition(_NAMELESS)
            opened = [_text(before), ANY_NAME] if named else []
            begin = begin if named else before
            if self._style == "glm_xml":
                options.append(self._sequence(*opened, _text(begin), SPACE, _tag("<arg_value>", content, end)))
            else:
                options.append(
                    self._sequence(*opened, _tag(begin, content, end)) if named else _tag(begin, content, end)
                )
        return _either(options)

    def _values(self, declared: Any, where: str, depth: int) -> list[tuple[str, Node]]:
        """Return the types that a value may have, each with what is written."""
        if declared is False:
            raise ValueError(f"{self._style} cannot leave out {where}")
        node = self._followed(declared)
        kinds = set(types_of(declared, self._root) or ())
        options: list[tuple[str, Node]] = []
        if not kinds or "string" in kinds:
            options.append(("string", self._string(node, where)))
            if self._style not in _TYPED and options[0][1]["type"] == "any_text":
                return options  # whatever else there is looks like a string
        others = sorted((kinds or set(TYPES) - {"integer"}) - {"string"})
        if self._style in _NESTED:
            options += self._nested(node, where, others, depth)
            others = [kind for kind in others if kind not in ("object", "array")]
        groups = [[kind] for kind in others] if self._style == "kimi_k3_xml" else [others] if others else []
        return options + [(group[0], self._json(declared, group, is_all=set(group) == kinds)) for group in groups]

    def _string(self, node: Mapping[str, Any], where: str) -> Node:
        values = [node["const"]] if "const" in node else node.get("enum")
        if isinstance(values, list):
            self.lost += [f"{where}/{key}" for key in node if key not in ("type", "const", "enum", *ANNOTATIONS)]
            found = [value for value in values if isinstance(value, str)]
            return _either([_text(value) for value in found]) if found else {"type": "or", "elements": []}
        said = {key: value for key, value in node.items() if key in ("pattern", "format", "minLength", "maxLength")}
        self.lost += [f"{where}/{escape(key)}" for key in node if key not in ("type", *said, *ANNOTATIONS)]
        self.lost += [where + place for place in lost_of(said)]
        held: Node = {"excludes": [MARK]} if self._style == "minimax_m3_xml" else {}
        if not said:
            return {"type": "any_text"} | held
        return {"type": "json_schema", "style": "text", "json_schema": said} | held

    def _nested(self, node: Mapping[str, Any], where: str, kinds: Sequence[str], depth: int) -> list[tuple[str, Node]]:
        options = []
        if "object" in kinds:
            if not node.get("properties"):
                raise ValueError(f"{self._style} needs the properties of the object at {where}")
            options.append(("object", self._properties(node, where, depth + 1)))
        if "array" in kinds:
            if not isinstance(node.get("items"), Mapping):
                raise ValueError(f"{self._style} needs the items of the list at {where}")
            if depth > MAX_DEPTH:
                raise ValueError(f"{self._style} is nested too deeply at {where}")
            name = None if self._style == "cohere_xml" else "item"
            item = self._sequence(SPACE, self._property(name, node["items"], f"{where}/items", depth + 1))
            low, high = int(node.get("minItems", 0)), int(node.get("maxItems", -1))
            many: Node = {"type": "repeat", "content": item, "min": low, "max": high}
            held = ("type", "items", "minItems", "maxItems", *ANNOTATIONS)
            self.lost += [f"{where}/{escape(key)}" for key in node if key not in held]
            options.append(("array", self._sequence(many, SPACE)))
        return options

    def _json(self, declared: Any, kinds: Sequence[str], *, is_all: bool) -> Node:
        """Describe JSON values of some types."""
        if not isinstance(declared, Mapping):
            made: Any = {"type": [*kinds]}
        elif is_all:
            made = {**declared, **self._shared}
        else:
            made = {"allOf": [declared], "type": [*kinds], **self._shared}
        return self._sequence(SPACE, {"type": "json_schema", "json_schema": made}, SPACE)

    def _followed(self, node: Any) -> Mapping[str, Any]:
        """Return the schema that a node which is a reference stands for."""
        for _ in range(MAX_DEPTH):
            if not isinstance(node, Mapping):
                return {}
            if not isinstance(node.get("$ref"), str):
                return node
            try:
                node = schema.resolve(self._root, node["$ref"])
            except KeyError:
                return {}
        return {}

    @staticmethod
    def _sequence(*elements: Node) -> Node:
        return {"type": "sequence", "elements": [*elements]}


def _split(root: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return a schema in which references go to definitions: its values become schemas of their own."""
    made = json.loads(json.dumps(root))
    name = next(name for name in map("root{}".format, count()) if name not in root.get("$defs", {}))
    is_referred = False
    for _, node in schema.every(made):
        given = node.get("$ref") if isinstance(node, dict) else None
        if isinstance(given, str) and _TO_WHOLE.match(given) is not None:
            node["$ref"], is_referred = f"#/$defs/{name}{given[1:]}", True
    if not is_referred:
        return root
    whole = {key: value for key, value in made.items() if key not in keywords.DEFINITIONS}
    return {**made, "$defs": {**made.get("$defs", {}), name: whole}}


def in_any_order(node: Any, where: str = "") -> tuple[Any, list[str]]:
    """Return a schema whose objects take their keys in any order, and the places of what that does not say.

    That keys are required, and come once, is said no more; how many there are at least is.
    """
    if not isinstance(node, Mapping):
        return node, []
    made, lost = dict(node), []

    def inner(part: Any, *names: str) -> Any:
        found, more = in_any_order(part, "/".join((where, *map(escape, names))))
        lost.extend(more)
        return found

    for key, value in node.items():
        if key in keywords.ONE and isinstance(value, Mapping):
            made[key] = inner(value, key)
        elif key in keywords.LISTS and isinstance(value, list):
            made[key] = [inner(part, key, str(index)) for index, part in enumerate(value)]
        elif key in keywords.MAPS and isinstance(value, Mapping):
            made[key] = {name: inner(part, key, name) for name, part in value.items()}
    if "properties" in made:
        named = {f"^{re.escape(name)}$": part for name, part in made.pop("properties").items()}
        made["patternProperties"] = named | made.get("patternProperties", {})
        required = made.pop("required", [])
        if required:
            lost.append(f"{where}/required")
            made["minProperties"] = max(made.get("minProperties", 0), len(set(required)))
    return made, lost


def _text(value: str) -> Node:
    return {"type": "const_string", "value": value}


def _tag(begin: str, content: Node, end: str) -> Node:
    return {"type": "tag", "begin": begin, "content": content, "end": end}


def _either(options: list[Node]) -> Node:
    return options[0] if len(options) == 1 else {"type": "or", "elements": options}
