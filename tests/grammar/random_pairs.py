"""Random JSON schemas over every keyword, draft and format, and random texts of instances, in every spelling."""

from __future__ import annotations

import json
import random
import re
from typing import Any

import jsonschema

DRAFTS = {
    "http://json-schema.org/draft-04/schema#": jsonschema.Draft4Validator,
    "http://json-schema.org/draft-06/schema#": jsonschema.Draft6Validator,
    "http://json-schema.org/draft-07/schema#": jsonschema.Draft7Validator,
    "https://json-schema.org/draft/2019-09/schema": jsonschema.Draft201909Validator,
    "https://json-schema.org/draft/2020-12/schema": jsonschema.Draft202012Validator,
}
KEYS = ["a", "b", "é", "c d", "a\nb", 'q"', "s/t", "~"]
VALUES: list[Any] = [0, 1, -2, 7, 1.5, True, False, None, "", "a", "ab", "é", 'q"', "b\\s", [], [1], {}, {"a": 1}]
PATTERNS = ["^a", "b$", "^[a-c]*$", "é", "^a|b$", "^.{2,3}$", "^[^\\n]*$", '^[^"]+$', "^(a|bc)+$", "^\\S*$"]
FORMATS = {
    "date": ["2024-02-29", "2023-02-29", "2024-1-1", "x"],
    "time": ["10:00:00Z", "24:00:00Z", "10:00:00"],
    "date-time": ["2024-02-29T10:00:00Z", "2024-02-30T10:00:00Z", "2024-02-29"],
    "email": ["a@b.de", "a", "@"],
    "ipv4": ["127.0.0.1", "256.1.1.1", "1.1.1"],
    "ipv6": ["::1", "1::2::3", "12345::"],
    "regex": ["a+", "("],
    "uuid": ["123e4567-e89b-12d3-a456-426614174000", "123e4567e89b12d3a456426614174000"],
    "made-up": ["x"],
}
"""Texts of the formats that `jsonschema` can judge by itself, right and wrong ones."""
CHECKER = jsonschema.Draft202012Validator.FORMAT_CHECKER


class Maker:
    """Makes schemas and instances from one seed."""

    def __init__(self, seed: int) -> None:
        self.rng = random.Random(seed)
        self.draft = self.rng.choice(list(DRAFTS))

    @property
    def number(self) -> int:
        """The draft's year, or its number."""
        return next(
            n for text, n in (("04", 4), ("06", 6), ("07", 7), ("2019", 2019), ("2020", 2020)) if text in self.draft
        )

    def schema(self) -> dict[str, Any]:
        """A schema with definitions."""
        makers = [self.object, self.array, self.string, self.numbers]
        definitions = {name: self.rng.choice(makers)(3) for name in ("x", "y z")}  # no references: they could circle
        part = self.part(0)
        made = {"$schema": self.draft, **(part if isinstance(part, dict) else {})}
        if self.number < 2019 and "$ref" in made:
            made = {"$schema": self.draft, "allOf": [{"$ref": made["$ref"]}]}
        return {**made, "definitions": definitions}

    def part(self, depth: int) -> Any:
        """A schema within a schema."""
        rng = self.rng
        if depth > 2 or rng.random() < 0.15:
            return self.leaf(depth)
        makers = [self.object, self.array, self.string, self.numbers, self.logic]
        made: dict[str, Any] = {}
        for maker in rng.sample(makers, rng.choice((1, 1, 1, 2))):
            made |= maker(depth)
        return made

    def leaf(self, depth: int) -> Any:
        """A small schema."""
        rng = self.rng
        kind = rng.randrange(6)
        if kind == 0 and self.number > 4:
            return rng.choice([True, True, False])
        if kind == 1:
            return {"enum": rng.sample(VALUES, rng.randint(1, 3))}
        if kind == 2 and self.number > 4:
            return {"const": rng.choice(VALUES)}
        if kind == 3 and depth < 3:
            return {"$ref": rng.choice(["#/definitions/x", "#/definitions/y%20z"])}
        return {"type": rng.choice(["string", "integer", "boolean", "null", "object", ["string", "null"], "number"])}

    def object(self, depth: int) -> dict[str, Any]:
        """Keywords of objects."""
        rng = self.rng
        names = rng.sample(KEYS, rng.randint(1, 3))
        made: dict[str, Any] = {"type": "object"} if rng.random() < 0.7 else {}
        made["properties"] = {name: self.part(depth + 1) for name in names}
        options = {
            "required": lambda: rng.sample(KEYS[:4], rng.randint(1, 2)),
            "additionalProperties": lambda: rng.choice([False, False, self.part(depth + 1)]),
            "patternProperties": lambda: {rng.choice(["^a", "b$", "é"]): self.part(depth + 1)},
            "minProperties": lambda: rng.randint(0, 3),
            "maxProperties": lambda: rng.randint(1, 3),
        }
        if self.number > 4:
            options["propertyNames"] = lambda: rng.choice(
                [
                    {"pattern": rng.choice(PATTERNS)},
                    {"enum": rng.sample(KEYS, 3)},
                    {"maxLength": 2},
                    {"anyOf": [{"enum": rng.sample(KEYS, 2)}, {"pattern": rng.choice(PATTERNS)}]},
                    {"not": {"enum": rng.sample(KEYS, 2)}},
                ]
            )
        if self.number < 2019:
            options["dependencies"] = lambda: {
                rng.choice(names): rng.choice([[rng.choice(KEYS)], self.part(depth + 2)])
            }
        else:
            options["dependentRequired"] = lambda: {rng.choice(names): rng.sample(KEYS, rng.randint(0, 2))}
            options["dependentSchemas"] = lambda: {rng.choice(names): self.part(depth + 2)}
            options["unevaluatedProperties"] = lambda: rng.choice([False, {"type": "integer"}])
        for key in rng.sample(list(options), rng.randint(0, 3)):
            made[key] = options[key]()
        if "additionalProperties" in made:
            made.pop("unevaluatedProperties", None)  # nothing is left to it, but to the validator of 2019-09
        return made

    def array(self, depth: int) -> dict[str, Any]:
        """Keywords of arrays."""
        rng = self.rng
        made: dict[str, Any] = {"type": "array"} if rng.random() < 0.7 else {}
        if rng.random() < 0.3:
            parts = [self.part(depth + 1) for _ in range(rng.randint(1, 2))]
            rest = rng.choice([False, self.part(depth + 1)])
            made |= (
                {"prefixItems": parts, "items": rest}
                if self.number == 2020
                else {"items": parts, "additionalItems": rest}
            )
        else:
            made["items"] = self.part(depth + 1)
        options = {
            "minItems": lambda: rng.randint(0, 2),
            "maxItems": lambda: rng.randint(0, 3),
            "uniqueItems": lambda: rng.random() < 0.7,
        }
        if self.number > 4:
            options["contains"] = lambda: self.part(depth + 1)
        if self.number > 7:
            options["minContains"] = lambda: rng.randint(0, 2)
        for key in rng.sample(list(options), rng.randint(0, 2)):
            made[key] = options[key]()
        return made

    def string(self, depth: int) -> dict[str, Any]:
        """Keywords of strings."""
        rng = self.rng
        made: dict[str, Any] = {"type": rng.choice(["string", ["string", "integer"]])} if rng.random() < 0.7 else {}
        options: dict[str, Any] = {
            "minLength": lambda: rng.choice([0, 1, 2.0 if self.number > 4 else 2]),
            "maxLength": lambda: rng.randint(1, 4),
            "pattern": lambda: rng.choice(PATTERNS),
            "format": lambda: rng.choice(list(FORMATS)),
        }
        for key in rng.sample(list(options), rng.randint(1, 2)):
            made[key] = options[key]()
        if "format" in made:
            made.pop("pattern", None)
        return made

    def numbers(self, depth: int) -> dict[str, Any]:
        """Keywords of numbers."""
        rng = self.rng
        made: dict[str, Any] = {"type": rng.choice(["integer", "number"])}
        low = rng.randint(-3, 3)
        if rng.random() < 0.5:
            made["minimum"] = low
        if rng.random() < 0.5:
            made["maximum"] = low + rng.choice([0, 1, 4.5])
        if rng.random() < 0.2:
            made["multipleOf"] = rng.choice([1, 2, 0.5, 3])
        if rng.random() < 0.3:
            made |= {"minimum": low, "exclusiveMinimum": True} if self.number == 4 else {"exclusiveMinimum": low}
        return made

    def logic(self, depth: int) -> dict[str, Any]:
        """Keywords that put schemas together."""
        rng = self.rng
        key = rng.choice(["anyOf", "allOf", "oneOf", "oneOf", "not", "if"])
        if key == "not":
            return {
                "not": rng.choice(
                    [
                        self.part(depth + 1),
                        {"required": rng.sample(KEYS[:3], 1)},
                        {"enum": rng.sample([1, "a", "ab", 1.5, True, None, "a+"], 2)},
                        {"pattern": rng.choice(["^(a|bc)$", "^ab", "^a"])},
                        {"properties": {"a": {"enum": ["a", 1]}}},
                    ]
                )
            }
        if key == "if" and self.number >= 7:
            named = {"properties": {rng.choice(KEYS[:3]): {"const": rng.choice([1, "a", "ab", True, 1.5])}}}
            condition = rng.choice([self.part(depth + 1), named, named | {"required": ["a"]}])
            made = {"if": condition, "then": self.part(depth + 1), "else": self.part(depth + 1)}
            made.pop(rng.choice(["then", "else", "x"]), None)
            return made
        key = "anyOf" if key == "if" else key
        if rng.random() < 0.3:
            return {key: [self.tagged(depth + 1) for _ in range(rng.randint(1, 3))]}
        return {key: [self.part(depth + 1) for _ in range(rng.randint(1, 3))]}

    def tagged(self, depth: int) -> dict[str, Any]:
        """An option that others may be told from: by a property's value, a pattern, a length."""
        rng = self.rng
        tag = {"enum": rng.sample([1, 2, "a", "b", "ab", True], 2)}
        return rng.choice(
            [
                {"type": "object", "properties": {"a": tag, "b": self.part(depth)}, "required": ["a"]},
                {"properties": {"a": tag}},
                {"type": "string", "pattern": rng.choice(PATTERNS)},
                {"type": "string", "minLength": rng.randint(0, 2), "maxLength": rng.randint(0, 3)},
                {"enum": rng.sample(["a", "b", "ab", "é", 1, 2, None], 3)},
                {"anyOf": [{"type": "null"}, tag]},
            ]
        )

    def instance(self, schema: Any, depth: int = 0) -> Any:
        """A value that a schema has something to say about, right or wrong."""
        rng = self.rng
        if not isinstance(schema, dict) or depth > 4 or rng.random() < 0.08:
            return rng.choice(VALUES)
        if "enum" in schema and rng.random() < 0.8:
            return rng.choice(schema["enum"])
        if "const" in schema and rng.random() < 0.8:
            return schema["const"]
        for key in ("anyOf", "oneOf", "allOf"):
            if key in schema and rng.random() < 0.4:
                return self.instance(rng.choice(schema[key]), depth + 1)
        if "format" in schema and rng.random() < 0.7:
            return rng.choice(FORMATS[schema["format"]])
        kinds = schema.get("type", rng.choice(["object", "array", "string", "number"]))
        kind = rng.choice(kinds) if isinstance(kinds, list) else kinds
        if "properties" in schema and rng.random() < 0.8:
            kind = "object"
        return self._of_kind(kind, schema, depth)

    def _of_kind(self, kind: str, schema: dict[str, Any], depth: int) -> Any:
        rng = self.rng
        if kind == "object":
            named = schema.get("properties", {})
            made = {name: self.instance(part, depth + 1) for name, part in named.items() if rng.random() < 0.65}
            for name in rng.sample(KEYS, rng.choice((0, 0, 1, 2))):
                made.setdefault(name, self.instance(schema.get("additionalProperties"), depth + 1))
            return made
        if kind == "array":
            items = schema.get("items")
            parts = items if isinstance(items, list) else schema.get("prefixItems", [])
            rest = schema.get("additionalItems") if isinstance(items, list) else items
            return [
                self.instance(parts[i] if i < len(parts) else rest, depth + 1)
                for i in range(rng.choice((0, 1, 1, 2, 3)))
            ]
        if kind == "string":
            return "".join(
                rng.choice(["a", "b", "c", "é", '"', "\\", "\n", "/"]) for _ in range(rng.choice((0, 1, 2, 3, 5)))
            )
        if kind in ("integer", "number"):
            half = rng.randint(-5, 4) + 0.5  # 1.0 is an integer, but not to draft 4
            return rng.choice([schema.get("minimum", 0), schema.get("maximum", 1), rng.randint(-4, 8), half])
        return rng.choice([True, False]) if kind == "boolean" else None

    def text(self, value: Any) -> str:
        """A text of a value: its keys and strings escaped in any way, with blanks anywhere."""
        rng = self.rng
        if isinstance(value, dict):
            inner = [f"{self.text(k)}{self._blank()}:{self._blank()}{self.text(v)}" for k, v in value.items()]
            return "{" + f"{self._blank()},{self._blank()}".join(inner) + "}"
        if isinstance(value, list):
            return "[" + f"{self._blank()},{self._blank()}".join(map(self.text, value)) + "]"
        if not isinstance(value, str):
            return json.dumps(value)
        written = [
            f"\\u{ord(char):04x}"
            if ord(char) < 0x10000 and rng.random() < 0.04
            else json.dumps(char, ensure_ascii=False)[1:-1]
            for char in value
        ]
        return '"' + "".join(written) + '"'

    def _blank(self) -> str:
        return self.rng.choice(["", "", "", " ", "\n  "])


def is_valid(schema: dict[str, Any], value: Any) -> bool:
    """Whether a value conforms, by the draft's own validator, formats included."""
    return bool(DRAFTS[schema["$schema"]](meant(schema), format_checker=CHECKER).is_valid(value))


def meant(schema: Any) -> Any:
    """Write `$` of patterns as Python means what ECMAScript does by it: the end, and not also before a last newline."""
    if isinstance(schema, list):
        return [meant(part) for part in schema]
    if not isinstance(schema, dict):
        return schema
    made = {}
    for key, part in schema.items():
        if key == "pattern" and isinstance(part, str):
            made[key] = _ended(part)
        elif key == "patternProperties" and isinstance(part, dict):
            made[key] = {_ended(name): meant(value) for name, value in part.items()}
        else:
            made[key] = meant(part)
    return made


def _ended(pattern: str) -> str:
    return re.sub(r"(?<!\\)\$", r"\\Z", pattern)
