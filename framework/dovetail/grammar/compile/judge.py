"""Whether a text conforms to a JSON Schema. Only for the child process: see `validate`."""

from __future__ import annotations

import json
from typing import Any, NoReturn

from jsonschema import Draft202012Validator, ValidationError

from dovetail.grammar.spec.normal import plain

FORMATS = Draft202012Validator.FORMAT_CHECKER


def is_valid(schema: Any, text: str) -> bool:
    """Whether `text` is JSON that conforms to `schema`, of any draft, formats included. Fetches nothing."""
    try:
        value = json.loads(text, parse_constant=_refuse)
    except (ValueError, RecursionError):
        return False
    validator = Draft202012Validator(plain(schema), format_checker=FORMATS)
    try:
        validator.validate(value)
    except ValidationError:
        return False
    return True


def _refuse(name: str) -> NoReturn:
    """NaN and Infinity are no JSON."""
    raise ValueError(name)
