"""Random JSON schemas over the whole feature space, and realistic ones, for benchmarks and end-to-end tests."""

from __future__ import annotations

import random
from typing import Any

from dovetail.contracts.tables import table

WORDS = ("name", "age", "city", "id", "tags", "price", "active", "notes", "é", "a b", "kind", "items", "score", "when")


class SchemaMaker:
    """Makes schemas; the same seed gives the same ones.

    Args:
        seed: Of the generator.
        bounded: Keep texts short, so that a small model finishes them.
        exotic: Use keywords that few backends enforce, too.
    """

    def __init__(self, seed: int, *, bounded: bool = False, exotic: bool = True) -> None:
        self._rng = random.Random(seed)
        self._bounded = bounded
        self._exotic = exotic

    def make(self) -> dict[str, Any]:
        """Return a schema of an object."""
        schema = self._object(0)
        if self._rng.random() < 0.2:
            schema["$defs"] = {"shared": self._value(2)}
            schema["properties"]["shared"] = {"$ref": "#/$defs/shared"}
        if self._exotic and self._rng.random() < 0.15:
            key = self._rng.choice(("not", "if", "minProperties", "dependentRequired"))
            extra: dict[str, dict[str, Any]] = {
                "not": {"not": {"required": ["zzz"]}},
                "if": {"if": {"required": ["name"]}, "then": {"required": ["name"]}},
                "minProperties": {"minProperties": 1},
                "dependentRequired": {"dependentRequired": {"zzz": ["yyy"]}},
            }
            schema |= extra[key]
        return schema

    def _object(self, depth: int) -> dict[str, Any]:
        names = self._rng.sample(WORDS, self._rng.randint(1, 3 if self._bounded else 7))
        required = [name for name in names if self._rng.random() < 0.7]
        schema: dict[str, Any] = {
            "type": "object",
            "properties": {name: self._value(depth + 1) for name in names},
            "required": required,
        }
        if self._bounded or self._rng.random() < 0.7:
            schema["additionalProperties"] = False
        return schema

    def _value(self, depth: int) -> dict[str, Any]:
        kinds = ["string", "string", "integer", "number", "boolean", "enum", "null", "pattern", "format"]
        if depth < 3:
            kinds += ["object", "array", "array", "anyOf", "nullable"]
        return getattr(self, f"_{self._rng.choice(kinds)}")(depth)  # type: ignore[no-any-return]

    def _string(self, depth: int) -> dict[str, Any]:
        if self._bounded:
            return {"type": "string", "maxLength": self._rng.randint(1, 8)}
        return {"type": "string", **self._rng.choice(({}, {"minLength": 1}, {"maxLength": 4000}, {"description": "x"}))}

    def _integer(self, depth: int) -> dict[str, Any]:
        low = self._rng.randint(-100, 100)
        if self._bounded:
            return {"type": "integer", "minimum": low, "maximum": low + self._rng.randint(0, 5000)}
        return {"type": "integer", **self._rng.choice(({}, {"minimum": low}, {"multipleOf": self._rng.randint(1, 9)}))}

    def _number(self, depth: int) -> dict[str, Any]:
        return {"type": "number", "minimum": 0, "maximum": 9} if self._bounded else {"type": "number"}

    def _boolean(self, depth: int) -> dict[str, Any]:
        return {"type": "boolean"}

    def _null(self, depth: int) -> dict[str, Any]:
        return {"type": "null"}

    def _enum(self, depth: int) -> dict[str, Any]:
        values = ["red", "green", 'q"uote', "new\nline", "é😀", 1, 2.5, None, True, "x" * 20]
        return {"enum": self._rng.sample(values, self._rng.randint(1, 6))}

    def _pattern(self, depth: int) -> dict[str, Any]:
        patterns = (r"^[a-z]{1,5}$", r"^\d{3}-\d{4}$", r"^(foo|bar)[0-9]{1,2}$", r"^[A-F0-9]{8}$")
        return {"type": "string", "pattern": self._rng.choice(patterns)}

    def _format(self, depth: int) -> dict[str, Any]:
        return {"type": "string", "format": self._rng.choice(("date", "date-time", "uuid", "ipv4", "time"))}

    def _array(self, depth: int) -> dict[str, Any]:
        most = self._rng.randint(1, 3 if self._bounded else 50)
        return {"type": "array", "items": self._value(depth + 1), "maxItems": most}

    def _anyOf(self, depth: int) -> dict[str, Any]:
        return {"anyOf": [self._value(depth + 1), self._value(depth + 1)]}

    def _nullable(self, depth: int) -> dict[str, Any]:
        return {"anyOf": [self._value(depth + 1), {"type": "null"}]}


REALISTIC: list[dict[str, Any]] = table(__file__, "realistic.json")


def schemas(num: int, seed: int = 0, **options: Any) -> list[dict[str, Any]]:
    """Return `num` schemas: realistic ones first, then random ones."""
    maker = SchemaMaker(seed, **options)
    found = [] if options.get("bounded") else list(REALISTIC)
    return (found + [maker.make() for _ in range(num)])[:num]
