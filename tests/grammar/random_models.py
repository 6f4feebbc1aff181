"""Random tools, with the parameters that pydantic writes for a function's model."""

from __future__ import annotations

import datetime
import enum
import ipaddress
import random
import uuid
from collections.abc import Callable
from decimal import Decimal
from typing import Annotated, Any, Literal, Optional, Union

from pydantic import AnyUrl, BaseModel, Field, create_model

WORDS = ["red", "blue", "in progress", "5", "true", "null", "a<b", "don't", "é", 'say "x"', "UP", "3.5", "a\nb"]
NAMES = ["city", "days", "unit", "note", "tags", "when", "limit", "owner", "key_2", "isOpen"]
PATTERNS = ["^[a-z]{2}$", r"^\d{3}-\d{2}$", "^[A-Z][a-z]+$", "[0-9]", r"^\S+$", "^(a|bc)+$", r"\bfoo\b", "^[^<>]*$"]


def tool_of(rng: random.Random, name: str) -> dict[str, Any]:
    """Return a tool as OpenAI writes it, with one to five parameters."""
    parameters = model(rng, 0).model_json_schema()
    return {"type": "function", "function": {"name": name, "description": "A tool.", "parameters": parameters}}


def model(rng: random.Random, depth: int) -> type[BaseModel]:
    """Return a model of random fields."""
    fields: dict[str, Any] = {}
    for name in rng.sample(NAMES, rng.randrange(1, 6 - 2 * min(depth, 2))):
        kind, default = annotation(rng, depth), ...
        if rng.random() < 0.35:
            kind, default = Optional[kind], None  # noqa: UP045 - built at run time
        fields[name] = (kind, Field(default, description="What it is." if rng.random() < 0.5 else None))
    return create_model(f"M{rng.randrange(10**6)}", **fields)


def annotation(rng: random.Random, depth: int) -> Any:
    """Return a field's type."""
    makers = [*PLAIN, _union] if depth > 1 else [*PLAIN, *PLAIN, *DEEP, _union]
    return rng.choice(makers)(rng, depth)


def _string(rng: random.Random, depth: int) -> Any:
    low = rng.choice([None, None, 0, 1, 3])
    high = rng.choice([None, 10, 20, 64, 200, 2000])
    return Annotated[str, Field(min_length=low, max_length=high)]


def _pattern(rng: random.Random, depth: int) -> Any:
    return Annotated[str, Field(pattern=rng.choice(PATTERNS), max_length=rng.choice([None, None, 30]))]


def _enum(rng: random.Random, depth: int) -> Any:
    words = rng.sample(WORDS, rng.randrange(1, 5))
    return enum.Enum(f"E{rng.randrange(10**6)}", {f"m{n}": word for n, word in enumerate(words)}, type=str)


def _literal(rng: random.Random, depth: int) -> Any:
    return Literal[tuple(rng.sample([*WORDS, 1, 2, 3, True], rng.randrange(1, 4)))]


def _number(rng: random.Random, depth: int) -> Any:
    low = rng.choice([None, 0, -5])
    kind = rng.choice([int, int, float])
    return Annotated[kind, Field(ge=low, le=None if low is None else rng.choice([None, low + 9]))]


def _special(rng: random.Random, depth: int) -> Any:
    return rng.choice(
        [
            datetime.date,
            datetime.datetime,
            datetime.time,
            datetime.timedelta,
            uuid.UUID,
            AnyUrl,
            Decimal,
            ipaddress.IPv4Address,
            ipaddress.IPv6Address,
        ]
    )


def _union(rng: random.Random, depth: int) -> Any:
    """Of types that are told apart."""
    options = [str, int, bool, float, _enum(rng, depth), _string(rng, depth), list[int], _pattern(rng, depth)]
    return Union[tuple(rng.sample(options, 2))]  # noqa: UP007 - built at run time


def _list(rng: random.Random, depth: int) -> Any:
    kind = annotation(rng, depth + 1)
    if rng.random() < 0.15:
        return set[rng.choice([str, int])]  # type: ignore[misc]
    return Annotated[list[kind], Field(min_length=rng.choice([None, 1]), max_length=rng.choice([None, 3]))]  # type: ignore[valid-type]


def _mapping(rng: random.Random, depth: int) -> Any:
    return dict[str, rng.choice([int, str, _enum(rng, depth)])]  # type: ignore[misc]


def _tuple(rng: random.Random, depth: int) -> Any:
    return tuple[int, rng.choice([str, bool])]  # type: ignore[misc]


def _nested(rng: random.Random, depth: int) -> Any:
    return model(rng, depth + 1)


def _tagged(rng: random.Random, depth: int) -> Any:
    """A union of models that a field tells apart."""
    made = [
        create_model(f"T{rng.randrange(10**6)}", kind=(Literal[word], ...), value=(kind, ...))  # type: ignore[valid-type]
        for word, kind in (("cat", int), ("dog", str))
    ]
    return Annotated[Union[tuple(made)], Field(discriminator="kind")]  # noqa: UP007 - built at run time


PLAIN: list[Callable[[random.Random, int], Any]] = [
    *(_string, _string, _pattern, _enum, _enum, _literal, _number, _number, _special),
    *(lambda rng, depth: str, lambda rng, depth: bool),
]
DEEP: list[Callable[[random.Random, int], Any]] = [_list, _list, _mapping, _tuple, _nested, _tagged]
